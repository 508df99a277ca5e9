"""Trains a small model on one or two processes, and clips the gradients.

python learn/broken/6-gradients.py
torchrun --standalone --nproc-per-node 2 learn/broken/6-gradients.py
"""

import os

import torch
import torch.distributed as dist

rank = int(os.environ.get("RANK", 0))
world_size = int(os.environ.get("WORLD_SIZE", 1))
if world_size > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.randn(40, 8, 8)  # 40 batches of 8 samples

for step, batch in enumerate(data, 1):
    samples = batch.chunk(world_size)[rank]
    loss = (model(samples).squeeze() - samples.sum(1)).square().mean()
    (loss / world_size).backward()
    if world_size > 1:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        dist.all_reduce(loss.detach(), dist.ReduceOp.AVG)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 10 == 0:
        print(f"step {step}  loss {loss:.4f}")

if world_size > 1:
    dist.destroy_process_group()
