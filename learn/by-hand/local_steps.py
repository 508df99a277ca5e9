"""How do several data centres train one model, if the link between them is slow?

Each rank trains alone for a round of steps. Then the ranks average how far their weights have
moved, and an outer optimizer moves the weights that all ranks share. So the ranks send one message
per round. AdamW's moments stay on their rank.

    torchrun --standalone --nproc-per-node 2 learn/by-hand/local_steps.py
"""

import os

import torch
import torch.distributed as dist

# Given: the processes, and the steps of a round.
if os.environ.get("WORLD_SIZE", "1") == "1":  # torchrun sets WORLD_SIZE
    raise SystemExit(f"error: start it as torchrun --standalone --nproc-per-node 2 {__file__}")
dist.init_process_group("gloo")  # gloo sends tensors between CPUs
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.set_default_dtype(torch.float64)  # rounding errors are much smaller than mistakes
sent = []  # the bytes that this rank sends in each collective


def train(weights, optimizer, batches):
    """The steps of a round, without any message. The last two dimensions are those of a rank."""
    for batch in batches:
        (batch @ weights).square().mean((-2, -1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


# Yours: rounds of steps on this rank. After a round, the ranks average how far they have moved.
def rounds_of_steps(start, samples):
    """The weights that all ranks share in the end. samples[n, m] is batch m of round n."""
    weights = start.clone().requires_grad_()
    inner = torch.optim.AdamW([weights], lr=0.1)
    shared, momentum = start.clone(), torch.zeros_like(start)
    for batches in samples:
        train(weights, inner, batches)
        gradient = shared - weights.detach()  # a gradient points uphill: the start minus the end
        dist.all_reduce(gradient, dist.ReduceOp.AVG)
        sent.append(2 * (world_size - 1) * gradient.nbytes // world_size)  # in a ring
        momentum = 0.9 * momentum + gradient
        shared -= 0.7 * (gradient + 0.9 * momentum)  # Nesterov momentum
        weights.data.copy_(shared)  # the next round begins with the shared weights
    return {"weights": shared}


# Check: one process trains all replicas, each with its own part of AdamW's moments.
def one_process():
    """The function, the data of each rank, and the results that each rank must get."""
    start = torch.randn(16, 16)  # the weights of the first round
    samples = torch.randn(3, 4, world_size, 8, 16)  # 3 rounds with 4 steps each, for each rank
    replicas = start.repeat(world_size, 1, 1).requires_grad_()
    inner = torch.optim.AdamW([replicas], lr=0.1)
    expected = start.clone().requires_grad_()
    outer = torch.optim.SGD([expected], lr=0.7, momentum=0.9, nesterov=True)
    for batches in samples:
        train(replicas, inner, batches)
        expected.grad = (expected - replicas.mean(0)).detach()
        outer.step()
        replicas.data.copy_(expected)
    data = [(start.clone(), samples[:, :, r]) for r in range(world_size)]
    return [(rounds_of_steps, data, world_size * [{"weights": expected.detach()}])]


torch.manual_seed(0)  # all ranks draw the same random numbers
for function, data, expected in one_process():
    results = function(*data[rank])
    differences = [(results[x] - expected[rank][x]).abs().max() for x in expected[rank]]
    part = f"rank {rank}, {function.__name__}"
    print(f"{part}: {sum(sent)} bytes sent, largest difference {max(differences):.1e}", flush=True)
    sent.clear()
dist.destroy_process_group()
