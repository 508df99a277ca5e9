"""Each rank tells at its end which seeds it trained with."""

import torch
from helpers.patches import at_end, in_place_of, print
from torch.distributed.pipelining import schedules


@in_place_of(schedules.PipelineScheduleSingle, "step")
def step(original_step, self, x, **options):
    if torch.is_grad_enabled():
        seeds.append(torch.initial_seed())
    return original_step(self, x, **options)


seeds = []


@at_end
def tell():
    print("\nseeds", *seeds)
