"""Runs chapters many times in the processes of one job: `many_trainings.py CASES`.

Starting processes takes longer than these trainings. In its first two steps, each rank saves its
gradients, before they are clipped.
"""

import functools
import json
import os
import runpy
import sys

import torch
from transformers import AttentionInterface, AttentionMaskInterface

aot_eager = functools.partial(torch.compile, backend="aot_eager")  # in seconds, not in minutes
torch.compile, models = aot_eager, []


def watch(name: str) -> None:
    original = getattr(torch.nn.utils, name)

    def call(parameters, *arguments):
        parameters = list(parameters)
        case["step"] += 1
        if case["step"] < 3:
            named = models[0].named_parameters()
            gradients = {n: p.grad for n, p in named if p.grad is not None}
            whole = {n: getattr(g, "full_tensor", lambda g=g: g)() for n, g in gradients.items()}
            file = f"{case['folder']}/gradients-{case['step']}-{os.environ.get('RANK', '0')}"
            torch.save({n: g.clone() for n, g in whole.items()}, file)
        return original(parameters, *arguments)

    setattr(torch.nn.utils, name, call)


def train(self, mode=True):
    if hasattr(self, "lm_head"):
        models[:] = [self]
    return original_train(self, mode)


watch("clip_grad_norm_")  # chapters 1 to 6 and 11
watch("clip_grads_with_norm_")  # chapters with a norm of their own
original_train = torch.nn.Module.train
torch.nn.Module.train = train
registers = [each._global_mapping for each in (AttentionInterface, AttentionMaskInterface)]
originals = [dict(register) for register in registers]  # chapter 11 changes both
for case in json.load(open(sys.argv[1])):
    case["step"] = 0
    for register, original in zip(registers, originals, strict=True):
        register.update(original)
    os.environ.update(case["env"])
    sys.argv = [case["script"], *case["flags"]]
    print("\ncase", case["name"], flush=True)
    try:
        runpy.run_path(case["script"], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
