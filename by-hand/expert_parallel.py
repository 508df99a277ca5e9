"""How can several processes share the experts of one layer?

Each rank has one expert and its own tokens. A router has chosen an expert for each token. Each rank
sends its tokens to the ranks of their experts, the experts compute, and the results come back. In
the backward pass, the gradients go the same way. Here the choices are random. In a real model, the
router is a trained layer, and the result is multiplied by the probability of the choice.

    torchrun --standalone --nproc-per-node 2 by-hand/expert_parallel.py
"""

import os

import torch
import torch.distributed as dist

if os.environ.get("WORLD_SIZE", "1") == "1":  # torchrun sets WORLD_SIZE
    raise SystemExit(f"error: start it as torchrun --standalone --nproc-per-node 2 {__file__}")
dist.init_process_group("gloo")  # gloo sends tensors between CPUs
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.set_default_dtype(torch.float64)  # rounding errors are much smaller than mistakes
torch.manual_seed(0)  # all ranks draw the same random numbers

tokens = torch.randn(world_size, 8, 16, requires_grad=True)  # tokens[rank] are on this rank
experts = torch.randn(world_size, 16, 16, requires_grad=True)  # experts[rank] is on this rank
choices = torch.randint(world_size, (world_size, 8))  # the number of the expert, for each token

# One process alone, with all tokens and all experts. The ranks must get the same gradients.
for expert in range(world_size):
    torch.tanh(tokens[choices == expert] @ experts[expert]).square().sum().backward()

sent = []  # the bytes that this rank sends in each all-to-all


def exchange(rows, send_counts, receive_counts):
    """Sends the first send_counts[0] rows to rank 0, the next send_counts[1] rows to rank 1, ..."""
    received = torch.empty(sum(receive_counts), 16)
    dist.all_to_all_single(received, rows, receive_counts, send_counts)
    sent.append(rows.nbytes - rows.split(send_counts)[rank].nbytes)  # without the rows that stay
    return received


# Sort the tokens by expert, and count them. Each rank tells the others how many tokens will come.
order = choices[rank].argsort()
counts = choices[rank].bincount(minlength=world_size)
arriving_counts = torch.empty_like(counts)
dist.all_to_all_single(arriving_counts, counts)
sent.append((world_size - 1) * counts.itemsize)
send_counts = counts.tolist()
receive_counts = arriving_counts.tolist()

# Forward pass. Autograd works inside a rank. Between the ranks, `exchange` sends tensors.
my_tokens = tokens[rank].detach()
my_expert = experts[rank].detach().requires_grad_()
received = exchange(my_tokens[order], send_counts, receive_counts).requires_grad_()
results = torch.tanh(received @ my_expert)
y = torch.empty_like(my_tokens)
y[order] = exchange(results.detach(), receive_counts, send_counts)  # in the order of my_tokens

# Backward pass. The loss is the sum of the squares of y, so the gradient of y is 2 * y.
results.backward(exchange(2 * y[order], send_counts, receive_counts))
grad = torch.empty_like(my_tokens)
grad[order] = exchange(received.grad, receive_counts, send_counts)

differences = [grad - tokens.grad[rank], my_expert.grad - experts.grad[rank]]
difference = max(tensor.abs().max().item() for tensor in differences)
print(f"rank {rank}: {sum(sent)} bytes sent, largest difference {difference:.1e}")
dist.destroy_process_group()
