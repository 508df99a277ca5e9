"""How can several processes average their gradients, and send only a few numbers?

Each rank sends only the numbers of its gradient with the largest absolute values, and their
indices. It keeps the other numbers, and adds them to its next gradient. This is called error
feedback. So no number is lost: over all steps, the averages that were sent, plus the numbers that
are still kept, are equal to the sum of the gradients.

    torchrun --standalone --nproc-per-node 2 by-hand/gradient_compression.py
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

weights = torch.randn(2, 16, 16, requires_grad=True)


def gradient_of(samples):
    loss = (torch.tanh(samples @ weights[0]) @ weights[1]).square().mean()
    return torch.autograd.grad(loss, weights)[0].flatten()


sent = []  # the bytes that this rank sends in each all-gather


def all_gather(part):
    """Joins the tensors of all ranks."""
    parts = [torch.empty_like(part) for _ in range(world_size)]
    dist.all_gather(parts, part)
    sent.append((world_size - 1) * part.nbytes)  # the part goes to every other rank
    return torch.cat(parts)


expected = torch.zeros(512)  # one process alone: the sum of the gradients of all steps
averages = torch.zeros(512)  # all ranks together: the sum of the averages of all steps
residual = torch.zeros(512)  # the numbers that this rank has not sent yet
for _ in range(5):
    samples = torch.randn(world_size, 8, 16)
    expected += gradient_of(samples)
    residual += gradient_of(samples[rank])
    indices = residual.abs().topk(32).indices
    values = residual[indices]
    residual[indices] = 0
    # Each rank has chosen its own indices. If two ranks have chosen the same, index_add adds both.
    total = torch.zeros(512).index_add(0, all_gather(indices), all_gather(values))
    average = total / world_size
    averages += average
    weights.data -= 0.1 * average.view_as(weights)

dist.all_reduce(residual, dist.ReduceOp.AVG)  # only for the comparison, so it is not counted
all_reduce_bytes = 5 * 2 * (world_size - 1) * residual.nbytes // world_size
print(f"rank {rank}: an all-reduce of all numbers in each step would send {all_reduce_bytes} bytes")
difference = (averages + residual - expected).abs().max().item()
print(f"rank {rank}: {sum(sent)} bytes sent, largest difference {difference:.1e}")
dist.destroy_process_group()
