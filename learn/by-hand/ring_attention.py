"""How can several processes compute attention, if no process can hold all keys and values?

Each rank has the queries, keys and values of its own tokens. The ranks form a ring. The queries
stay, and the keys and values travel from rank to rank. Each rank computes attention with one block
of keys and values after the other, and merges the results. In the backward pass, the blocks travel
around the ring again, and take their gradients with them. The causal mask is left out.

    torchrun --standalone --nproc-per-node 2 learn/by-hand/ring_attention.py
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
sent = []  # the bytes that this rank sends in each message


# Yours: attention, forward and backward, with a block of keys and values on each rank.
def pass_on(block):
    """Sends a block to the next rank, and receives the block of the previous rank."""
    received = torch.empty_like(block)
    request = dist.isend(block, (rank + 1) % world_size)
    dist.recv(received, (rank - 1) % world_size)
    request.wait()
    sent.append(block.nbytes)
    return received


def forward(q, k, v):
    """Returns the output, and `log_sum`: the logarithm of the sum of exp(scores) over all keys."""
    # Softmax divides exp(scores) by this sum. `log_sum` has the blocks so far. A new block makes
    # the sum larger. So the output so far is scaled down, and the output of the block is added.
    output = torch.zeros_like(q)
    log_sum = torch.full_like(q[:, :1], -torch.inf)  # the logarithm of 0, for each query
    for _ in range(world_size):
        scores = q @ k.T
        new_log_sum = torch.logaddexp(log_sum, scores.logsumexp(dim=1, keepdim=True))
        output = output * (log_sum - new_log_sum).exp() + (scores - new_log_sum).exp() @ v
        log_sum = new_log_sum
        k, v = pass_on(torch.stack([k, v]))
    return output, log_sum


def attend(q, k, v, grad_output):
    """grad_output is the gradient of the output, which the next layer of a model would give."""
    output, log_sum = forward(q, k, v)
    # Backward pass. Each block is back on its own rank now, and goes around the ring once more.
    # With p = softmax(scores), the gradient of the scores is p * (grad_p - mean). Here `mean` is
    # the mean of grad_p over all keys, weighted with p: the sum of grad_output * output.
    grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (q, k, v))
    mean = (grad_output * output).sum(dim=1, keepdim=True)
    for _ in range(world_size):
        p = (q @ k.T - log_sum).exp()
        grad_scores = p * (grad_output @ v.T - mean)
        grad_q += grad_scores @ k
        grad_k += grad_scores.T @ q
        grad_v += p.T @ grad_output
        k, v, grad_k, grad_v = pass_on(torch.stack([k, v, grad_k, grad_v]))
    return {"output": output, "q": grad_q, "k": grad_k, "v": grad_v}


# Check: one process alone, with the tokens of all ranks.
def one_process():
    """The function, the data of each rank, and the results that each rank must get."""
    # The dimensions are (ranks, 4, tokens of a rank, size of a head).
    data = torch.randn(world_size, 4, 6, 8, requires_grad=True)
    q, k, v, grad_output = torch.cat(tuple(data), dim=1)
    output = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=1)
    output.backward(grad_output)
    expected = []
    for own_output, gradients in zip(output.detach().chunk(world_size), data.grad, strict=True):
        q, k, v, _ = gradients
        expected.append({"output": own_output, "q": q, "k": k, "v": v})
    return [(attend, [tuple(own) for own in data.detach()], expected)]


torch.manual_seed(0)  # all ranks draw the same random numbers
for function, data, expected in one_process():
    results = function(*data[rank])
    differences = [(results[x] - expected[rank][x]).abs().max() for x in expected[rank]]
    part = f"rank {rank}, {function.__name__}"
    print(f"{part}: {sum(sent)} bytes sent, largest difference {max(differences):.1e}", flush=True)
    sent.clear()
dist.destroy_process_group()
