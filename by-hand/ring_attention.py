"""How can several processes compute attention, if no process can hold all keys and values?

Each rank has the queries, keys and values of its own tokens. The ranks form a ring. The queries
stay, and the keys and values travel from rank to rank. Each rank computes attention with one block
of keys and values after the other, and merges the results. In the backward pass, the blocks travel
around the ring again, and take their gradients with them. The causal mask is left out.

    torchrun --standalone --nproc-per-node 2 by-hand/ring_attention.py
"""

import os

import torch
import torch.distributed as dist

if os.environ.get("WORLD_SIZE", "1") == "1":  # torchrun sets WORLD_SIZE
    raise SystemExit(f"error: start it as torchrun --standalone --nproc-per-node 2 {__file__}")
dist.init_process_group("gloo")  # gloo sends tensors between CPUs
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # all ranks draw the same random numbers

# Queries, keys, values, and the gradient of the output, which the next layer of a model would give.
# The dimensions are (ranks, 4, tokens of a rank, size of a head).
data = torch.randn(world_size, 4, 6, 8, dtype=torch.float64, requires_grad=True)

# One process alone, with the tokens of all ranks. The ranks must get the same gradients.
q, k, v, grad_output = torch.cat(tuple(data), dim=1)
torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=1).backward(grad_output)

sent = []  # the bytes of each message


def pass_on(block):
    """Sends a block to the next rank, and receives the block of the previous rank."""
    received = torch.empty_like(block)
    request = dist.isend(block, (rank + 1) % world_size)
    dist.recv(received, (rank - 1) % world_size)
    request.wait()
    sent.append(block.nbytes)
    return received


# Forward pass. Softmax divides exp(scores) by the sum of exp(scores) over all keys. `log_sum` is
# the logarithm of this sum over the blocks so far. A new block makes the sum larger. So the output
# of the blocks so far is scaled down, and the output of the new block is added.
q, k, v, grad_output = data[rank].detach()
output = torch.zeros_like(q)
log_sum = torch.full_like(q[:, :1], -torch.inf)  # the logarithm of 0, for each query
for _ in range(world_size):
    scores = q @ k.T
    new_log_sum = torch.logaddexp(log_sum, scores.logsumexp(dim=1, keepdim=True))
    output = output * (log_sum - new_log_sum).exp() + (scores - new_log_sum).exp() @ v
    log_sum = new_log_sum
    k, v = pass_on(torch.stack([k, v]))

# Backward pass. Each block is back on its own rank now, and goes around the ring once more. With
# p = softmax(scores), the gradient of the scores is p * (grad_p - mean). Here `mean` is the mean of
# grad_p over all keys, weighted with p. It is equal to the sum of grad_output * output.
grad_q, grad_k, grad_v = torch.zeros_like(data[rank, :3])
mean = (grad_output * output).sum(dim=1, keepdim=True)
for _ in range(world_size):
    p = (q @ k.T - log_sum).exp()
    grad_scores = p * (grad_output @ v.T - mean)
    grad_q += grad_scores @ k
    grad_k += grad_scores.T @ q
    grad_v += p.T @ grad_output
    k, v, grad_k, grad_v = pass_on(torch.stack([k, v, grad_k, grad_v]))

difference = (torch.stack([grad_q, grad_k, grad_v]) - data.grad[rank, :3]).abs().max().item()
print(f"rank {rank}: {sum(sent)} bytes sent, largest difference {difference:.1e}")
dist.destroy_process_group()
