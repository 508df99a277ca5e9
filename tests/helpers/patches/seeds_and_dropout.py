"""Each rank tells which seeds it drew, and which of its activations were dropped."""

import hashlib

import torch
from helpers.patches import at_end, in_place_of, print

seeds, dropped = [], []


@in_place_of(torch, "manual_seed")
def seed(original_seed, number):
    seeds.append(number)
    return original_seed(number)


@in_place_of(torch.nn.Dropout, "forward")
def dropout(original_dropout, self, x):
    y = original_dropout(self, x)
    if self.training and not dropped:
        dropped.append(hashlib.sha256((y == 0).numpy()).hexdigest()[:16])
    return y


@at_end
def tell():
    print("\nseeds", *seeds[-2:])  # of the last two steps
    print("dropped", *dropped)
