"""Compares what a solution did on a rank with the results of one process, and with the original."""

import torch

TOLERANCE = 1e-9  # of the largest number; all numbers are in fp64


def most_bytes(technique: str, function: str, rank: int, n: int) -> int:
    """The limit of the memory, or 0. A number has 8 bytes."""
    if technique == "fsdp":  # two whole weights, and six times the 4 shards for AdamW
        shard = 8 * 8 * n * 8
        return 2 * n * shard + 6 * 4 * shard
    if technique == "tensor_parallel":  # one and a half times the bytes of the original
        return (4608 if function == "all_tokens" else 3456) * n + 3840
    if technique == "pipeline":
        # Rank 0 keeps outputs, and rank 1 keeps inputs and outputs. A message, its gradient and two
        # tensors that a pass computes; the gradient of the weight.
        kept = 4 if function == "gpipe" else 2 - rank
        return (kept * (1 + rank) + 4) * 32 * 16 * 8 + 16 * 16 * 8
    return 0


def judge(function: str, results: dict, watch, sent: int, expected: list[dict], rank: int):
    """Yields (function, check, what is wrong or nothing, what to say if all is right).

    `results` and `watch` are of the solution, `sent` is what the original sends, and `expected` has
    the results of one process for each rank.
    """
    said = f"equal to one process: {', '.join(expected[rank])}"
    yield function, "gradients", wrong_results(results, expected, rank), said
    cause = "something was not sent" if watch.sent < sent else "less is enough"
    wrong = "" if watch.sent == sent else f"sent {watch.sent}, expected {sent}: {cause}"
    yield function, "bytes", wrong, f"rank {rank} sent {watch.sent}"
    if watch.limit:
        wrong = f"{watch.most} bytes on {watch.line}, the limit is {watch.limit}"
        said = f"rank {rank} has {watch.most} bytes at most"
        yield function, "memory", wrong if watch.most > watch.limit else "", said


def wrong_results(results: dict, expected: list[dict], rank: int) -> str:
    for name, right in expected[rank].items():
        found = results.get(name)
        wrong = wrong_result(found, right.detach(), len(expected))
        if not wrong:
            continue
        for other_rank, others in enumerate(expected):
            if not wrong_result(found, others[name].detach(), len(expected)):
                wrong = f"these are the numbers of rank {other_rank}"
        return f'"{name}": {wrong}'
    return ""


def wrong_result(tensor, right: torch.Tensor, n: int) -> str:
    if tensor is None:
        return "the function does not return this tensor"
    if tensor.shape != right.shape:
        return f"the shape is {tuple(tensor.shape)}, expected {tuple(right.shape)}"
    if close_to(tensor, right):
        return ""
    if not tensor.any():
        return "all numbers are 0: nothing was written into this tensor"
    if tensor.isnan().any():
        return "some numbers are nan: nothing was written there, or they were divided by 0"
    factor = ((tensor * right).sum() / (right * right).sum()).item()
    if close_to(tensor / factor, right):
        return too_large(factor, n)
    return (
        f"the largest difference to one process is {(tensor - right).abs().max():.1e}: on each "
        "rank, print what goes into a collective, and what comes out"
    )


def close_to(tensor, right) -> bool:
    return (tensor - right).abs().max() <= TOLERANCE * right.abs().max()


def too_large(factor: float, n: int) -> str:
    if abs(factor - n) < 1e-6:
        return f"{n} times too large: the sum was not divided by the number of ranks"
    if abs(factor - 1 / n) < 1e-6:
        return f"{n} times too small: divided by the number of ranks once too often"
    return f"{factor:.4g} times one process"
