"""How do several processes compute an update that needs whole matrices, if each has some rows?

Muon makes all singular values of an update about equal. Each rank has some rows of each matrix, as
in fsdp.py. So each matrix has an owner: the rank that gets all rows of the matrix, computes the
update, and sends the rows back. Every rank owns two matrices.

    torchrun --standalone --nproc-per-node 2 learn/by-hand/muon.py
"""

import os

import torch
import torch.distributed as dist

# Given: the processes, and Newton-Schulz.
if os.environ.get("WORLD_SIZE", "1") == "1":  # torchrun sets WORLD_SIZE
    raise SystemExit(f"error: start it as torchrun --standalone --nproc-per-node 2 {__file__}")
dist.init_process_group("gloo")  # gloo sends tensors between CPUs
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.set_default_dtype(torch.float64)  # rounding errors are much smaller than mistakes
sent = []  # the bytes that this rank sends in each all-to-all


def orthogonalize(matrix):
    """The matrix with the same singular vectors, and with all singular values near 1."""
    x = matrix / matrix.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x


# Yours: the update of all matrices, from the rows of this rank to the rows of this rank.
def exchange(parts):
    """Sends parts[r] to rank r. Returns a tensor of the same shape: part r comes from rank r."""
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    sent.append(parts.nbytes - parts[rank].nbytes)  # without the part that stays
    return received


def update(momentum, gradients):
    """momentum[owner, number] are 4 rows of a matrix. Rank `owner` owns two matrices: 0 and 1."""
    # Momentum needs no whole matrix, so each rank keeps it for its own rows.
    momentum = 0.95 * momentum + 0.05 * gradients

    # To the owners: received[r, number] are the rows that rank r has of a matrix of this owner.
    received = exchange(momentum)
    for number in range(2):
        whole = received[:, number].flatten(0, 1)  # the rows of all ranks, in their order
        received[:, number] = orthogonalize(whole).view(world_size, 4, 16)

    # Back: each rank gets its own rows of all matrices.
    return {"momentum": momentum, "update": exchange(received)}


# Check: one process alone computes the update of all matrices.
def one_process():
    """The function, the data of each rank, and the results that each rank must get."""
    # Of (owners, matrices of an owner, ranks, rows of a rank, columns)
    shape = (world_size, 2, world_size, 4, 16)
    momentum, gradients = torch.randn(shape), torch.randn(shape)
    shards = zip(momentum.unbind(2), gradients.unbind(2), strict=True)
    data = [(m.contiguous(), g.contiguous()) for m, g in shards]  # a pair for each rank
    momentum = 0.95 * momentum + 0.05 * gradients
    updates = torch.empty(shape)
    for owner in range(world_size):
        for number in range(2):
            matrix = orthogonalize(momentum[owner, number].flatten(0, 1))
            updates[owner, number] = matrix.view(world_size, 4, 16)
    expected = []
    for r in range(world_size):
        expected.append({"momentum": momentum[:, :, r], "update": updates[:, :, r]})
    return [(update, data, expected)]


torch.manual_seed(0)  # all ranks draw the same random numbers
for function, data, expected in one_process():
    results = function(*data[rank])
    differences = [(results[x] - expected[rank][x]).abs().max() for x in expected[rank]]
    part = f"rank {rank}, {function.__name__}"
    print(f"{part}: {sum(sent)} bytes sent, largest difference {max(differences):.1e}", flush=True)
    sent.clear()
dist.destroy_process_group()
