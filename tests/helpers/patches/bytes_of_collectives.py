"""At the end of a run, rank 0 prints how often FSDP has gathered and scattered how many bytes."""

import collections
import json

import torch.distributed as dist
from helpers.patches import print


def count(name):
    original = getattr(dist, name)

    def call(*arguments, **options):
        tensors = [x for x in [*arguments, *options.values()] if hasattr(x, "nbytes")]
        counts[name][max(x.nbytes for x in tensors)] += 1
        return original(*arguments, **options)

    setattr(dist, name, call)
    counts[name] = collections.Counter()


def destroy(*group):
    if not group:
        print("\nbytes", json.dumps(counts), flush=True)
        for counter in counts.values():
            counter.clear()
    destroy_group(*group)


counts = {}
destroy_group, dist.destroy_process_group = dist.destroy_process_group, destroy
count("all_gather_single")
count("reduce_scatter_single")
