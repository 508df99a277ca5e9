"""Prints what the first stage sends to a tied head."""

import torch.distributed as dist
from helpers.patches import in_place_of, print


@in_place_of(dist, "broadcast")
def broadcast(original, tensor, **options):
    if "group_src" in options and dist.get_rank() == 0:
        print("\nsent", tensor.dtype, tensor.nbytes)
    return original(tensor, **options)
