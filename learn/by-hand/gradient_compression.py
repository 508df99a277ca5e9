"""How can several processes average their gradients, and send only a few numbers?

Each rank sends only the numbers of its gradient with the largest absolute values, and their
indices. It keeps the other numbers, and adds them to its next gradient. This is called error
feedback. So no number is lost: over all steps, the averages that were sent, plus the numbers that
are still kept, are equal to the sum of the gradients.

    torchrun --standalone --nproc-per-node 2 learn/by-hand/gradient_compression.py
"""

import os

import torch
import torch.distributed as dist

# Given: the processes, and the gradient of a small network.
if os.environ.get("WORLD_SIZE", "1") == "1":  # torchrun sets WORLD_SIZE
    raise SystemExit(f"error: start it as torchrun --standalone --nproc-per-node 2 {__file__}")
dist.init_process_group("gloo")  # gloo sends tensors between CPUs
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.set_default_dtype(torch.float64)  # rounding errors are much smaller than mistakes
sent = []  # the bytes that this rank sends in each all-gather


def gradient_of(weights, samples):
    loss = (torch.tanh(samples @ weights[0]) @ weights[1]).square().mean()
    return torch.autograd.grad(loss, weights)[0].flatten()


# Yours: five steps. Each rank sends 32 of the 512 numbers of its gradient in a step.
def all_gather(part):
    """Joins the tensors of all ranks."""
    parts = [torch.empty_like(part) for _ in range(world_size)]
    dist.all_gather(parts, part)
    sent.append((world_size - 1) * part.nbytes)  # the part goes to every other rank
    return torch.cat(parts)


def train(weights, batches):
    """batches[step] are the samples of this rank in a step."""
    averages = torch.zeros(512)  # the sum of the averages of all steps
    residual = torch.zeros(512)  # the numbers that this rank has not sent yet
    for samples in batches:
        residual += gradient_of(weights, samples)
        indices = residual.abs().topk(32).indices
        values = residual[indices]
        residual[indices] = 0
        # Each rank has chosen its own indices. If two ranks choose the same, index_add adds both.
        total = torch.zeros(512).index_add(0, all_gather(indices), all_gather(values))
        average = total / world_size
        averages += average
        weights.data -= 0.1 * average.view_as(weights)
    return {"averages": averages, "residual": residual, "weights": weights}


# Check: one process alone does the work of all ranks, without sending anything.
def one_process():
    """The function, the data of each rank, and the results that each rank must get."""
    weights = torch.randn(2, 16, 16, requires_grad=True)
    batches = torch.randn(5, world_size, 8, 16)  # batches[step, rank]
    data = [(weights.detach().clone().requires_grad_(), batches[:, r]) for r in range(world_size)]
    gradients = torch.zeros(512)  # the sum of the gradients of all samples of all steps
    kept = torch.zeros(world_size, 512)  # the numbers that each rank has not sent
    for step in batches:
        gradients += gradient_of(weights, step)
        kept += torch.stack([gradient_of(weights, samples) for samples in step])
        chosen = torch.zeros_like(kept)
        chosen.scatter_(1, kept.abs().topk(32).indices, 1)
        weights.data -= 0.1 * (kept * chosen).mean(0).view_as(weights)
        kept *= 1 - chosen
    # No number is lost: what was sent, and what is kept, is the sum of the gradients.
    sums = {"averages": gradients - kept.mean(0), "weights": weights}
    return [(train, data, [sums | {"residual": residual} for residual in kept])]


torch.manual_seed(0)  # all ranks draw the same random numbers
for function, data, expected in one_process():
    results = function(*data[rank])
    differences = [(results[x] - expected[rank][x]).abs().max() for x in expected[rank]]
    part = f"rank {rank}, {function.__name__}"
    print(f"{part}: {sum(sent)} bytes sent, largest difference {max(differences):.1e}", flush=True)
    sent.clear()
dist.destroy_process_group()
