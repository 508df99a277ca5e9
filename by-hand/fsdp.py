"""How do several processes train a model that is too large for one of them?

Each rank keeps a shard of every weight, and of its gradient and its AdamW moments. Before a layer
computes, the ranks gather the shards of its weight. After the layer has computed, each rank frees
the gathered weight. Each rank has its own samples, as in ddp.py.

    torchrun --standalone --nproc-per-node 2 by-hand/fsdp.py
"""

import os

import torch
import torch.distributed as dist

if os.environ.get("WORLD_SIZE", "1") == "1":  # torchrun sets WORLD_SIZE
    raise SystemExit(f"error: start it as torchrun --standalone --nproc-per-node 2 {__file__}")
dist.init_process_group("gloo")  # gloo sends tensors between CPUs
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.set_default_dtype(torch.float64)  # rounding errors are much smaller than mistakes
torch.manual_seed(0)  # all ranks draw the same random numbers

# weights[layer, rank] is a shard, which has 4 rows of the weight of a layer.
weights = torch.randn(2, world_size, 4, 4 * world_size, requires_grad=True)
samples = torch.randn(world_size, 8, 4 * world_size)  # samples[rank] are the samples of this rank
shards = weights[:, rank].detach().clone()  # the shards of this rank, one for each layer

# One process alone makes a training step with all samples. The ranks must get the same gradients
# and the same new weights. flatten(0, 1) joins the rows of all shards.
output = samples @ weights[0].flatten(0, 1) @ weights[1].flatten(0, 1)
output.square().mean().backward()
torch.optim.AdamW([weights]).step()

sent = []  # the bytes that this rank sends in each collective


def all_gather(shard):
    """Joins the shards of all ranks to a whole weight."""
    whole = [torch.empty_like(shard) for _ in range(world_size)]
    dist.all_gather(whole, shard)
    sent.append((world_size - 1) * shard.nbytes)  # the shard goes to every other rank
    return torch.cat(whole)


# Forward pass: gather, compute, free. x[layer] is the input of a layer, and x[2] is the output.
x = [samples[rank]]
for shard in shards:
    weight = all_gather(shard)
    x.append(x[-1] @ weight)
    del weight

# Backward pass: gather, compute, free, reduce-scatter. `grad` is the gradient of the output of a
# layer. Then it becomes the gradient of the input, which is the output of the layer before.
grad = 2 * x[2] / output.numel()  # the loss is the mean of the squares over all samples
shards.grad = torch.zeros_like(shards)
for layer in (1, 0):
    weight = all_gather(shards[layer])
    weight_grad = x[layer].T @ grad
    grad = grad @ weight.T
    del weight
    # Each rank gets the sum over all ranks, but only the rows of its own shard.
    dist.reduce_scatter(shards.grad[layer], list(weight_grad.chunk(world_size)))
    sent.append((world_size - 1) * shards.grad[layer].nbytes)  # a part goes to every other rank
torch.optim.AdamW([shards]).step()  # its moments have the size of the shards

differences = torch.stack([shards - weights[:, rank], shards.grad - weights.grad[:, rank]])
difference = differences.abs().max().item()
print(f"rank {rank}: {sum(sent)} bytes sent, largest difference {difference:.1e}")
dist.destroy_process_group()
