"""How does a layer multiply in 8 bits, although its weight, input and gradient are fp32 numbers?

A scale makes the largest number of a tensor the largest number of the 8-bit format. The product of
two rounded tensors is divided by both scales. Each rank keeps a shard of the weight in fp32. All
ranks need the same scale for the weight, and gather it in 8 bits.

    torchrun --standalone --nproc-per-node 2 learn/by-hand/float8.py
"""

import os

import torch
import torch.distributed as dist

# Given: the processes.
if os.environ.get("WORLD_SIZE", "1") == "1":  # torchrun sets WORLD_SIZE
    raise SystemExit(f"error: start it as torchrun --standalone --nproc-per-node 2 {__file__}")
dist.init_process_group("gloo")  # gloo sends tensors between CPUs
rank, world_size = dist.get_rank(), dist.get_world_size()
sent = []  # the bytes that this rank sends in each collective
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2  # up to 448, up to 57,344 with fewer digits


# Yours: cast, gather, and multiply.
def cast(x, format, largest=None):
    largest = x.abs().max() if largest is None else largest
    scale = (torch.finfo(format).max / largest.double().clamp(min=1e-12)).float()
    return (x * scale).to(format), scale


def multiply(a, b):  # a GPU multiplies the 8-bit numbers, and then divides by both scales
    return (a[0].float() / a[1]) @ (b[0].float() / b[1])


def layer(shard, x, output_grad):
    largest = shard.abs().max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)  # one scale for all shards
    sent.append(2 * (world_size - 1) * largest.nbytes // world_size)
    rows, scale = cast(shard, E4M3, largest)
    whole = torch.empty(len(rows) * world_size, rows.shape[1], dtype=torch.uint8)
    dist.all_gather_into_tensor(whole, rows.view(torch.uint8))  # a quarter of the bytes of fp32
    sent.append((world_size - 1) * rows.nbytes)
    weight = whole.view(E4M3)
    x = cast(x, E4M3)  # the samples of each rank have a scale of their own
    grad = cast(output_grad, E5M2)  # gradients need more range
    output, input_grad = multiply(x, (weight.T, scale)), multiply(grad, (weight, scale))
    return output, input_grad, multiply((grad[0].T, grad[1]), x)


# Check: one process casts the whole weight. The last line compares with fp32, without rounding.
torch.manual_seed(0)  # all ranks draw the same random numbers
weight, x, output_grad = (torch.randn(n, 16 * world_size) for n in (16 * world_size, 8, 8))
(w, scale), a, g = cast(weight, E4M3), cast(x, E4M3), cast(output_grad, E5M2)
expected = multiply(a, (w.T, scale)), multiply(g, (w, scale)), multiply((g[0].T, g[1]), a)
found = layer(weight.chunk(world_size)[rank].clone(), x, output_grad)
largest = max((y - z).abs().max() for y, z in zip(found, expected, strict=True))
print(f"rank {rank}, layer: {sum(sent)} bytes sent, largest difference {largest:.1e}", flush=True)
error = (found[0] - x @ weight.T).norm() / (x @ weight.T).norm()
print(f"rank {rank}: rounding to 8 bits changes the output by {error:.1%}", flush=True)
dist.destroy_process_group()
