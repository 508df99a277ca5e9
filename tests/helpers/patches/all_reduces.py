"""Each rank tells how often it has averaged gradients over the copies."""

import torch.distributed as dist
from helpers.patches import at_end, in_place_of, print


@in_place_of(dist, "all_reduce")
def all_reduce(original_all_reduce, tensor, *args, **options):
    calls.append(options.get("group") is not None and tensor.numel() > 1)
    return original_all_reduce(tensor, *args, **options)


calls = []


@at_end
def tell():
    print("\nall-reduces", sum(calls))
