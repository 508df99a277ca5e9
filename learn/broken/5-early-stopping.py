"""Trains a small model on two processes, until the loss is small enough.

torchrun --standalone --nproc-per-node 2 learn/broken/5-early-stopping.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Linear(8, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(100, world_size, 4, 8)  # 100 batches, with 4 samples for each rank

for step, batch in enumerate(data, 1):
    samples = batch[rank]
    loss = (model(samples).squeeze() - samples.sum(1)).square().mean()
    loss.backward()
    dist.all_reduce(model.weight.grad, dist.ReduceOp.AVG)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}  loss {loss:.4f}")
    if loss < 0.5:
        break

dist.barrier()  # all ranks have the final weights
print(f"rank {rank} is done, weights {model.weight.sum():.6f}")
dist.destroy_process_group()
