"""Each rank tells in which order it gathers weights and exchanges sizes in the first step, and
which experts its router has chosen in each step.
"""

import json

import torch
import torch.distributed as dist
from helpers.patches import at_end, in_place_of, print
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

order, chosen = [], []


new = hasattr(dist, "all_gather_single")  # torch 2.13
gather = "all_gather_single" if new else "all_gather_into_tensor"
for event, name in (("gather", gather), ("sizes", "all_to_all_single")):

    @in_place_of(dist, name)
    def call(original, *args, event=event, **options):
        order.append(event)
        return original(*args, **options)


@in_place_of(MixtralTopKRouter, "forward")
def route(original_route, self, *args):
    result = original_route(self, *args)
    chosen.append(result[2].flatten().tolist())
    return result


@in_place_of(torch.optim.AdamW, "step")
def step(original_step, self, *args, **options):
    result = original_step(self, *args, **options)
    order.append("step")
    chosen.append("step")
    return result


@at_end
def tell():
    print("\norder", *order[: order.index("step")])
    print("chosen", json.dumps(chosen))
