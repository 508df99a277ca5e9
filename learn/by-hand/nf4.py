"""How does a weight of 16 bits become codes of 4 bits, and a weight again?

A table has 16 numbers from -1 to 1. A block is 64 neighbors in a row of the weight, and its scale
is its largest number. Divided by the scale, each number is replaced by the position of the nearest
number in the table, its code. Two codes share a byte. Blocks lie within rows, so a process that has
some rows also has their scales. The processes gather codes and scales instead of the weight.

    torchrun --standalone --nproc-per-node 2 learn/by-hand/nf4.py
"""

import os

import torch
import torch.distributed as dist

# Given: the processes, a weight, and an input. Pretrained weights are about normally distributed.
if os.environ.get("WORLD_SIZE", "1") == "1":  # torchrun sets WORLD_SIZE
    raise SystemExit(f"error: start it as torchrun --standalone --nproc-per-node 2 {__file__}")
dist.init_process_group("gloo")  # gloo sends tensors between CPUs
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # all ranks draw the same random numbers
weight = (0.02 * torch.randn(32 * world_size, 256)).bfloat16()
x = torch.randn(8, 256).bfloat16()


# Yours: the table, the codes, and the way back.
def make_table():
    # Quantiles of a normal distribution: 8 steps up from 0, and 7 steps down. The outermost ones
    # would be infinite, so both sides begin a little before the end. The authors chose this number.
    end = 0.9677083
    up = torch.special.ndtri(torch.linspace(end, 0.5, 9).double()).float()
    down = torch.special.ndtri(torch.linspace(end, 0.5, 8).double()).float()
    return torch.cat([-down[:-1], up.flip(0)]) / up[0]  # from -1 to 1, with an exact 0


def quantize(weight, table):
    blocks = weight.float().unflatten(-1, (-1, 64))
    scales = blocks.abs().amax(-1, keepdim=True)
    codes = torch.bucketize(blocks * (1 / scales), (table[1:] + table[:-1]) / 2)  # nearest number
    codes = codes.to(torch.uint8).flatten(-2)
    # A scale is one of the weights, so bf16 weights have exact bf16 scales.
    return codes[:, ::2] * 16 + codes[:, 1::2], scales.squeeze(-1).to(weight.dtype)


def dequantize(codes, scales, table):
    pairs = torch.stack([codes >> 4, codes & 15], dim=-1)  # the two codes of each byte
    blocks = table[pairs.int()].flatten(-2).unflatten(-1, (-1, 64))
    return (blocks * scales[..., None]).to(scales.dtype).flatten(-2)  # multiplied in fp32


table = make_table()
rows = weight.chunk(world_size)[rank]
parts = quantize(rows, table)  # each rank quantizes its rows, as FSDP shards them
whole = [torch.empty(len(part) * world_size, part.shape[1], dtype=part.dtype) for part in parts]
for part, gathered in zip(parts, whole, strict=True):
    dist.all_gather_into_tensor(gathered, part)  # 4.25 bits for each weight, instead of 16
y = x @ dequantize(*whole, table).T

# Check: one process quantizes the whole weight.
expected = x @ dequantize(*quantize(weight, table), table).T
sent = (world_size - 1) * sum(part.nbytes for part in parts)
difference = (y - expected).abs().max()
print(f"rank {rank}: {sent} bytes sent, largest difference {difference:.1e}", flush=True)
error = (dequantize(*whole, table) - weight).float().norm() / weight.float().norm()
print(f"rank {rank}: in bf16, {(world_size - 1) * rows.nbytes} bytes", flush=True)
print(f"rank {rank}: rounding to 4 bits changes the weight by {error:.1%}", flush=True)
dist.destroy_process_group()
