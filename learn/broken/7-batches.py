"""Trains a small model on one or two processes, in another order of the samples in each epoch.

python learn/broken/7-batches.py
torchrun --standalone --nproc-per-node 2 learn/broken/7-batches.py
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ.get("RANK", 0))
world_size = int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
if world_size > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
dataset = torch.randn(64, 8)
batch_size = 8 // world_size  # of this rank

for epoch in range(5):
    torch.manual_seed(epoch)
    order = torch.randperm(len(dataset))
    for first in range(0, len(dataset), 8):
        samples = dataset[order[first : first + batch_size]]
        loss = (model(samples).squeeze() - samples.sum(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    mean_loss = loss.detach()
    if world_size > 1:
        dist.all_reduce(mean_loss, dist.ReduceOp.AVG)
    if rank == 0:
        print(f"epoch {epoch}  loss {mean_loss:.4f}")

if world_size > 1:
    dist.destroy_process_group()
