"""An evaluation and each file of a checkpoint take 1,000 seconds more, by the clock of the run."""

import os
import time

import torch

clock, late = time.perf_counter, []
time.perf_counter = lambda: clock() + sum(late)


def slow(owner, name):
    original = getattr(owner, name)

    def call(*arguments):
        late.append(1000)
        return original(*arguments)

    setattr(owner, name, call)


slow(torch.nn.Module, "eval")
slow(os, "fsync")
