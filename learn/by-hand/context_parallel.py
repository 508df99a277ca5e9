"""How can several processes share the tokens of one long sample?

Each rank has its own tokens. Attention needs all tokens of a head, but the heads do not need each
other. So an all-to-all changes the split: before it, each rank has some tokens of all heads. After
it, each rank has all tokens of some heads. Then each rank computes the attention of its heads, and
a second all-to-all changes the split back. ring_attention.py has another solution.

    torchrun --standalone --nproc-per-node 2 learn/by-hand/context_parallel.py
"""

import os

import torch
import torch.distributed as dist

# Given: the processes, and attention.
if os.environ.get("WORLD_SIZE", "1") == "1":  # torchrun sets WORLD_SIZE
    raise SystemExit(f"error: start it as torchrun --standalone --nproc-per-node 2 {__file__}")
dist.init_process_group("gloo")  # gloo sends tensors between CPUs
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.set_default_dtype(torch.float64)  # rounding errors are much smaller than mistakes
sent = []  # the bytes that this rank sends in each all-to-all
HEADS = -3  # the dimensions of queries, keys and values are (3, heads, tokens, size of a head)
TOKENS = -2
attention = torch.nn.functional.scaled_dot_product_attention


# Yours: attention, forward and backward, with some of the tokens on each rank.
def exchange(x, split, join):
    """Each rank had a part of the dimension `join`, and gets a part of the dimension `split`."""
    parts = torch.stack(x.chunk(world_size, dim=split))  # parts[0] goes to rank 0, and so on
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    sent.append((world_size - 1) * parts[0].nbytes)  # a part goes to every other rank
    return torch.cat(tuple(received), dim=join)


def attend(my_tokens):
    """my_tokens are queries, keys and values of this rank's tokens, with all heads."""
    # Forward pass. Autograd works inside a rank. Between the ranks, `exchange` sends tensors.
    my_heads = exchange(my_tokens, split=HEADS, join=TOKENS).requires_grad_()
    q, k, v = my_heads
    output = attention(q, k, v, is_causal=True)
    y = exchange(output.detach(), split=TOKENS, join=HEADS)
    # Backward pass: the gradients go the same way back.
    grad_y = 2 * y  # the loss is the sum of the squares of y
    output.backward(exchange(grad_y, split=HEADS, join=TOKENS))
    return {"output": y, "gradients": exchange(my_heads.grad, split=TOKENS, join=HEADS)}


# Check: one process alone, with all heads and all tokens.
def one_process():
    """The function, the data of each rank, and the results that each rank must get."""
    qkv = torch.randn(3, 2 * world_size, 4 * world_size, 8, requires_grad=True)
    q, k, v = qkv
    output = attention(q, k, v, is_causal=True)
    output.square().sum().backward()
    data = [(tokens,) for tokens in qkv.detach().chunk(world_size, dim=TOKENS)]
    parts = [x.detach().chunk(world_size, dim=TOKENS) for x in (output, qkv.grad)]
    expected = [{"output": y, "gradients": grad} for y, grad in zip(*parts, strict=True)]
    return [(attend, data, expected)]


torch.manual_seed(0)  # all ranks draw the same random numbers
for function, data, expected in one_process():
    results = function(*data[rank])
    differences = [(results[x] - expected[rank][x]).abs().max() for x in expected[rank]]
    part = f"rank {rank}, {function.__name__}"
    print(f"{part}: {sum(sent)} bytes sent, largest difference {max(differences):.1e}", flush=True)
    sent.clear()
dist.destroy_process_group()
