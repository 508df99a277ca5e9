"""How can several processes share the tokens of one long sample?

Each rank has its own tokens. Attention needs all tokens of a head, but the heads do not need each
other. So an all-to-all changes the split: before it, each rank has some tokens of all heads. After
it, each rank has all tokens of some heads. Then each rank computes the attention of its heads, and
a second all-to-all changes the split back. ring_attention.py has another solution.

    torchrun --standalone --nproc-per-node 2 by-hand/context_parallel.py
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

# Queries, keys and values. The dimensions are (3, heads, tokens, size of a head).
qkv = torch.randn(3, 2 * world_size, 4 * world_size, 8, requires_grad=True)
HEADS = -3
TOKENS = -2
attention = torch.nn.functional.scaled_dot_product_attention

# One process alone, with all heads and all tokens. The ranks must get the same gradients.
q, k, v = qkv
attention(q, k, v, is_causal=True).square().sum().backward()

sent = []  # the bytes that this rank sends in each all-to-all


def exchange(x, split, join):
    """Each rank had a part of the dimension `join`, and gets a part of the dimension `split`."""
    parts = torch.stack(x.chunk(world_size, dim=split))  # parts[0] goes to rank 0, and so on
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    sent.append((world_size - 1) * parts[0].nbytes)  # a part goes to every other rank
    return torch.cat(tuple(received), dim=join)


# Forward pass. Autograd works inside a rank. Between the ranks, `exchange` sends tensors.
my_tokens = qkv.detach().chunk(world_size, dim=TOKENS)[rank]
my_heads = exchange(my_tokens, split=HEADS, join=TOKENS).requires_grad_()
q, k, v = my_heads
output = attention(q, k, v, is_causal=True)
y = exchange(output.detach(), split=TOKENS, join=HEADS)

# Backward pass: the gradients go the same way back.
grad_y = 2 * y  # the loss is the sum of the squares of y
output.backward(exchange(grad_y, split=HEADS, join=TOKENS))
grad = exchange(my_heads.grad, split=TOKENS, join=HEADS)

difference = (grad - qkv.grad.chunk(world_size, dim=TOKENS)[rank]).abs().max().item()
print(f"rank {rank}: {sum(sent)} bytes sent, largest difference {difference:.1e}")
dist.destroy_process_group()
