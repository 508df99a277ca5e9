"""Trains a small model on two processes. Samples that are no numbers are left out.

torchrun --standalone --nproc-per-node 2 learn/broken/2-bad-samples.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(10, world_size, 4, 8)  # 10 batches, with 4 samples for each rank
data[3, 1] = float("nan")  # one file of the dataset is damaged

for batch in data:
    samples = batch[rank]
    loss = (model(samples).squeeze() - samples.sum(1)).square().mean()
    if loss.isnan():
        continue
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
    optimizer.step()
    optimizer.zero_grad()

dist.barrier()
print(f"rank {rank} is done, weights {model.weight.sum():.6f}")
dist.destroy_process_group()
