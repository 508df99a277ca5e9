"""The seventh step lasts until the checkpoint of the fifth step has its name."""

import os
import time

import torch


def step(*args, **options):
    if next(count) == 7:
        end = time.monotonic() + 60
        while not os.path.exists(os.environ["NAMED"]):
            assert time.monotonic() < end, "no name"
            time.sleep(0.01)
    return original(*args, **options)


count = iter(range(1, 99))
original = torch.optim.AdamW.step
torch.optim.AdamW.step = step
