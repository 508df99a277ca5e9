"""Each rank tells which seeds it drew, and which of its activations were dropped."""

import hashlib

import torch

from helpers.patches import at_end, print

seeds, dropped = [], []
original_seed = torch.manual_seed


def seed(number):
    seeds.append(number)
    return original_seed(number)


torch.manual_seed = seed
original_dropout = torch.nn.Dropout.forward


def dropout(self, x):
    y = original_dropout(self, x)
    if self.training and not dropped:
        dropped.append(hashlib.sha256((y == 0).numpy()).hexdigest()[:16])
    return y


torch.nn.Dropout.forward = dropout


@at_end
def tell():
    print("\nseeds", *seeds[-2:])  # of the last two steps
    print("dropped", *dropped)
