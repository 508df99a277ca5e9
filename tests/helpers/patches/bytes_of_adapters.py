"""In each step: the bytes of gathered and reduced tensors, the bytes of AdamW's moments on this
rank, and the types of frozen weights and of A and B.
"""

import torch
import torch.distributed as dist
from helpers.patches import in_place_of, print

models, sent = [], []


for name in ("all_gather_single", "reduce_scatter_single"):

    @in_place_of(dist, name)
    def call(original, *args, **options):
        tensors = [x for x in [*args, *options.values()] if isinstance(x, torch.Tensor)]
        sent.append(max(x.nbytes for x in tensors))
        return original(*args, **options)


@in_place_of(torch.nn.Module, "to_empty")
def to_empty(original_to_empty, self, **options):
    models[:] = [original_to_empty(self, **options)]
    return self


@in_place_of(torch.optim.AdamW, "step")
def step(original_step, self, *args, **options):
    result = original_step(self, *args, **options)
    moments = sum(x.to_local().nbytes for s in self.state.values() for x in s.values() if x.dim())
    types = {(".lora_" in n, str(p.dtype)) for n, p in models[0].named_parameters()}
    print("\nstep", sum(sent), moments, *[name for _, name in sorted(types)])
    sent.clear()
    return result
