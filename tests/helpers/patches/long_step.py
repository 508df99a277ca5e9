"""The seventh step lasts until the checkpoint of the fifth step has its name."""

import os
import time

import torch
from helpers.patches import in_place_of


@in_place_of(torch.optim.AdamW, "step")
def step(original, *args, **options):
    if next(count) == 7:
        end = time.monotonic() + 60
        while not os.path.exists(os.environ["NAMED"]):
            assert time.monotonic() < end, "no name"
            time.sleep(0.01)
    return original(*args, **options)


count = iter(range(1, 99))
