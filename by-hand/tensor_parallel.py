"""How do several processes compute one layer together?

The layer is relu(x A) B. Each rank has some columns of A and the same rows of B. With them, it
computes some of the hidden numbers, and from these numbers a summand of the output. The sum over
all ranks is the output. The script has two forms. In the first form, all ranks have all tokens. In
the second form, each rank has its own tokens before and after the layer (sequence parallelism).

    torchrun --standalone --nproc-per-node 2 by-hand/tensor_parallel.py
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

x = torch.randn(world_size, 4, 16, requires_grad=True)  # x[rank] are the tokens of a rank
A = [torch.randn(16, 8, requires_grad=True) for _ in range(world_size)]  # the columns of each rank
B = [torch.randn(8, 16, requires_grad=True) for _ in range(world_size)]  # the rows of each rank

# One process alone computes the whole layer. Both forms must give the same gradients.
(torch.relu(x @ torch.cat(A, dim=1)) @ torch.cat(B, dim=0)).square().sum().backward()

sent = []  # the bytes that this rank sends in each collective


def all_gather(part):
    """Joins the tokens of all ranks."""
    parts = [torch.empty_like(part) for _ in range(world_size)]
    dist.all_gather(parts, part)
    sent.append((world_size - 1) * part.nbytes)  # the part goes to every other rank
    return torch.cat(parts)


def reduce_scatter(summand):
    """Adds up the summands of all ranks. Each rank gets the sum for its own tokens."""
    part = torch.empty(1, 4, 16)  # the tokens of one rank
    dist.reduce_scatter(part, list(summand.chunk(world_size)))
    sent.append((world_size - 1) * part.nbytes)  # a part goes to every other rank
    return part


def all_reduce(summand):
    """Adds up the summands of all ranks. `dist.all_reduce` does both steps in one call."""
    return all_gather(reduce_scatter(summand))


def compute(name, ranks, spread, add_up):
    """Makes a forward and a backward pass on this rank, which has the tokens of `ranks`."""
    # Autograd works inside a rank. Between the ranks, `spread` and `add_up` send tensors.
    tokens = spread(x[ranks].detach()).requires_grad_()
    summand = torch.relu(tokens @ A[rank]) @ B[rank]
    y = add_up(summand.detach())
    # The backward pass goes from y to x. Where the forward pass has added up, the backward pass
    # spreads. Where the forward pass has spread, the backward pass adds up.
    grad_y = spread(2 * y)  # the loss is the sum of the squares of y
    grad_tokens, grad_A, grad_B = torch.autograd.grad(summand, [tokens, A[rank], B[rank]], grad_y)
    grad_x = add_up(grad_tokens)
    differences = [grad_x - x.grad[ranks], grad_A - A[rank].grad, grad_B - B[rank].grad]
    difference = max(tensor.abs().max().item() for tensor in differences)
    print(f"rank {rank}, {name}: {sum(sent)} bytes sent, largest difference {difference:.1e}")
    sent.clear()


# Form 1: a rank has all tokens already, so `spread` sends nothing.
compute("all tokens", list(range(world_size)), spread=torch.nn.Identity(), add_up=all_reduce)
# Form 2: a rank has its own tokens before the layer, and gets the output for its own tokens only.
compute("own tokens", [rank], spread=all_gather, add_up=reduce_scatter)
dist.destroy_process_group()
