"""How do two processes work on two layers at the same time?

Rank 0 has the first layer, and rank 1 has the second layer. The batch is cut into micro-batches, so
rank 0 can work on one micro-batch while rank 1 works on another one. GPipe makes all forward passes
first. 1F1B makes each backward pass as soon as it can, so fewer micro-batches are in memory.

    torchrun --standalone --nproc-per-node 2 by-hand/pipeline.py
"""

import os

import torch
import torch.distributed as dist

if os.environ.get("WORLD_SIZE") != "2":  # torchrun sets WORLD_SIZE
    raise SystemExit(f"error: start it as torchrun --standalone --nproc-per-node 2 {__file__}")
dist.init_process_group("gloo")  # gloo sends tensors between CPUs
rank = dist.get_rank()
torch.set_default_dtype(torch.float64)  # rounding errors are much smaller than mistakes
torch.manual_seed(0)  # all ranks draw the same random numbers

weights = torch.randn(2, 16, 16, requires_grad=True)  # weights[rank] is the layer of a rank
micro_batches = torch.randn(4, 8, 16)

# One process alone, with both layers and the whole batch. The ranks must get the same gradients.
output = torch.relu(torch.relu(micro_batches @ weights[0]) @ weights[1])
output.square().mean().backward()

# F2 is the forward pass of micro-batch 2, and B2 is its backward pass.
gpipe = ["F0 F1 F2 F3 B0 B1 B2 B3", "F0 F1 F2 F3 B0 B1 B2 B3"]  # the order of rank 0, of rank 1
one_f_one_b = ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]


def receive():
    """Waits for a tensor of the other rank."""
    tensor = torch.empty(8, 16)
    dist.recv(tensor, 1 - rank)
    return tensor.requires_grad_()


for name, order in (("GPipe", gpipe[rank]), ("1F1B", one_f_one_b[rank])):
    weight = weights[rank].detach().requires_grad_()
    x, y = {}, {}  # the input and the output of the layer, for each micro-batch in memory
    requests = []
    for step, n in order.split():  # F2 becomes step F and micro-batch 2
        if step == "F":
            x[n] = micro_batches[int(n)] if rank == 0 else receive()
            y[n] = torch.relu(x[n] @ weight)
            if rank == 0:
                # `isend` does not wait. With `send`, both ranks of 1F1B would wait for each other.
                requests.append(dist.isend(y[n].detach(), 1))
        else:
            # The loss is the mean of the squares over the whole batch.
            grad = receive() if rank == 0 else 2 * y[n].detach() / output.numel()
            y.pop(n).backward(grad)
            if rank == 1:
                requests.append(dist.isend(x.pop(n).grad, 0))
        print(f"{name}, rank {rank}: {step}{n}, micro-batches in memory: {' '.join(y)}", flush=True)
    dist.barrier()  # when both ranks are here, all messages have arrived
    sent = len(requests) * output[0].nbytes  # each message is as large as a micro-batch
    difference = (weight.grad - weights.grad[rank]).abs().max().item()
    print(f"rank {rank}, {name}: {sent} bytes sent, largest difference {difference:.1e}")
dist.destroy_process_group()
