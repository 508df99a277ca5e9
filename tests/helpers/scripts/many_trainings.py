"""Runs chapters many times in the processes of one job: `many_trainings.py CASES`.

A case finds what a new process would find. In its first two steps, each rank saves its gradients,
before they are clipped, and in the end how many graphs it has compiled.
"""

import functools
import json
import os
import random
import runpy
import shutil
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import filelock
import numpy as np
import torch
import torch.utils.checkpoint
from torch.distributed.checkpoint import state_dict
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ExpertsInterface
from transformers.modeling_layers import GradientCheckpointingLayer

aot_eager = functools.partial(torch.compile, backend="aot_eager")  # in seconds, not in minutes
torch.compile, models = aot_eager, []
rank = int(os.environ.get("RANK", "0"))
save = torch.serialization.save  # a patch may slow down torch.save, which chapters use


def watch(name: str) -> None:
    original = getattr(torch.nn.utils, name)

    def call(parameters, *arguments):
        parameters = list(parameters)
        first = case.setdefault("first parameter", id(parameters[0]))
        if id(parameters[0]) != first:  # chapter 12 clips those of each mesh
            return original(parameters, *arguments)
        case["step"] += 1
        if case["step"] == 1 and case.get("facts"):
            save(facts(), f"{case['folder']}/facts-{rank}")
        if case["step"] < 3:
            named = models[0].named_parameters()
            gradients = {n: p.grad for n, p in named if p.grad is not None}
            whole = {n: getattr(g, "full_tensor", lambda g=g: g)() for n, g in gradients.items()}
            file = f"{case['folder']}/gradients-{case['step']}-{rank}"
            save({n: g.clone() for n, g in whole.items()}, file)
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
registers = [AttentionInterface, AttentionMaskInterface, ExpertsInterface]  # chapters 11 and 12
registers = [each._global_mapping for each in registers]
originals = [dict(register) for register in registers]


def begin_anew(number: int) -> None:
    """As a new process. Its random numbers are others each time, as they are for a user."""
    case["step"] = 0
    for register, original in zip(registers, originals, strict=True):
        register.clear()
        register.update(original)
    random.seed(seed := 100 * number + rank)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # or the ninth compilation of a function is silently none
        torch._dynamo.utils.counters.clear()


def compiled_graphs() -> int:
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo.utils.counters["stats"]["unique_graphs"] if dynamo else 0


@contextmanager
def away(folder: str):
    """Nobody can read the weights of this model meanwhile. All ranks wait for rank 0."""
    file, elsewhere = Path(folder, "model.safetensors"), Path(folder, "elsewhere")
    file.rename(elsewhere)
    yield
    elsewhere.rename(file)


def take_over(checkpoint: str, to: str) -> None:
    """With the records of all steps, as a killed run leaves them."""
    shutil.copytree(checkpoint, to)
    shutil.copy(Path(checkpoint).with_name("metrics.jsonl"), Path(to).parent)


for number, case in enumerate(json.load(open(sys.argv[1]))):
    begin_anew(number)
    if case.get("facts"):
        torch.utils.checkpoint.checkpoint = count_chunks
    os.environ.update(case["env"])
    sys.argv = [case["script"], *case["flags"]]
    if "continues" in case and rank == 0:  # the other ranks wait for rank 0
        take_over(*case["continues"])
    print("\ncase", case["name"], flush=True)
    with away(case["without"]) if "without" in case and rank == 0 else nullcontext():
        try:
            runpy.run_path(case["script"], run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
    Path(case["folder"], f"graphs-{rank}").write_text(str(compiled_graphs()))
    while locks:
        locks.pop().release(force=True)
