"""Where the time of a step of chapter 1 goes: matrix products, attention, loss and so on.

    python benchmarks/profile-step.py                                        # the demo's model
    python benchmarks/profile-step.py --steps 20 -m FOLDER -s 2048 --compile # chapter 1's flags

Runs `main` of chapter 1 under torch.profiler and adds up the time of each operation itself, without
those that it calls: kernels on a GPU, else operators on the CPU.
"""

import argparse
import importlib.util
import os
import re
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as in the chapter, whose line comes too late

import torch
from torch.profiler import ProfilerActivity, profile, schedule

CHAPTER_1 = Path(__file__).resolve().parents[1] / "01-single-gpu" / "train-llm.py"
# The first that matches counts; Python and waiting are in none of them. The name of a fused kernel
# lists its operations, such as triton_red_fused__to_copy_mean_mul_pow_rsqrt.
KINDS = {
    "attention": r"attention|flash|fmha|cudnn.*sdpa",
    "loss": r"softmax|nll_loss|cross_entropy",
    "optimizer and clipping": r"adamw?|foreach|multi_tensor|norm_?2|linalg_vector_norm",
    "matrix products": r"\bmm\b|addmm|bmm|matmul|gemm|cutlass|nvjet|linear",
    "compiled kernels": r"triton|compiled|cpp_fused",
    "copies and casts": r"copy|memcpy|memset|fill|zero|cat\b",
}


def kind_of(name: str) -> str:
    """The kind of an operation or a kernel, by its name."""
    found = (kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))
    return next(found, "the rest")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="measured steps [10]")
    own, flags = parser.parse_known_args()
    spec = importlib.util.spec_from_file_location("chapter_1", CHAPTER_1)
    chapter_1 = importlib.util.module_from_spec(spec)
    sys.modules["chapter_1"] = chapter_1
    spec.loader.exec_module(chapter_1)

    warmup = 5
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    plan = schedule(wait=warmup, warmup=1, active=own.steps)
    profiler = profile(activities=activities, schedule=plan, acc_events=True)
    records = []

    class Timer(chapter_1.PhaseTimer):
        """Is read after every step, because the chapter logs each."""

        def read(self, tokens_per_step: int) -> dict[str, float]:
            records.append(super().read(tokens_per_step))
            profiler.step()
            self.last_read = time.perf_counter()  # the profiler's own time is not the step's
            return records[-1]

    chapter_1.PhaseTimer = Timer
    chapter_1.DEMO["experiment_name"] = None  # a run without a name writes nothing
    sys.argv = [str(CHAPTER_1), "--demo", *flags, "--max-steps", str(warmup + 1 + own.steps)]
    sys.argv += ["--log-freq", "1", "--eval-freq", "0", "--warmup-steps", "0"]
    with profiler:
        chapter_1.main()

    times = dict.fromkeys([*KINDS, "the rest"], 0.0)
    for event in profiler.key_averages():
        spent_us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if on_gpu and event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        if event.key.startswith("ProfilerStep"):
            continue
        times[kind_of(event.key)] += spent_us / 1e3 / own.steps
    total = sum(times.values())
    print("| | ms per step | share |\n|---|---|---|")
    for kind, ms in times.items():
        print(f"| {kind} | {ms:.1f} | {ms / total:.0%} |")
    wall = statistics.mean(record["time/total_ms"] for record in records[-own.steps :])
    print(
        f"| together | {total:.1f} | |\n| a step by the clock, under the profiler | {wall:.1f} | |"
    )


if __name__ == "__main__":
    main()
