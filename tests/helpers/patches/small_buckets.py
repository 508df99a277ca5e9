"""Each rank tells at its end a digest of its weights, and its DDP uses buckets of a few KB, so that
there are many.
"""

import hashlib

import torch
from helpers.patches import at_end, print


class Watched(torch.nn.parallel.DistributedDataParallel):
    def __init__(self, *args, **options):
        super().__init__(*args, bucket_cap_mb=0.02, **options)
        watched.append(self)


@at_end
def tell():
    digest = hashlib.sha256()
    for p in watched[0].parameters():
        digest.update(p.detach().numpy().tobytes())
    print("\nweights", digest.hexdigest())
    found = watched[0]._get_ddp_logging_data()
    rebuilt = found["has_rebuilt_buckets"]
    print("buckets", len(found["rebuilt_bucket_sizes" if rebuilt else "bucket_sizes"].split(",")))
    print("rebuilt", int(rebuilt))
    watched.clear()


watched = []
torch.nn.parallel.DistributedDataParallel = Watched
