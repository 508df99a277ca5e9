"""Compares the estimates of tools/estimate-memory.py with what the chapters really allocate.

    python benchmarks/memory.py                                    # what this machine has
    python benchmarks/memory.py --models my-model/config.json --devices 2 --methods FSDP

On GPUs that is torch.cuda.max_memory_allocated, on CPUs the bytes of all storages that are alive
after any operation; of the fullest rank, and the least of steps 3 to 6, since gloo lets go of its
tensors a little later in some. Each row is a run of a chapter from random weights, with nothing
saved. Weights, gradients and moments are compared, too, to the byte.
"""

import argparse
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
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
CHAPTERS = {"chapter 1": "01-single-gpu", "DDP": "02-ddp", "HSDP": "05-multi-node"}
CHAPTERS |= {
    "tensor parallel": "06-tensor-parallel",
    "pipeline": "07-pipeline-parallel",
}  # else 03-fsdp
METHOD_FLAGS = {"no reshard": ["--no-reshard-after-forward"], "offload": ["--cpu-offload"]}
METHODS = [
    "chapter 1",
    "DDP",
    "FSDP",
    "no reshard",
    "offload",
    "HSDP",
    "tensor parallel",
    "pipeline",
]
# Flags of chapters 5 to 7, for the chapter and for the estimator: groups of two ranks
GROUPS = {"HSDP": "--shard-size", "tensor parallel": "--tensor-parallel"}
GROUPS |= {"pipeline": "--pipeline-parallel"}
FIRST_STEP, LAST_STEP = 3, 6

LLAMA_1B = {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192}
LLAMA_1B |= {"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_1B |= {"head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True}
QWEN_0_6B = {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072}
QWEN_0_6B |= {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
QWEN_0_6B |= {"head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True}
GPT_2 = {"model_type": "gpt2", "n_embd": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 50257}
SMALL = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 682}
SMALL |= {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
SMALL |= {"vocab_size": 2048, "tie_word_embeddings": False}
SMALL_GPT_2 = {"model_type": "gpt2", "n_embd": 192, "n_layer": 4, "n_head": 4, "vocab_size": 2048}
SMALL_GPT_2 |= {"n_positions": 256}
ON_GPU = {"Llama-3.2-1B": LLAMA_1B, "Qwen3-0.6B": QWEN_0_6B, "GPT-2 medium": GPT_2}
ON_CPU = {"Llama, 5M": SMALL, "GPT-2, 3M": SMALL_GPT_2}


# -- In the process of a chapter -------------------------------------------------------------------


def watch(chapter: str, flags: list[str]) -> None:
    """Runs the chapter, and prints what this rank has allocated after the last step."""
    import torch
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

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
                if isinstance(value, torch.Tensor):
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
        parameters = [p for group in self.param_groups for p in group["params"]]
        moments = [x for p in parameters for x in self.state[p].values()]
        states[:] = [size(parameters), size(p.grad for p in parameters), size(moments)]
        if on_gpu:
            peaks[-1] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        else:
            alive.count()
        peaks.append(0)
        if len(peaks) == LAST_STEP + 1:
            print(f"\nallocated {min(peaks[FIRST_STEP - 1 : LAST_STEP])} {states}", flush=True)
        return result

    torch.optim.AdamW.step = step
    sys.argv = [chapter, *flags]
    runpy.run_path(chapter, run_name="__main__")


# -- The comparison --------------------------------------------------------------------------------


def run(command: list) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def arguments(method: str, flags: list) -> list:
    """Of this script, to run a chapter and to watch it."""
    chapter = REPOSITORY / CHAPTERS.get(method, "03-fsdp") / "train-llm.py"
    flags = [*flags, "--from-scratch", "--max-steps", LAST_STEP, "--eval-freq", 0]
    return ["--watch", chapter, *flags, *METHOD_FLAGS.get(method, [])]


def fullest_rank(output: str, devices: int) -> tuple[int, list[int]]:
    """Bytes at the fullest moment, and of weights, gradients and moments."""
    ranks = re.findall(r"allocated (\d+) \[(.*?)\]", output)
    assert len(ranks) == devices, output
    states = [[int(size) for size in states.split(", ")] for _, states in ranks]
    return max(int(peak) for peak, _ in ranks), [max(sizes) for sizes in zip(*states, strict=True)]


def measured(method: str, devices: int, flags: list) -> tuple[int, list[int]]:
    """Of the fullest rank, as above."""
    launch = [sys.executable]
    if method != "chapter 1":
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", devices]
    return fullest_rank(run([*launch, __file__, *arguments(method, flags)]), devices)


def estimated(method: str, devices: int, flags: list, device: str) -> tuple[float, list[int]]:
    tool = REPOSITORY / "tools" / "estimate-memory.py"
    options = ["--devices", devices, "--device", device, "--json"]
    estimates = json.loads(run([sys.executable, tool, *flags, *options]))["estimates"]
    (one,) = (estimate for estimate in estimates if estimate["method"] == method)
    return one["total"], [*one["states"].values()]


def model_folder(folder: Path, config: dict) -> Path:
    """A config without weights, and a tokenizer with fewer tokens than it has."""
    folder.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((REPOSITORY / "tiny-llama" / file).read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {"bos_token_id": 0, "eos_token_id": 0}))
    return folder


def compare(name: str, folder: Path, method: str, devices: int, flags: list, device: str) -> float:
    """Prints a row and returns the ratio."""
    flags = ["-m", folder, *flags, *([GROUPS[method], 2] if method in GROUPS else [])]
    guess, guessed_states = estimated(method, devices, flags, device)
    stdlib = os.path.join(sysconfig.get_path("stdlib"), "[a-z]*.py")
    text = stdlib if device == "cuda" else REPOSITORY / "0*" / "*.py"
    real, real_states = measured(method, devices, [*flags, "-d", text])
    if guessed_states != real_states:
        sys.exit(f"error: {method} on {devices}: {real_states} bytes, not {guessed_states}")
    digits = 2 if real > 1e9 else 5
    cells = [name, method, devices, f"`{' '.join(map(str, flags[2:]))}`"]
    cells += [f"{guess / 1e9:.{digits}f}", f"{real / 1e9:.{digits}f}", f"{guess / real:.3f}"]
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    return guess / real


def main() -> None:
    import torch

    gpus = torch.cuda.device_count()
    device = "cuda" if gpus else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", help="config.json files [some known models]")
    counts = [n for n in (1, 2, 4, 8) if n <= (gpus or 4)]
    parser.add_argument("--devices", type=int, nargs="+", default=counts, help="[%(default)s]")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("-b", "--batch-sizes", type=int, nargs="+", default=[2, 8])
    parser.add_argument("-s", "--seq-length", type=int, default=1024 if gpus else 128)
    parser.add_argument("--flags", help='instead of the usual ones: --flags="--dtype fp32; ..."')
    args = parser.parse_args()
    known = ON_GPU if gpus else ON_CPU
    if args.models:
        known = {path: json.loads(Path(path).read_text()) for path in args.models}
    variants = ["", "--activation-checkpointing"]
    variants += ["--no-compile"] if gpus else ["--dtype bf16", "--gradient-accumulation-steps 2"]
    if args.flags is not None:
        variants = args.flags.split(";")
    print(f"{torch.cuda.get_device_name() if gpus else 'CPU'}, torch {torch.__version__}\n")
    print("| model | method | devices | flags | estimate, GB | measured, GB | ratio |")
    print("|---|---|---|---|---|---|---|")
    ratios = []
    with tempfile.TemporaryDirectory() as temporary:
        for number, (name, config) in enumerate(known.items()):
            folder = model_folder(Path(temporary, str(number)), config)
            cases = itertools.product(args.methods, args.devices, args.batch_sizes, variants)
            for method, devices, batch, variant in cases:
                # Chapters 6 and 7 do not train all families.
                known_family = method not in GROUPS or config["model_type"] != "gpt2"
                possible = devices % 2 == 0 if method in GROUPS else devices == 1
                if known_family and (possible or method in METHODS[1:5]):
                    flags = ["-b", batch, "-s", args.seq_length, *variant.split()]
                    ratios.append(compare(name, folder, method, devices, flags, device))
    print(f"\n{len(ratios)} runs, ratios {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--watch"]:
        watch(sys.argv[2], sys.argv[3:])
    else:
        main()
