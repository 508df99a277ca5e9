"""How can several processes share the experts of one layer?

Each rank has one expert and its own tokens. A router has chosen an expert for each token. Each rank
sends its tokens to the ranks of their experts, the experts compute, and the results come back. In
the backward pass, the gradients go the same way. Here the choices are random. In a real model, the
router is a trained layer, and the result is multiplied by the probability of the choice.

    torchrun --standalone --nproc-per-node 2 learn/by-hand/expert_parallel.py
"""

import os

import torch
import torch.distributed as dist

# Given: the processes.
if os.environ.get("WORLD_SIZE", "1") == "1":  # torchrun sets WORLD_SIZE
    raise SystemExit(f"error: start it as torchrun --standalone --nproc-per-node 2 {__file__}")
dist.init_process_group("gloo")  # gloo sends tensors between CPUs
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.set_default_dtype(torch.float64)  # rounding errors are much smaller than mistakes
sent = []  # the bytes that this rank sends in each all-to-all


# Yours: the layer, forward and backward, with one expert on each rank.
def exchange(rows, send_counts, receive_counts):
    """Sends the first send_counts[0] rows to rank 0, the next send_counts[1] rows to rank 1, ..."""
    received = torch.empty(sum(receive_counts), 16)
    dist.all_to_all_single(received, rows, receive_counts, send_counts)
    sent.append(rows.nbytes - rows.split(send_counts)[rank].nbytes)  # without the rows that stay
    return received


def count(choices):
    """Each rank tells the others how many tokens will come. Returns two lists of counts."""
    counts = choices.bincount(minlength=world_size)
    arriving_counts = torch.empty_like(counts)
    dist.all_to_all_single(arriving_counts, counts)
    sent.append((world_size - 1) * counts.itemsize)
    return counts.tolist(), arriving_counts.tolist()


def compute(tokens, expert, choices):
    """choices[i] is the number of the expert of tokens[i]. The rank has only its own expert."""
    order = choices.argsort()  # sorts the tokens by expert
    send_counts, receive_counts = count(choices)

    # Forward pass. Autograd works inside a rank. Between the ranks, `exchange` sends tensors.
    received = exchange(tokens[order], send_counts, receive_counts).requires_grad_()
    results = torch.tanh(received @ expert)
    y = torch.empty_like(tokens)
    y[order] = exchange(results.detach(), receive_counts, send_counts)  # in the order of `tokens`

    # Backward pass. The loss is the sum of the squares of y, so the gradient of y is 2 * y.
    results.backward(exchange(2 * y[order], send_counts, receive_counts))
    grad = torch.empty_like(tokens)
    grad[order] = exchange(received.grad, receive_counts, send_counts)
    return {"tokens": grad, "expert": expert.grad}


# Check: one process alone, with all tokens and all experts.
def one_process():
    """The function, the data of each rank, and the gradients that each rank must get."""
    tokens = torch.randn(world_size, 8, 16, requires_grad=True)
    experts = torch.randn(world_size, 16, 16, requires_grad=True)
    choices = torch.randint(world_size, (world_size, 8))
    data = []
    for own in range(world_size):
        expert = experts[own].detach().clone().requires_grad_()
        data.append((tokens[own].detach(), expert, choices[own]))
        torch.tanh(tokens[choices == own] @ experts[own]).square().sum().backward()
    grads = zip(tokens.grad, experts.grad, strict=True)
    return [(compute, data, [{"tokens": of_tokens, "expert": e} for of_tokens, e in grads])]


torch.manual_seed(0)  # all ranks draw the same random numbers
for function, data, expected in one_process():
    results = function(*data[rank])
    differences = [(results[x] - expected[rank][x]).abs().max() for x in expected[rank]]
    part = f"rank {rank}, {function.__name__}"
    print(f"{part}: {sum(sent)} bytes sent, largest difference {max(differences):.1e}", flush=True)
    sent.clear()
dist.destroy_process_group()
