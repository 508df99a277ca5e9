"""How does each process get its rows of a model, if none can hold the whole model?

A safetensors file begins with a list of its tensors: names, types, shapes and places. So a process
can read some rows of a tensor, and skip all others. Here each rank reads its rows of a small Llama.

    torchrun --standalone --nproc-per-node 2 learn/by-hand/sharded_loading.py
"""

import math
import os
import tempfile

import torch
import torch.distributed as dist
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

# Given: the processes, and a file with random weights, which rank 0 writes.
if os.environ.get("WORLD_SIZE", "1") == "1":  # torchrun sets WORLD_SIZE
    raise SystemExit(f"error: start it as torchrun --standalone --nproc-per-node 2 {__file__}")
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
config = LlamaConfig(vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)  # all ranks take the folder of rank 0
if rank == 0:
    LlamaForCausalLM(config).save_pretrained(folder[0])
dist.barrier()


# Yours: the rows of this rank of each tensor, and from them a whole tensor.
def read_rows(file):
    """Reads equal parts of the rows, rounded up, so the last rank may have fewer rows or none."""
    shards = {}
    with safe_open(file, "pt") as tensors:
        for name in tensors.offset_keys():  # in the order of the file
            tensor = tensors.get_slice(name)  # reads nothing yet
            rows = tensor.get_shape()[0]
            size = math.ceil(rows / world_size)
            first = min(rank * size, rows)
            shards[name] = tensor[first : first + size]  # reads these rows, and no others
    return shards


def whole(shard):
    """All ranks call it. It joins the rows of all ranks, which may have unequal numbers of rows."""
    shards = [None] * world_size
    dist.all_gather_object(shards, shard)
    return torch.cat(shards)


# Check: the rows of all ranks together are the model.
shards = read_rows(f"{folder[0]}/model.safetensors")
model = LlamaForCausalLM.from_pretrained(folder[0])
differences = [(whole(shards[n]) - x).abs().max() for n, x in model.named_parameters()]
read = sum(rows.nbytes for rows in shards.values())
part = f"rank {rank}, {read_rows.__name__}"
print(f"{part}: {read} bytes read, largest difference {max(differences):.1e}", flush=True)
dist.destroy_process_group()
