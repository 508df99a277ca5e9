"""Compares the estimates of tools/estimate-memory.py with what the chapters really allocate.

    python benchmarks/memory.py                                    # what this machine has
    python benchmarks/memory.py --models my-model/config.json --devices 2 --methods FSDP

On GPUs that is torch.cuda.max_memory_allocated, on CPUs the bytes of all storages that are alive
after any operation; of the fullest rank, and the least of steps 3 to 6, since gloo lets go of its
tensors a little later in some. Each row is a run of a chapter from random weights, with nothing
saved. Weights that train, gradients and moments are compared, too, to the byte.
"""

import argparse
import importlib
import itertools
import json
import os
import re
import runpy
import subprocess
import sys
import sysconfig
import tempfile
import time
import weakref
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.nn.attention import bias
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

REPOSITORY = Path(__file__).resolve().parents[1]
FIRST_STEP, LAST_STEP = 3, 6
LOW_RANK = "sparse low-rank"
ONE_DEVICE = ("chapter 1", LOW_RANK)

LLAMA_1B = {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192}
LLAMA_1B |= {"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_1B |= {"head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True}
QWEN_0_6B = {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072}
QWEN_0_6B |= {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
QWEN_0_6B |= {"head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True}
GPT_2 = {"model_type": "gpt2", "n_embd": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 50257}
ON_GPU = {"Llama-3.2-1B": LLAMA_1B, "Qwen3-0.6B": QWEN_0_6B, "GPT-2 medium": GPT_2}
ON_CPU = {
    "tiny-llama": json.loads((REPOSITORY / "models" / "tiny-llama" / "config.json").read_text())
}


# -- In the process of a chapter -------------------------------------------------------------------


def watch(chapter: str, flags: list[str]) -> None:
    """Runs the chapter, and prints what this rank has allocated after the last step."""
    peaks, states = [0], []
    on_gpu = torch.cuda.is_available()

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
    if not on_gpu:
        alive.__enter__()
        for name in ("all_gather", "reduce_scatter"):
            for suffix in ("_single", "_into_tensor", "_tensor"):
                without_buffers_of_gloo(name + suffix)

    def size(tensors) -> int:
        local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
        return sum(tensor.numel() * tensor.element_size() for tensor in local)

    original_step = torch.optim.AdamW.step

    def step(self, *args, **options):
        result = original_step(self, *args, **options)
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        moments = [x for p in parameters for x in self.state[p].values()]
        states[:] = [size(parameters), size(p.grad for p in parameters), size(moments)]
        if on_gpu:
            peaks[-1] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        else:
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


# -- The comparison --------------------------------------------------------------------------------


@lru_cache
def tool() -> ModuleType:
    """The estimator, as a module that torch.compile finds by its name."""
    sys.path.append(str(REPOSITORY / "tools"))
    return importlib.import_module("estimate-memory")


def arguments(method: str, flags: list) -> list:
    """Of this script, to run a chapter and to watch it."""
    known = tool().METHODS[method]
    (chapter,) = REPOSITORY.glob(f"{known.chapter:02}-*/train-llm.py")
    switch = known.flags if method in ("no reshard", "offload") else []
    steps = ["--max-steps", LAST_STEP, "--eval-freq", 0]
    if method != LOW_RANK:  # it has no other way to start
        steps += ["--from-scratch"]
    return ["--watch", chapter, *flags, *steps, *switch]


def run(method: str, devices: int, flags: list) -> str:
    """What the ranks of the chapter print."""
    launch = [sys.executable]
    if method not in ONE_DEVICE:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", devices]
    command = [*map(str, [*launch, __file__, *arguments(method, flags)])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def measured(output: str, devices: int) -> tuple[int, list[int]]:
    """Bytes of the fullest rank at its fullest moment, and of weights, gradients and moments."""
    ranks = re.findall(r"allocated (\d+) \[(.*?)\]", output)
    assert len(ranks) == devices, output
    states = [[int(size) for size in states.split(", ")] for _, states in ranks]
    return max(int(peak) for peak, _ in ranks), [max(sizes) for sizes in zip(*states, strict=True)]


def estimated(method: str, devices: int, flags: list) -> tuple[float, list[int]]:
    args = tool().parse_args([*map(str, flags)])
    traces = tool().Traces(AutoConfig.from_pretrained(args.model_name), args)
    known = tool().METHODS[method]
    states, moments = tool().step(traces, known, devices, args.batch_size)
    return tool().peak(moments), [*states.values()]


def group_flags(method: str, size: int) -> list:
    """Of a chapter with groups of so many ranks, in each dimension. Adapters have a rank of 8."""
    known = tool().METHODS[method]
    if known.chapter <= 3:
        return []
    size = 8 if method in (LOW_RANK, "LoRA") else size
    return [part for flag in known.flags for part in (flag, size)]


def model_folder(folder: Path, config: dict) -> Path:
    """A config without weights, and a tokenizer with fewer tokens than it has."""
    folder.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((REPOSITORY / "models" / "tiny-llama" / file).read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {"bos_token_id": 0, "eos_token_id": 0}))
    return folder


def compare(name: str, folder: Path, method: str, devices: int, flags: list, device: str) -> float:
    """Prints a row and returns the ratio."""
    guess, guessed_states = estimated(method, devices, ["-m", folder, *flags, "--device", device])
    stdlib = os.path.join(sysconfig.get_path("stdlib"), "[a-z]*.py")
    text = ["-d", stdlib if device == "cuda" else REPOSITORY / "0*" / "*.py"]
    if method == "LoRA":
        chat = REPOSITORY / "models" / "tiny-chat"
        text = ["-d", chat / "stdlib.jsonl", "--chat-template", chat / "template.jinja"]
    output = run(method, devices, ["-m", folder, *flags, *text])
    real, real_states = measured(output, devices)
    if guessed_states != real_states:
        sys.exit(f"error: {method} on {devices}: {real_states} bytes, not {guessed_states}")
    digits = 2 if real > 1e9 else 5
    cells = [name, method, devices, f"`{' '.join(map(str, flags))}`"]
    cells += [f"{guess / 1e9:.{digits}f}", f"{real / 1e9:.{digits}f}", f"{guess / real:.3f}"]
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    return guess / real


def main(argv=None) -> list[float]:
    gpus, methods = torch.cuda.device_count(), tool().METHODS
    device = "cuda" if gpus else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", help="config.json files [some known models]")
    counts = [n for n in (1, 2, 4, 8) if n <= (gpus or 4)]
    parser.add_argument("--devices", type=int, nargs="+", default=counts, help="[%(default)s]")
    parser.add_argument("--methods", nargs="+", choices=methods, default=[*methods])
    group = "ranks of a group from chapter 5 on, in each dimension [%(default)s]"
    parser.add_argument("--group-size", type=int, default=2, help=group)
    parser.add_argument("-b", "--batch-sizes", type=int, nargs="+", default=[2, 8])
    parser.add_argument("-s", "--seq-length", type=int, default=1024 if gpus else 128)
    variants = ["", "--activation-checkpointing"]
    variants += ["--no-compile"] if gpus else ["--dtype bf16", "--gradient-accumulation-steps 2"]
    several = 'instead of the usual ones: --flags="--dtype fp32; ..."'
    parser.add_argument("--flags", default=";".join(variants), help=several)
    args = parser.parse_args(argv)
    known = ON_GPU if gpus else ON_CPU
    if args.models:
        known = {path: json.loads(Path(path).read_text()) for path in args.models}
    print(f"{torch.cuda.get_device_name() if gpus else 'CPU'}, torch {torch.__version__}\n")
    print("| model | method | devices | flags | estimate, GB | measured, GB | ratio |")
    print("|---|---|---|---|---|---|---|")
    ratios = []
    with tempfile.TemporaryDirectory() as temporary:
        for number, (name, config) in enumerate(known.items()):
            folder = model_folder(Path(temporary, str(number)), config)
            each = args.methods, args.devices, args.batch_sizes, args.flags.split(";")
            for method, devices, batch, variant in itertools.product(*each):
                flags = ["-b", batch, "-s", args.seq_length, *variant.split()]
                flags += group_flags(method, args.group_size)
                chapter = methods[method].chapter
                group = methods[method].group(tool().parse_args([*map(str, flags)]))
                possible = group and devices % group == 0
                # The later chapters do not train all families.
                possible &= chapter < 6 or config["model_type"] != "gpt2"
                mixture = "num_experts_per_tok" in config
                possible &= chapter != 12 or mixture
                possible &= chapter not in (6, 7, 13, 14) or not mixture
                if possible and (method not in ONE_DEVICE or devices == 1):
                    ratios.append(compare(name, folder, method, devices, flags, device))
    print(f"\n{len(ratios)} runs, ratios {min(ratios):.3f} to {max(ratios):.3f}")
    return ratios


if __name__ == "__main__":
    if sys.argv[1:2] == ["--watch"]:
        watch(sys.argv[2], sys.argv[3:])
    else:
        main()
