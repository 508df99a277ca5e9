"""Each rank tells at its end which seeds it trained with."""

import torch
from torch.distributed.pipelining import schedules

from helpers.patches import at_end, print


def step(self, x, **options):
    if torch.is_grad_enabled():
        seeds.append(torch.initial_seed())
    return original_step(self, x, **options)


seeds = []
original_step = schedules.PipelineScheduleSingle.step
schedules.PipelineScheduleSingle.step = step


@at_end
def tell():
    print("\nseeds", *seeds)
