"""How does each process get its rows of a model, if none can hold the whole model?

A safetensors file begins with a list of its tensors: names, types, shapes and places. So a process
can read some rows of a tensor, and skip all others. Here each rank reads its rows of a small Llama.

    torchrun --standalone --nproc-per-node 2 learn/by-hand/sharded_loading.py
"""

import math
import os
import tempfile

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

# Yours: the rows of this rank. Parts are rounded up, so the last rank may have fewer, or none.
shards = {}
with safe_open(f"{folder[0]}/model.safetensors", "pt") as file:
    for name in file.offset_keys():  # in the order of the file
        tensor = file.get_slice(name)  # reads nothing yet
        size = math.ceil(tensor.get_shape()[0] / world_size)
        shards[name] = tensor[rank * size : (rank + 1) * size]  # reads these rows, and no others

# Check: the same rows of the whole model.
model = LlamaForCausalLM.from_pretrained(folder[0])
parts = {name: weight.chunk(world_size)[rank] for name, weight in model.named_parameters()}
largest = max((shards[name] - part).abs().max() for name, part in parts.items())
read = sum(rows.nbytes for rows in shards.values())
print(f"rank {rank}: {read} bytes read, largest difference {largest:.1e}", flush=True)
dist.destroy_process_group()
