"""Runs a chapter, and prints what this rank allocates in a step: for test_estimate_memory.py.

It prints the bytes of all storages that are alive after any operation, at their most: the least of
steps 3 to 6, since gloo lets go of its tensors a little later in some. Then it prints the bytes of
weights that train, gradients and moments.
"""

import runpy
import sys
import time
import weakref

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.nn.attention import bias
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

FIRST_STEP, LAST_STEP = 3, 6


def watch(chapter: str, flags: list[str]) -> None:
    """Runs the chapter, and prints what this rank has allocated after the last step."""
    peaks, states = [0], []

    class Alive(TorchDispatchMode):
        """Adds up the storages that are alive, after each operation."""

        def __init__(self):
            super().__init__()
            self.storages, self.off = {}, False

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if any(hasattr(kind, "__tensor_flatten__") for kind in types):
                return NotImplemented  # comes again, as this rank's part of the tensors
            result = op(*args, **kwargs or {})
            for value in tree_leaves((args, kwargs, result)):
                # The wrapper of a collective's result has a storage without memory of its own.
                if isinstance(value, torch.Tensor) and not isinstance(value, AsyncCollectiveTensor):
                    storage = getattr(value, "_local_tensor", value).untyped_storage()
                    if storage.device.type == "cpu":
                        self.storages[storage._cdata] = weakref.ref(storage)
            self.count()
            return result

        def count(self):
            if not self.off:
                storages = [reference() for reference in self.storages.values()]
                alive = sum(storage.nbytes() for storage in storages if storage is not None)
                peaks[-1] = max(peaks[-1], alive)
                self.storages = {s._cdata: weakref.ref(s) for s in storages if s is not None}

    def without_buffers_of_gloo(name: str) -> None:
        """Gloo copies tensors that NCCL works on in place, and lets go of them a little later."""
        original = getattr(dist, name, None)

        def call(*args, **options):
            alive.off = True
            result = original(*args, **options)
            time.sleep(0.02)
            alive.off = False
            return result

        if original:
            setattr(dist, name, call)

    alive = Alive()
    alive.__enter__()
    for name in ("all_gather", "reduce_scatter"):
        for suffix in ("_single", "_into_tensor", "_tensor"):
            without_buffers_of_gloo(name + suffix)

    def size(tensors) -> int:
        local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
        return sum(tensor.numel() * tensor.element_size() for tensor in local)

    original_clip, sizes = torch.nn.utils.clip_grad_norm_, []  # sizes of the gradients

    def clip(parameters, *args, **options):
        """Sees all gradients. Chapter 18 has let go of some when AdamW's part begins."""
        parameters = [*parameters]
        sizes[:] = [size(p.grad for p in parameters if p.grad is not None)]
        return original_clip(parameters, *args, **options)

    torch.nn.utils.clip_grad_norm_ = clip
    original_step = torch.optim.AdamW.step

    def step(self, *args, **options):
        result = original_step(self, *args, **options)
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        moments = [x for p in parameters for x in self.state[p].values()]
        of_gradients = sizes or [size(p.grad for p in parameters)]  # some chapters clip otherwise
        states[:] = [size(parameters), *of_gradients, size(moments)]
        alive.count()
        peaks.append(0)
        if len(peaks) == LAST_STEP + 1:
            # The chapters silence `sys.stdout` on ranks above 0.
            print(
                f"\nallocated {min(peaks[FIRST_STEP - 1 : LAST_STEP])} {states}",
                file=sys.__stdout__,
                flush=True,
            )
        return result

    def without_modes(*sizes, original=bias.causal_lower_right):
        """The masks of chapter 11 cannot be made while a dispatch mode is on."""
        with _disable_current_modes():
            return original(*sizes)

    bias.causal_lower_right = without_modes
    torch.optim.AdamW.step = step
    sys.argv = [chapter, *flags]
    runpy.run_path(chapter, run_name="__main__")


if __name__ == "__main__":
    watch(sys.argv[1], sys.argv[2:])
