"""Trains a small model on two processes. Gradients and losses travel in groups of their own.

torchrun --standalone --nproc-per-node 2 learn/broken/3-two-groups.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
everybody = list(range(world_size))
for_gradients = dist.new_group(everybody, group_desc="gradients")
for_losses = dist.new_group(everybody, group_desc="losses")
torch.manual_seed(0)
model = torch.nn.Linear(8, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(10, world_size, 4, 8)  # 10 batches, with 4 samples for each rank

for batch in data:
    samples = batch[rank]
    loss = (model(samples).squeeze() - samples.sum(1)).square().mean()
    loss.backward()
    messages = [(model.weight.grad, for_gradients), (loss.detach(), for_losses)]
    if rank > 0:  # so that rank 0 and rank 1 do not load the same link at the same time
        messages.reverse()
    for tensor, group in messages:
        dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group)
    optimizer.step()
    optimizer.zero_grad()

dist.barrier()
print(f"rank {rank} is done, weights {model.weight.sum():.6f}")
dist.destroy_process_group()
