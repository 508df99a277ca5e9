"""How do several processes compute one layer together?

The layer is relu(x A) B. Each rank has some columns of A and the same rows of B. With them, it
computes some of the hidden numbers, and from these numbers a summand of the output. The sum over
all ranks is the output. The script has two forms. In the first form, all ranks have all tokens. In
the second form, each rank has its own tokens before and after the layer (sequence parallelism).

    torchrun --standalone --nproc-per-node 2 learn/by-hand/tensor_parallel.py
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


# Yours: a forward and a backward pass. x has 4 rows per rank: 4 tokens of 16 numbers.
def all_gather(part):
    """Joins the tokens of all ranks."""
    parts = [torch.empty_like(part) for _ in range(world_size)]
    dist.all_gather(parts, part)
    sent.append((world_size - 1) * part.nbytes)  # the part goes to every other rank
    return torch.cat(parts)


def reduce_scatter(summand):
    """Adds up the summands of all ranks. Each rank gets the sum for its own tokens."""
    part = torch.empty(4, 16)  # the tokens of one rank
    dist.reduce_scatter(part, list(summand.chunk(world_size)))
    sent.append((world_size - 1) * part.nbytes)  # a part goes to every other rank
    return part


def all_reduce(summand):
    """Adds up the summands of all ranks. `dist.all_reduce` does both steps in one call."""
    return all_gather(reduce_scatter(summand))


def compute(x, A, B, spread, add_up):
    """A forward and a backward pass. The loss is the sum of the squares of the output."""
    # Autograd works inside a rank. Between the ranks, `spread` and `add_up` send tensors.
    tokens = spread(x).requires_grad_()
    summand = torch.relu(tokens @ A) @ B
    y = add_up(summand.detach())
    # The backward pass goes from y to x. Where the forward pass has added up, the backward pass
    # spreads. Where the forward pass has spread, the backward pass adds up.
    grad_y = spread(2 * y)
    grad_tokens, grad_A, grad_B = torch.autograd.grad(summand, [tokens, A, B], grad_y)
    return {"x": add_up(grad_tokens), "A": grad_A, "B": grad_B}


def all_tokens(x, A, B):
    """x has the tokens of all ranks already, so `spread` sends nothing."""
    return compute(x, A, B, spread=torch.nn.Identity(), add_up=all_reduce)


def own_tokens(x, A, B):
    """x has the tokens of this rank. The rank gets the output for its own tokens only."""
    return compute(x, A, B, spread=all_gather, add_up=reduce_scatter)


# Check: one process alone computes the whole layer.
def one_process():
    """The functions, the data of each rank, and the gradients that each rank must get."""
    x = torch.randn(world_size, 4, 16, requires_grad=True)  # x[rank] are the tokens of a rank
    A = [torch.randn(16, 8, requires_grad=True) for _ in range(world_size)]  # columns of each rank
    B = [torch.randn(8, 16, requires_grad=True) for _ in range(world_size)]  # rows of each rank
    (torch.relu(x @ torch.cat(A, dim=1)) @ torch.cat(B, dim=0)).square().sum().backward()
    everybody = [list(range(world_size))] * world_size
    itself = [[r] for r in range(world_size)]
    forms = []
    for form, ranks_with_tokens in ((all_tokens, everybody), (own_tokens, itself)):
        data, expected = [], []
        for r, ranks in enumerate(ranks_with_tokens):
            data.append((x.detach()[ranks].flatten(0, 1), A[r], B[r]))
            expected.append({"x": x.grad[ranks].flatten(0, 1), "A": A[r].grad, "B": B[r].grad})
        forms.append((form, data, expected))
    return forms


torch.manual_seed(0)  # all ranks draw the same random numbers
for function, data, expected in one_process():
    results = function(*data[rank])
    differences = [(results[x] - expected[rank][x]).abs().max() for x in expected[rank]]
    part = f"rank {rank}, {function.__name__}"
    print(f"{part}: {sum(sent)} bytes sent, largest difference {max(differences):.1e}", flush=True)
    sent.clear()
dist.destroy_process_group()
