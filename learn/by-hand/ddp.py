"""How do several processes compute the gradient of one large batch?

All ranks have the same weights, and each rank has its own samples. The gradient of the whole batch
is the mean of the gradients of all ranks. An all-reduce gives this mean to every rank. The first
function sends the gradients after the backward pass. The second function sends them during the
backward pass, in buckets.

    torchrun --standalone --nproc-per-node 2 learn/by-hand/ddp.py
"""

import os

import torch
import torch.distributed as dist

# Given: the processes, and the loss of a small network.
if os.environ.get("WORLD_SIZE", "1") == "1":  # torchrun sets WORLD_SIZE
    raise SystemExit(f"error: start it as torchrun --standalone --nproc-per-node 2 {__file__}")
dist.init_process_group("gloo")  # gloo sends tensors between CPUs
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.set_default_dtype(torch.float64)  # rounding errors are much smaller than mistakes
sent = []  # the bytes that this rank sends in each all-reduce


def loss_of(samples, weights):
    hidden = torch.tanh(samples @ weights[0] @ weights[1])
    return (hidden @ weights[2] @ weights[3]).square().mean()


# Yours: both functions compute the gradients of all samples, from the samples of this rank.
def average(tensor):
    """Starts an all-reduce, which replaces the tensor by its mean over all ranks."""
    # In a ring, each rank sends 1 / world_size of the tensor in each of 2 (world_size - 1) turns.
    sent.append(2 * (world_size - 1) * tensor.nbytes // world_size)
    return dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True)


def gradient_by_gradient(weights, samples):
    """An all-reduce per gradient, after the backward pass."""
    gradients = torch.stack(torch.autograd.grad(loss_of(samples, weights), weights))
    for gradient in gradients:
        average(gradient).wait()
    return {"gradients": gradients}


def bucket_by_bucket(weights, samples):
    """An all-reduce per bucket, during the backward pass. A bucket has two gradients."""
    gradients = torch.zeros(4, 16, 16)
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient  # the backward pass adds the gradient of the weight to these zeros
    buckets = [gradients[0:2], gradients[2:4]]
    requests = []

    def send_bucket(weight):
        """The backward pass calls this function as soon as the gradient of `weight` is complete."""
        # The backward pass goes from the last weight to the first, so the last bucket comes first.
        requests.append(average(buckets.pop()))

    weights[2].register_post_accumulate_grad_hook(send_bucket)  # now 3 and 2 have gradients
    weights[0].register_post_accumulate_grad_hook(send_bucket)  # now 1 and 0 have gradients
    loss_of(samples, weights).backward()
    for request in requests:
        request.wait()
    return {"gradients": gradients}


# Check: one process alone computes the gradients of all samples.
def one_process():
    """The functions, the data of each rank, and the results that each rank must get."""
    weights = [torch.randn(16, 16, requires_grad=True) for _ in range(4)]
    samples = torch.randn(world_size, 8, 16)  # samples[rank] are the samples of a rank
    data = [(weights, own_samples) for own_samples in samples]
    gradients = torch.stack(torch.autograd.grad(loss_of(samples, weights), weights))
    expected = [{"gradients": gradients}] * world_size
    return [(gradient_by_gradient, data, expected), (bucket_by_bucket, data, expected)]


torch.manual_seed(0)  # all ranks draw the same random numbers
for function, data, expected in one_process():
    results = function(*data[rank])
    differences = [(results[x] - expected[rank][x]).abs().max() for x in expected[rank]]
    part = f"rank {rank}, {function.__name__}"
    print(f"{part}: {sum(sent)} bytes sent, largest difference {max(differences):.1e}", flush=True)
    sent.clear()
dist.destroy_process_group()
