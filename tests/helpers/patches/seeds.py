"""Prints the seed of each step."""

import torch
from helpers.patches import in_place_of, print


@in_place_of(torch, "manual_seed")
def manual_seed(original, seed):
    print("\nseed", seed)
    return original(seed)
