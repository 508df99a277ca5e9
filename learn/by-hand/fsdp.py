"""How do several processes train a model that is too large for one of them?

Each rank keeps a shard of every weight, and of its gradient and its AdamW moments. Before a layer
computes, the ranks gather the shards of its weight. After the layer has computed, each rank frees
the gathered weight. Each rank has its own samples, as in ddp.py.

    torchrun --standalone --nproc-per-node 2 learn/by-hand/fsdp.py
"""

import os

import torch
import torch.distributed as dist

# Given: the processes.
if os.environ.get("WORLD_SIZE", "1") == "1":  # torchrun sets WORLD_SIZE
    raise SystemExit(f"error: start it as torchrun --standalone --nproc-per-node 2 {__file__}")
dist.init_process_group("gloo")  # gloo sends tensors between CPUs
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.set_default_dtype(torch.float64)  # rounding errors are much smaller than mistakes
sent = []  # the bytes that this rank sends in each collective


# Yours: a training step with the samples of all ranks.
def all_gather(shard):
    """Joins the shards of all ranks to a whole weight."""
    whole = [torch.empty_like(shard) for _ in range(world_size)]
    dist.all_gather(whole, shard)
    sent.append((world_size - 1) * shard.nbytes)  # the shard goes to every other rank
    return torch.cat(whole)


def train(shards, samples):
    """shards[layer] has 8 rows of the weight of a layer. The layers only multiply."""
    # Forward pass: gather, compute, free. x[layer] is the input of a layer, x[-1] is the output.
    x = [samples]
    for shard in shards:
        weight = all_gather(shard)
        x.append(x[-1] @ weight)
        del weight

    # Backward pass: gather, compute, free, reduce-scatter. `grad` is the gradient of the output of
    # a layer. Then it becomes the gradient of the input, the output of the layer before.
    grad = 2 * x[-1] / (world_size * x[-1].numel())  # the loss: the mean square over all samples
    shards.grad = torch.zeros_like(shards)
    for layer in reversed(range(len(shards))):
        weight = all_gather(shards[layer])
        weight_grad = x[layer].T @ grad
        grad = grad @ weight.T
        del weight
        # Each rank gets the sum over all ranks, but only the rows of its own shard.
        dist.reduce_scatter(shards.grad[layer], list(weight_grad.chunk(world_size)))
        sent.append((world_size - 1) * shards.grad[layer].nbytes)  # a part goes to each other rank
    torch.optim.AdamW([shards]).step()  # its moments have the size of the shards
    return {"gradients": shards.grad, "weights": shards}


# Check: one process alone makes the step with all weights and all samples.
def one_process():
    """The function, the data of each rank, and the results that each rank must get."""
    # weights[layer, rank] is a shard. flatten(0, 1) joins the rows of all shards of a layer.
    weights = torch.randn(4, world_size, 8, 8 * world_size).requires_grad_()
    samples = torch.randn(world_size, 2, 8 * world_size)  # samples[rank] are the samples of a rank
    data = [(weights[:, r].detach().clone(), samples[r]) for r in range(world_size)]
    output = samples
    for weight in weights:
        output = output @ weight.flatten(0, 1)
    output.square().mean().backward()
    torch.optim.AdamW([weights]).step()
    shards = zip(weights.grad.unbind(1), weights.detach().unbind(1), strict=True)
    expected = [{"gradients": gradients, "weights": new} for gradients, new in shards]
    return [(train, data, expected)]


torch.manual_seed(0)  # all ranks draw the same random numbers
for function, data, expected in one_process():
    results = function(*data[rank])
    differences = [(results[x] - expected[rank][x]).abs().max() for x in expected[rank]]
    part = f"rank {rank}, {function.__name__}"
    print(f"{part}: {sum(sent)} bytes sent, largest difference {max(differences):.1e}", flush=True)
    sent.clear()
dist.destroy_process_group()
