"""Records the first optimizer steps of a script, for tools/first-difference.py.

For each optimizer step, each rank writes a file with its parameters, whole: the gradient before and
after clipping, the value before and after the step, and the settings of the optimizer. It also
notes a fingerprint of each sample that the model has read. After FIRST_DIFFERENCE_STEPS steps, the
process ends.
"""

import hashlib
import inspect
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

FOLDER = Path(os.environ["FIRST_DIFFERENCE"]).absolute()
STEPS = int(os.environ.get("FIRST_DIFFERENCE_STEPS", 2))
WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
NO_SETTINGS = ("params", "foreach", "fused", "capturable", "differentiable", "initial_lr")

roots = []  # the modules that the script calls, such as the model or its wrapper
first_calls = {}  # by id of a module: in which order modules were called
depth = 0  # of nested calls
samples = []  # fingerprints of this step
precisions = set()
is_random = False  # a forward pass has drawn random numbers, as dropout does
unclipped = {}  # by id of a parameter: its gradient before a clipping that has changed it
clipping_seen = set()  # ids of parameters
rows = []  # of this step: the number of samples of each forward pass
labels = []  # of this step: the number of labels of each mean of cross-entropies
evaluated = False  # the model was called without gradients
steps_done = {}  # by id of an optimizer
stepping = None  # the optimizer whose step has begun: an optimizer may call another one


def rank():
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def world_size():
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


# -- What the model reads, and the names of its parameters -----------------------------------------


def fingerprints(values):
    """One for each row of the first tensor of integers, or of the first tensor: shape and hash."""
    tensors = [x for x in values if isinstance(x, torch.Tensor) and x.dim() > 0]
    integers = [x for x in tensors if not x.is_floating_point() and x.dtype != torch.bool]
    for tensor in (integers or tensors)[:1]:
        rows = tensor.detach().cpu()
        rows = rows.float() if rows.is_floating_point() else rows
        hashes = [hashlib.sha1(row.numpy().tobytes()).hexdigest()[:16] for row in rows]
        return [f"{list(tensor.shape[1:])} {row_hash}" for row_hash in hashes]
    return []


def note_root(module, values):
    if not any(module is known for root in roots for known in root.modules()):
        if next(module.parameters(), None) is None:
            return  # a loss, for example
        roots.append(module)
    if any(module is root for root in roots):
        found = fingerprints(values)
        samples.extend(found)
        rows.append(len(found))


def generators():
    """The states of the generators of random numbers, which each drawn number changes."""
    of_gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *of_gpu]


original_call = torch.nn.Module.__call__


def watched_call(module, *args, **options):
    global depth, is_random, evaluated
    if not torch.is_grad_enabled():
        evaluated = True
        return original_call(module, *args, **options)
    if depth == 0:
        note_root(module, [*args, *options.values()])
        before = generators()
    first_calls.setdefault(id(module), len(first_calls))
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        precisions.add("autocast")
    if args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
        precisions.add(str(args[0].dtype).removeprefix("torch."))
    depth += 1
    try:
        return original_call(module, *args, **options)
    finally:
        depth -= 1
        if depth == 0:
            pairs = zip(before, generators(), strict=False)
            is_random |= not all(torch.equal(one, other) for one, other in pairs)


def named_parameters():
    """By id of a parameter: its names, its place in the forward pass, and its kind of module."""
    found = {}
    taken = {}
    for number, root in enumerate(roots):
        for prefix, module in root.named_modules(remove_duplicate=False):
            for own_name, parameter in module.named_parameters(recurse=False):
                name = f"{prefix}.{own_name}" if prefix else own_name
                for wrapper in WRAPPERS:
                    name = name.replace(wrapper, "")
                if taken.setdefault(name, parameter) is not parameter:
                    name = f"{name} of model {number}"  # the script calls several models
                place = first_calls.get(id(module), len(first_calls))
                entry = found.setdefault(id(parameter), {"names": [], "place": place})
                entry["place"] = min(entry["place"], place)
                entry.setdefault("kind", type(module).__name__.removeprefix("FSDP"))
                if name not in entry["names"]:
                    entry["names"].append(name)
    return found


# -- Tensors ---------------------------------------------------------------------------------------


def record(tensor):
    """A copy of the whole tensor on the CPU."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()  # DTensor: all ranks take part
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return tensor.to("cpu", dtype, copy=True)


def takes_part(parameter):
    """Does this rank write the parameter? Ranks with other shards of a DTensor need not."""
    if not hasattr(parameter, "placements"):
        return True
    coordinates = parameter.device_mesh.get_coordinate()
    pairs = zip(coordinates, parameter.placements, strict=True)
    return all(place == 0 or placement.is_replicate() for place, placement in pairs)


# -- Clipping, and the optimizer -------------------------------------------------------------------


def watch_clipping(clip):
    def watched(parameters, *args, **options):
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        before = [record(parameter.grad) for parameter in given]
        result = clip(given, *args, **options)
        for parameter, gradient in zip(given, before, strict=True):
            # Scripts also call this to measure a norm, which changes nothing.
            if gradient is not None and not torch.equal(gradient, record(parameter.grad)):
                unclipped[id(parameter)] = gradient
            clipping_seen.add(id(parameter))
        return result

    return watched


def watch_cross_entropy(function):
    def watched(*args, **options):
        values = signature.bind(*args, **options).arguments
        target = values["target"]
        if values.get("reduction", "mean") == "mean" and torch.is_grad_enabled():
            counted = target.dim() == 0 or target != values.get("ignore_index", -100)
            labels.append(int(torch.as_tensor(counted).sum()))
        return function(*args, **options)

    signature = inspect.signature(function)
    return watched


def settings_of(group):
    """The numbers of a group of the optimizer: learning rate, decay, betas."""
    settings = {}
    for name, value in group.items():
        if isinstance(value, torch.Tensor):
            value = value.item()  # the learning rate may be a tensor
        values = value if isinstance(value, tuple | list) else [value]
        if name not in NO_SETTINGS and all(isinstance(v, int | float) for v in values):
            settings[name] = list(values)
    return settings


def before_step(optimizer, args, options):
    global stepping
    is_trial = any(p.is_meta for group in optimizer.param_groups for p in group["params"])
    if stepping or is_trial:  # a chapter tries its flags on a model without values
        return
    stepping = optimizer
    done = steps_done.setdefault(id(optimizer), 0)
    if done == STEPS:
        finish()
    names = named_parameters()
    number = list(steps_done).index(id(optimizer))
    recorded = optimizer.first_difference = {}
    for group in optimizer.param_groups:
        settings = settings_of(group)
        for parameter in group["params"]:
            place = 10**6 + len(recorded)
            # A loss may be a function of parameters that no module has.
            default = {"names": [f"parameter {len(recorded)} of optimizer {number}"]}
            default |= {"place": place, "kind": "function"}
            entry = names.get(id(parameter), default) | {"settings": settings}
            entry |= {"shape": list(parameter.shape), "clipped": record(parameter.grad)}
            entry["is_clipped"] = id(parameter) in unclipped
            entry["gradient"] = unclipped.pop(id(parameter), entry["clipped"])
            entry["saw_clipping"] = id(parameter) in clipping_seen
            entry["before"] = record(parameter)
            recorded[id(parameter)] = entry


def after_step(optimizer, args, options):
    global stepping
    if stepping is not optimizer:
        return
    stepping = None
    steps_done[id(optimizer)] += 1
    recorded = optimizer.__dict__.pop("first_difference")
    entries = []
    for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
        entry = recorded[id(parameter)]
        entry["after"] = record(parameter)
        if takes_part(parameter):
            entries.append(entry)
    step = steps_done[id(optimizer)]
    number = list(steps_done).index(id(optimizer))
    content = {"rank": rank(), "world_size": world_size(), "step": step, "parameters": entries}
    content |= {"samples": list(samples), "precisions": sorted(precisions), "random": is_random}
    content |= {"rows": list(rows), "labels": list(labels), "evaluated": evaluated}
    for of_step in (samples, rows, labels):
        of_step.clear()
    torch.save(content, FOLDER / f"step{step}-rank{rank()}-optimizer{number}.pt")


def finish():
    """Ends the process, when all ranks have come here: none of them may wait for this one."""
    (FOLDER / f"done{rank()}").touch()
    end = time.monotonic() + 60
    while len([*FOLDER.glob("done*")]) < world_size() and time.monotonic() < end:
        time.sleep(0.05)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


torch.nn.Module.__call__ = watched_call
for module in (torch.nn.utils, torch.nn.utils.clip_grad):
    for name in ("clip_grad_norm_", "clip_grads_with_norm_"):
        if hasattr(module, name):
            setattr(module, name, watch_clipping(getattr(module, name)))
torch.nn.functional.cross_entropy = watch_cross_entropy(torch.nn.functional.cross_entropy)
register_optimizer_step_pre_hook(before_step)
register_optimizer_step_post_hook(after_step)
FOLDER.mkdir(parents=True, exist_ok=True)
