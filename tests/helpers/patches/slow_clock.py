"""An evaluation and each file of a checkpoint take 1,000 seconds more, by the clock of the run."""

import os
import time

import torch
from helpers.patches import in_place_of

clock, late = time.perf_counter, []
time.perf_counter = lambda: clock() + sum(late)

for owner, name in ((torch.nn.Module, "eval"), (os, "fsync")):

    @in_place_of(owner, name)
    def call(original, *arguments):
        late.append(1000)
        return original(*arguments)
