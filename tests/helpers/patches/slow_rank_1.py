"""Rank 1 begins late to write, so whoever does not wait for its files misses them."""

import os
import time

import torch


def slow(*arguments, **options):
    if time.monotonic() > saved[-1] + 1:
        time.sleep(0.3)
    saved.append(time.monotonic())
    return save(*arguments, **options)


saved = [0]
save = torch.save
if os.environ.get("RANK") == "1":
    torch.save = slow
