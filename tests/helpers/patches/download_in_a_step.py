"""Each row has its own shard, and a step has 4 rows.

In step 3, the forward pass waits until the first download of step 4 has begun. This download waits
until the forward pass is over. Without a thread, the forward pass would wait in vain.
"""

import threading

import torch
from helpers.patches import in_place_of
from streaming import Stream

begun = threading.Event()
computed = threading.Event()
steps = []
downloads = []


@in_place_of(Stream, "prepare_shard")
def prepare_shard(original_prepare_shard, self, shard):
    downloads.append(None)
    if len(downloads) == 13:
        begun.set()
        assert computed.wait(20), "the forward pass waits"
    return original_prepare_shard(self, shard)


@in_place_of(torch.nn.functional, "cross_entropy")
def compute(original_cross_entropy, *arguments, **options):
    steps.append(None)
    if len(steps) == 3:
        assert begun.wait(20), "no download while a step computes"
        computed.set()
    return original_cross_entropy(*arguments, **options)
