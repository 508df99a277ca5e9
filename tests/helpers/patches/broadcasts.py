"""Prints what the first stage sends to a tied head."""

import torch.distributed as dist

from helpers.patches import print


def broadcast(tensor, **options):
    if "group_src" in options and dist.get_rank() == 0:
        print("\nsent", tensor.dtype, tensor.nbytes)
    return original(tensor, **options)


original = dist.broadcast
dist.broadcast = broadcast
