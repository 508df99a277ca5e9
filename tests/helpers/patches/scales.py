"""Each rank tells the scales of its weights, and those of its shards alone: 448 / the largest."""

import torch
from helpers.patches import at_end, in_place_of, print

models = []


@in_place_of(torch.nn.Module, "to_empty")
def to_empty(original_to_empty, self, **options):
    models.append(original_to_empty(self, **options))
    return self


@at_end
def tell():
    shards = [p._local_tensor for p in models[-1].parameters()]
    shards = [s for s in shards if hasattr(s, "_precomputed_scale")]
    print("\nscales", *(s._precomputed_scale and s._precomputed_scale.item() for s in shards))
    largest = [s._tensor.abs().max().double() for s in shards]
    print("\nshards", *((448 / number).float().item() for number in largest))
