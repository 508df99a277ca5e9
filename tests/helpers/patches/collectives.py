"""In the process of a rank: counts the collectives of its second step, by kind and size."""

import collections
import json

import torch
from helpers.patches import print
from torch.nn.attention import bias
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

KINDS = {"_allgather_base_": "all-gather", "all_gather_into_tensor": "all-gather"}
KINDS |= {"_reduce_scatter_base_": "reduce-scatter", "reduce_scatter_tensor": "reduce-scatter"}
KINDS |= {"allreduce_": "all-reduce", "reduce_": "reduce", "broadcast_": "send", "send": "send"}
KINDS |= {"all_to_all_single": "all-to-all", "alltoall_base_": "all-to-all"}
seen = collections.Counter()
steps, PRINTED = [], [2]


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if torch.distributed.tensor.DTensor in types:
            return NotImplemented  # its parts come back here
        result = op(*args, **kwargs or {})
        space, _, name = op.name().partition(".")[0].partition("::")
        groups = [x for x in args if "c10d" in space and isinstance(x, torch.ScriptObject)]
        alone = groups and torch.distributed.ProcessGroup.unbox(groups[0]).size() == 1
        if "c10d" in space and name in KINDS and not alone:
            tensors = [x for x in tree_leaves((args, kwargs, result)) if torch.is_tensor(x)]
            size = max(x.numel() * x.element_size() for x in tensors)
            seen[f"{KINDS[name]} {size}"] += 1
        return result


def step(self, *args, original=torch.optim.AdamW.step, **options):
    result = original(self, *args, **options)
    steps.append(dict(seen))
    seen.clear()
    if len(steps) in PRINTED:
        print("seen", json.dumps(steps[-1]), flush=True)
    return result


def without_modes(*sizes, original=bias.causal_lower_right):
    with _disable_current_modes():  # masks of chapter 11 are no tensors of a dispatch mode
        return original(*sizes)


bias.causal_lower_right = without_modes

torch.optim.AdamW.step = step
Watch().__enter__()
