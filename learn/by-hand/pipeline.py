"""How do two processes work on two layers at the same time?

Rank 0 has the first layer, and rank 1 has the second layer. The batch is cut into micro-batches, so
rank 0 can work on one micro-batch while rank 1 works on another one. GPipe makes all forward passes
first. 1F1B makes each backward pass as soon as it can, so fewer micro-batches are in memory.

    torchrun --standalone --nproc-per-node 2 learn/by-hand/pipeline.py
"""

import os

import torch
import torch.distributed as dist

# Given: the two processes.
if os.environ.get("WORLD_SIZE") != "2":  # torchrun sets WORLD_SIZE
    raise SystemExit(f"error: start it as torchrun --standalone --nproc-per-node 2 {__file__}")
dist.init_process_group("gloo")  # gloo sends tensors between CPUs
rank = dist.get_rank()
torch.set_default_dtype(torch.float64)  # rounding errors are much smaller than mistakes
sent = []  # the bytes of each message


# Yours: the passes of a rank, and their order.
def receive():
    """Waits for a tensor of the other rank, which has 32 rows of 16 numbers."""
    tensor = torch.empty(32, 16)
    dist.recv(tensor, 1 - rank)
    return tensor.requires_grad_()


def run(order, weight, micro_batches):
    """F2 is the forward pass of micro-batch 2, and B2 is its backward pass. Rank 1 gets None."""
    x, y = {}, {}  # the input and the output of the layer, for each micro-batch in memory
    requests = {}
    for step, n in order.split():  # F2 becomes step F and micro-batch 2
        if step == "F":
            x[n] = micro_batches[int(n)] if rank == 0 else receive()
            y[n] = torch.relu(x[n] @ weight)
            if rank == 0:
                # `isend` does not wait. With `send`, both ranks of 1F1B would wait for each other.
                requests[n] = dist.isend(y[n].detach(), 1)
                sent.append(y[n].nbytes)
        elif rank == 0:
            y.pop(n).backward(receive())
            requests.pop(n).wait()  # the gradient is here, so the message was there: forget it
        else:
            # The loss is the mean of the squares over the whole batch, which is 4 micro-batches.
            y[n].backward(2 * y[n].detach() / (4 * y.pop(n).numel()))
            dist.send(x[n].grad, 0)
            sent.append(x.pop(n).nbytes)
        print(f"rank {rank}: {step}{n}, micro-batches in memory: {' '.join(y)}", flush=True)
    return {"gradients": weight.grad}


def gpipe(weight, micro_batches):
    """All forward passes, then all backward passes. Both ranks have the same order."""
    return run("F0 F1 F2 F3 B0 B1 B2 B3", weight, micro_batches)


def one_f_one_b(weight, micro_batches):
    """Each backward pass as soon as its gradient is there."""
    orders = ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]  # of rank 0 and of rank 1
    return run(orders[rank], weight, micro_batches)


# Check: one process alone, with both layers and the whole batch.
def one_process():
    """The functions, the data of each rank, and the gradients that each rank must get."""
    weights = torch.randn(2, 16, 16, requires_grad=True)  # weights[rank] is the layer of a rank
    micro_batches = torch.randn(4, 32, 16)
    output = torch.relu(torch.relu(micro_batches @ weights[0]) @ weights[1])
    output.square().mean().backward()
    expected = [{"gradients": gradients} for gradients in weights.grad]
    schedules = []
    for schedule in (gpipe, one_f_one_b):
        first, second = (weight.detach().clone().requires_grad_() for weight in weights)
        schedules.append((schedule, [(first, micro_batches), (second, None)], expected))
    return schedules


torch.manual_seed(0)  # all ranks draw the same random numbers
for function, data, expected in one_process():
    results = function(*data[rank])
    differences = [(results[x] - expected[rank][x]).abs().max() for x in expected[rank]]
    part = f"rank {rank}, {function.__name__}"
    print(f"{part}: {sum(sent)} bytes sent, largest difference {max(differences):.1e}", flush=True)
    sent.clear()
dist.destroy_process_group()
