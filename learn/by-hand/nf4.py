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

# Given: the processes.
if os.environ.get("WORLD_SIZE", "1") == "1":  # torchrun sets WORLD_SIZE
    raise SystemExit(f"error: start it as torchrun --standalone --nproc-per-node 2 {__file__}")
dist.init_process_group("gloo")  # gloo sends tensors between CPUs
rank, world_size = dist.get_rank(), dist.get_world_size()
sent = []  # the bytes that this rank sends in each all-gather


# Yours: the table, the codes, the way back, and a layer.
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


def all_gather(part):
    """The rows of all ranks, in their order."""
    whole = [torch.empty_like(part) for _ in range(world_size)]
    dist.all_gather(whole, part)
    sent.append((world_size - 1) * part.nbytes)
    return torch.cat(whole)


def layer(rows, x):
    """Each rank has some rows of the weight, and stores only their codes and scales."""
    table = make_table()
    codes, scales = quantize(rows, table)
    # 4.25 bits for each weight, instead of 16. All ranks compute the same weight from them.
    weight = dequantize(all_gather(codes), all_gather(scales), table)
    return {"weight": weight.double(), "y": x @ weight.double().T}


# Check: one process quantizes the whole weight.
def one_process():
    """The function, the data of each rank, and the results that each rank must get."""
    # Pretrained weights are about normally distributed.
    weight = (0.02 * torch.randn(32 * world_size, 256)).bfloat16()
    x = torch.randn(8, 256).double()
    table = make_table()
    rounded = dequantize(*quantize(weight, table), table).double()
    data = [(rows, x) for rows in weight.chunk(world_size)]
    expected = {"weight": rounded, "y": x @ rounded.T}
    return [(layer, data, [expected] * world_size)]


torch.manual_seed(0)  # all ranks draw the same random numbers
for function, data, expected in one_process():
    results = function(*data[rank])
    differences = [(results[x] - expected[rank][x]).abs().max() for x in expected[rank]]
    part = f"rank {rank}, {function.__name__}"
    print(f"{part}: {sum(sent)} bytes sent, largest difference {max(differences):.1e}", flush=True)
    rows = data[rank][0]
    print(f"rank {rank}: in bf16, {(world_size - 1) * rows.nbytes} bytes", flush=True)
    error = (results["weight"].chunk(world_size)[rank] - rows).norm() / rows.double().norm()
    print(f"rank {rank}: rounding to 4 bits changes the weight by {error:.1%}", flush=True)
dist.destroy_process_group()
