"""Trains a small model on two processes. Rank 0 saves the weights after each fourth step.

torchrun --standalone --nproc-per-node 2 learn/broken/4-save-weights.py
"""

import io

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Linear(8, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(10, world_size, 4, 8)  # 10 batches, with 4 samples for each rank
checkpoint = io.BytesIO()  # a file in memory, to leave none behind


def save(step):
    checkpoint.seek(0)
    torch.save(model.state_dict(), checkpoint)
    print(f"step {step} is saved")
    dist.barrier()  # no rank goes on before the checkpoint is complete


for step, batch in enumerate(data, 1):
    samples = batch[rank]
    loss = (model(samples).squeeze() - samples.sum(1)).square().mean()
    loss.backward()
    dist.all_reduce(model.weight.grad, dist.ReduceOp.AVG)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 4 == 0:
        save(step)

dist.barrier()
print(f"rank {rank} is done, weights {model.weight.sum():.6f}")
dist.destroy_process_group()
