"""Each rank tells how much memory loading the model took, and ends."""

import os

import torch
import transformers
from helpers.patches import in_place_of, print


def memory(name):
    status = open("/proc/self/status").read()
    return int(status.partition(name + ":")[2].split()[0]) * 1024


@in_place_of(transformers.AutoModelForCausalLM, "from_config")
def from_config(original, *args, **options):
    global before
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak is now what there is
    before = memory("VmRSS")
    return original(*args, **options)


class AdamW(torch.optim.AdamW):
    def __init__(self, *args, **options):
        print("\nloading took", memory("VmHWM") - before, flush=True)
        os._exit(0)


torch.optim.AdamW = AdamW
