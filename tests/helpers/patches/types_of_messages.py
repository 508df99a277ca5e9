"""Each rank tells the types of what it sends in training, and if gradients are bf16 numbers."""

import torch
import torch.distributed as dist
from helpers.patches import at_end, in_place_of, print

types = {}
share = []


for name in ("reduce_scatter_single", "all_gather_single"):

    @in_place_of(dist, name)
    def call(original, *args, name=name, **options):
        tensors = [x for x in [*args, *options.values()] if isinstance(x, torch.Tensor)]
        types.setdefault(name.rpartition("_")[0], set()).update(str(x.dtype) for x in tensors)
        return original(*args, **options)


@in_place_of(torch.nn.utils, "clip_grad_norm_")
def clip(original_clip, parameters, max_norm):
    parameters = list(parameters)
    gradients = torch.cat([p.grad.to_local().flatten() for p in parameters])
    gradients = gradients[gradients != 0]
    share.append((gradients == gradients.bfloat16()).float().mean().item())
    return original_clip(parameters, max_norm)


@at_end
def tell():
    for name, kinds in types.items():
        print(f"\n{name}", *sorted(kinds))
    print("\nbf16 numbers", *share)
