"""A small model of somebody else, on one process or with DDP. Tests replace its lines."""

import os

import torch
import torch.distributed as dist

world_size = int(os.environ.get("WORLD_SIZE", 1))
rank = int(os.environ.get("RANK", 0))
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Tanh(), torch.nn.Linear(16, 4)
)
net = model
if world_size > 1:
    dist.init_process_group("gloo")
    net = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
inputs = torch.randn(5, 12, 8)
for x in inputs:
    x = x.chunk(world_size)[rank]
    loss = torch.nn.functional.cross_entropy(net(x), x[:, :4].argmax(1))
    loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
