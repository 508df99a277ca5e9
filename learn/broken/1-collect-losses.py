"""Trains a small model on two processes. Each step, rank 0 prints the losses of all ranks.

torchrun --standalone --nproc-per-node 2 learn/broken/1-collect-losses.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(10, world_size, 4, 8)  # 10 batches, with 4 samples for each rank


def losses_of_all_ranks(loss):
    loss = loss.detach()
    if rank == 0:
        losses = [torch.zeros(()) for _ in range(world_size)]
        dist.all_gather(losses, loss)
        return losses
    dist.all_reduce(loss)
    return None


for step, batch in enumerate(data):
    samples = batch[rank]
    loss = (model(samples).squeeze() - samples.sum(1)).square().mean()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
    optimizer.step()
    optimizer.zero_grad()
    losses = losses_of_all_ranks(loss)
    if rank == 0:
        print(f"step {step}", *(f"{loss:.4f}" for loss in losses))

dist.barrier()
print(f"rank {rank} is done, weights {model.weight.sum():.6f}")
dist.destroy_process_group()
