"""Runs chapters many times in the processes of one job: `many_trainings.py CASES`.

Starting processes takes longer than these trainings. In its first two steps, each rank saves its
gradients, before they are clipped.
"""

import functools
import json
import os
import runpy
import shutil
import sys

import filelock
import torch
import torch.utils.checkpoint
from torch.distributed.checkpoint import state_dict
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_layers import GradientCheckpointingLayer

aot_eager = functools.partial(torch.compile, backend="aot_eager")  # in seconds, not in minutes
torch.compile, models = aot_eager, []


def watch(name: str) -> None:
    original = getattr(torch.nn.utils, name)

    def call(parameters, *arguments):
        parameters = list(parameters)
        case["step"] += 1
        if case["step"] == 1 and case.get("facts"):
            torch.save(facts(), f"{case['folder']}/facts-{os.environ.get('RANK', '0')}")
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
        layers = [m for m in self.modules() if isinstance(m, GradientCheckpointingLayer)]
        for layer in layers[:1] if case.get("facts") else ():
            layer.register_forward_pre_hook(see_tokens, with_kwargs=True)
    return original_train(self, mode)


def see_tokens(layer, inputs, options):
    hidden_states = inputs[0] if inputs else options["hidden_states"]
    case["tokens of a layer"] = getattr(hidden_states, "to_local", lambda: hidden_states)().shape[1]


def facts() -> dict:
    """What shows the promise of a chapter on this rank, in the first step."""
    parameters = dict(models[0].named_parameters())
    local = {n: getattr(p, "to_local", lambda p=p: p)().detach() for n, p in parameters.items()}
    found = {"local": {n: (p.numel(), p.double().sum().item()) for n, p in local.items()}}
    found["whole"] = {n: tuple(p.shape) for n, p in parameters.items()}
    found["trains"] = [n for n, p in parameters.items() if p.requires_grad]
    found["tokens of a layer"] = case.get("tokens of a layer")
    arrived = [m.received_tokens for m in models[0].modules() if hasattr(m, "received_tokens")]
    found["tokens of experts"] = sum(arrived, torch.zeros(())).item()
    found["chunks"] = case.get("chunks", 0)
    found["sent"] = case.get("sent", 0)
    layers = [m for m in models[0].modules() if type(m).__name__ == "Float8Linear"]
    shards = [layer.weight.to_local() for layer in layers]
    found["in 8 bits"] = ["Float8" in type(shard).__name__ for shard in shards]
    owned = [len(o.owned) for o in optimizers if hasattr(o, "owned")]
    return found | {"owned": sum(owned)}


def count_chunks(*arguments, **options):
    case["chunks"] = case.get("chunks", 0) + 1
    return original_checkpoint(*arguments, **options)


def count_sent(*arguments, **options):
    case["sent"] = case.get("sent", 0) + 1
    return original_set(*arguments, **options)


def remember_lock(self, *arguments, **options):
    locks.append(self)  # until the process ends, but the next case may continue this run
    return original_acquire(self, *arguments, **options)


def remember_optimizer(self, *arguments, **options):
    optimizers[:] = [self]
    return original_init(self, *arguments, **options)


watch("clip_grad_norm_")  # chapters 1 to 6 and 11
watch("clip_grads_with_norm_")  # chapters with a norm of their own
optimizers, locks = [], []
original_acquire, filelock.FileLock.acquire = filelock.FileLock.acquire, remember_lock
original_train, torch.nn.Module.train = torch.nn.Module.train, train
original_init, torch.optim.AdamW.__init__ = torch.optim.AdamW.__init__, remember_optimizer
original_set, state_dict.set_model_state_dict = state_dict.set_model_state_dict, count_sent
original_checkpoint = torch.utils.checkpoint.checkpoint
registers = [each._global_mapping for each in (AttentionInterface, AttentionMaskInterface)]
originals = [dict(register) for register in registers]  # chapter 11 changes both
for case in json.load(open(sys.argv[1])):
    case["step"] = 0
    if case.get("facts"):
        torch.utils.checkpoint.checkpoint = count_chunks
    for register, original in zip(registers, originals, strict=True):
        register.update(original)
    os.environ.update(case["env"])
    sys.argv = [case["script"], *case["flags"]]
    if "continues" in case and os.environ["RANK"] == "0":  # the other ranks wait for rank 0
        shutil.copytree(*case["continues"])
    print("\ncase", case["name"], flush=True)
    try:
        runpy.run_path(case["script"], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    while locks:
        locks.pop().release(force=True)
