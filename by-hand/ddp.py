"""How do several processes compute the gradient of one large batch?

All ranks have the same weights, and each rank has its own samples. The gradient of the whole batch
is the mean of the gradients of all ranks. An all-reduce gives this mean to every rank. Part 1 sends
the gradients after the backward pass. Part 2 sends them during the backward pass, in buckets.

    torchrun --standalone --nproc-per-node 2 by-hand/ddp.py
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

weights = [torch.randn(16, 16, requires_grad=True) for _ in range(4)]
samples = torch.randn(world_size, 8, 16)  # samples[rank] are the samples of this rank


def loss_of(x):
    return (torch.tanh(x @ weights[0] @ weights[1]) @ weights[2] @ weights[3]).square().mean()


# One process alone computes the gradients of all samples. Both parts must give the same gradients.
expected = torch.stack(torch.autograd.grad(loss_of(samples), weights))

sent = []  # the bytes that this rank sends in each all-reduce


def average(tensor):
    """Starts an all-reduce, which replaces the tensor by its mean over all ranks."""
    # In a ring, each rank sends 1 / world_size of the tensor in each of 2 (world_size - 1) turns.
    sent.append(2 * (world_size - 1) * tensor.nbytes // world_size)
    return dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True)


def report(name, gradients):
    difference = (gradients - expected).abs().max().item()
    print(f"rank {rank}, {name}: {sum(sent)} bytes sent, largest difference {difference:.1e}")
    sent.clear()


# Part 1: an all-reduce per gradient, after the backward pass.
gradients = torch.stack(torch.autograd.grad(loss_of(samples[rank]), weights))
for gradient in gradients:
    average(gradient).wait()
report("gradient by gradient", gradients)

# Part 2: an all-reduce per bucket, during the backward pass. A bucket is the part of `gradients`
# that belongs to two of the weights.
gradients = torch.zeros(4, 16, 16)
for weight, gradient in zip(weights, gradients, strict=True):
    weight.grad = gradient  # the backward pass adds the gradient of the weight to these zeros
buckets = [gradients[0:2], gradients[2:4]]
requests = []


def send_bucket(weight):
    """The backward pass calls this function as soon as the gradient of `weight` is complete."""
    # The backward pass goes from the last weight to the first, so the last bucket comes first.
    requests.append(average(buckets.pop()))


weights[2].register_post_accumulate_grad_hook(send_bucket)  # now weights 3 and 2 have gradients
weights[0].register_post_accumulate_grad_hook(send_bucket)  # now weights 1 and 0 have gradients
loss_of(samples[rank]).backward()
for request in requests:
    request.wait()
report("bucket by bucket", gradients)
dist.destroy_process_group()
