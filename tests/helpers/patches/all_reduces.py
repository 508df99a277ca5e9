"""Each rank also tells how often it has averaged gradients over the copies."""

import torch.distributed as dist

from helpers.patches import at_end, print


def all_reduce(tensor, *args, **options):
    calls.append(options.get("group") is not None and tensor.numel() > 1)
    return original_all_reduce(tensor, *args, **options)


calls = []
original_all_reduce = dist.all_reduce
dist.all_reduce = all_reduce


@at_end
def tell():
    print("\nall-reduces", sum(calls))
