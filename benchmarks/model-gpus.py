"""Models and GPUs: which chapter fits, and how fast. Nothing is measured here.

    python benchmarks/model-gpus.py

This prints the first table of docs/which-chapter.md, and then the flags behind its cells. It takes
a few minutes, because it traces compiled layers.
"""

import importlib
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.append(str(REPOSITORY / "tools"))
scaling = importlib.import_module("estimate-scaling")
layouts = importlib.import_module("choose-layout")
memory = importlib.import_module("estimate-memory")

MODELS = ["meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B", "meta-llama/Llama-3.1-8B"]
MODELS += ["Qwen/Qwen3-14B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-32B", "meta-llama/Llama-3.1-70B"]
# 40 % of the rate in the datasheet of an RTX 4090. The defaults are those of an H100.
RTX_4090 = "--gpu-memory 24 --rate 67 --attention-rate 56 --memory 1008 --link-in-node 24"
GPUS = [(1, 24, RTX_4090), (2, 24, RTX_4090), (1, 80, "")]
GPUS += [(8, 80, ""), (16, 80, ""), (32, 80, "")]
SEQ_LENGTH = 2048
SAMPLES = 256  # of a step: half a million tokens


def speed(samples: int, step: float) -> str:
    """Tokens per second of all GPUs, and hours per billion tokens."""
    rate = samples * SEQ_LENGTH / step
    hours = 1e9 / rate / 3600
    return f"{round(rate, -2):,.0f}/s, {hours:.{1 if hours < 10 else 0}f} h"


def all_weights(facts, devices: int, args, offload_gb: float) -> tuple[str, str]:
    """The earliest chapter that fits, with its fastest layout; and the flags of this layout."""
    for samples in (SAMPLES, devices):  # the second one needs no accumulation of gradients
        args.global_batch_size = samples
        fit, out = layouts.choose(facts, devices, args)
        fit.sort(key=lambda choice: choice.layout.chapter)
        layouts.trace_best(fit, out, devices, args, wanted=1)
        if not fit:
            layouts.trace_smallest(facts, fit, out, devices, args)
        if fit:
            best = fit[0]
            line = layouts.command(best.layout, devices, args)
            gb = (best.traced or best.memory) / 1e9
            return f"{best.layout.chapter}: {gb:.0f} GB, {speed(samples, best.step)}", line
    gb = 16 * facts.parameters / 1e9
    return f"3, offload {gb:,.0f} GB", f"one sample: {offload_gb:.1f} GB of the GPU"


def adapters(facts, devices: int, args, gb: float) -> str:
    """Chapter 17 with activation checkpointing and one sample.

    It runs each layer forward, forward again, and backward to the layer's inputs alone. This is as
    much computation as a full training without checkpointing. Such a training also sends the
    gradients of all weights, so the adapters are at least as fast.
    """
    if gb > (1 - memory.SPARE) * args.gpu_memory:
        return f"no: {gb:.0f} GB"
    method, count = ("FSDP", SAMPLES // devices) if devices > 1 else ("DDP", SAMPLES)
    layout = layouts.Layout(3, method, dp=devices, shards=devices, micro_batches=count)
    step = layouts.assess(facts, layout, devices, args).step
    return f"17: {gb:.0f} GB, {speed(SAMPLES, step)}"


def main() -> None:
    print("| model | what trains |", " | ".join(f"{n} × {size} GB" for n, size, _ in GPUS), "|")
    print("|---" * (2 + len(GPUS)) + "|")
    lines = []
    for name in MODELS:
        facts = scaling.load_model(name)
        of_one = f"-m {name} -b 1 -s {SEQ_LENGTH} --activation-checkpointing --lora-rank 16"
        traces = memory.Traces(memory.load_config(name), memory.parse_args(of_one.split()))
        rows = {"all weights": [], "adapters": []}
        for devices, size, gpu in GPUS:
            flags = f"--choose -m {name} --devices {devices} -s {SEQ_LENGTH} {gpu}"
            flags += f" --global-batch-size {SAMPLES}"
            args = scaling.parse_args(flags.split())
            peaks = {}
            for method in ("offload", "LoRA"):
                _, moments = memory.step(traces, memory.METHODS[method], devices, 1)
                peaks[method] = memory.peak(moments) / 1e9
            cell, line = all_weights(facts, devices, args, peaks["offload"])
            rows["all weights"].append(cell)
            rows["adapters"].append(adapters(facts, devices, args, peaks["LoRA"]))
            lines.append(f"{devices} × {size} GB: {line}")
        for what, cells in rows.items():
            print("|", name.split("/")[1], "|", what, "|", " | ".join(cells), "|", flush=True)
    print("\n".join(["", *lines]))


if __name__ == "__main__":
    main()
