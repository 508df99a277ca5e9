"""AdamW's step with a number does something else first, on one rank."""

import os
import signal

import torch
from helpers.patches import print


def on(number: int, rank: int, action: str) -> None:
    def step(*arguments, **options):
        steps.append(None)
        if len(steps) == number and os.environ.get("RANK", "0") == str(rank):
            names = {"os": os, "signal": signal, "print": print}
            exec(action, names | {"arguments": arguments, "options": options})
        return original_step(*arguments, **options)

    steps = []
    original_step = torch.optim.AdamW.step
    torch.optim.AdamW.step = step
