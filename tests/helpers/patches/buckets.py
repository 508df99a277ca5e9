"""Each rank tells at its end a digest of its weights, how many buckets its backward passes have
averaged, how many pieces of memory hold its gradients, and which samples it has trained on.
"""

import hashlib

import torch
from helpers.patches import at_end, in_place_of, print
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

counts = {"buckets": 0}
samples = []


def digest(tensor):
    return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()[:16]


def count(state, bucket):
    counts["buckets"] += 1
    return allreduce_hook(state, bucket)


class Watched(torch.nn.parallel.DistributedDataParallel):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_comm_hook(None, count)
        counts["ddp"] = self

    def forward(self, input_ids, **options):
        samples.extend(digest(row) for row in input_ids)
        return super().forward(input_ids=input_ids, **options)


@in_place_of(torch.nn.utils, "clip_grad_norm_")
def watched_clip(clip, parameters, *args, **options):
    parameters = list(parameters)
    counts["pieces"] = len({p.grad.untyped_storage().data_ptr() for p in parameters})
    return clip(parameters, *args, **options)


@at_end
def tell():
    weights = "".join(digest(p) for p in counts["ddp"].parameters())
    print("\nweights", hashlib.sha256(weights.encode()).hexdigest())
    print("buckets", counts["buckets"])
    print("gradients in", counts["pieces"])
    print("samples", *samples)


torch.nn.parallel.DistributedDataParallel = Watched
