"""Where the time of a step of chapter 1 goes: matrix products, attention, loss and so on.

    python benchmarks/profile-step.py                                        # the demo's model
    python benchmarks/profile-step.py --steps 20 -m FOLDER -s 2048 --compile # chapter 1's flags
    python benchmarks/profile-step.py --read trace.json                      # an older trace

Runs `main` of chapter 1 under torch.profiler, which writes a trace. If the trace has kernels of a
GPU, the table adds up their times. Otherwise, it adds up the time of each operator on the CPU,
without the operators that it calls. Annotations, such as `Optimizer.step#AdamW.step`, have the time
of all kernels in them. They count nothing, because the kernels count already.
"""

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as in the chapter, whose line comes too late

import torch
from torch.profiler import ProfilerActivity, profile, schedule

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
from models import load_chapter, script_of

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
# What a GPU does, by the names of categories in a trace. `gpu_user_annotation` is no work.
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def kind_of(name: str) -> str:
    """The kind of an operation or a kernel, by its name."""
    found = (kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))
    return next(found, "the rest")


def own_times(events: list[dict]) -> list[tuple[str, float]]:
    """Name and microseconds of each operator or annotation, without the operators inside it."""
    threads = defaultdict(list)
    for event in events:
        threads[event["tid"]].append(event)
    times = []
    for of_thread in threads.values():
        of_thread.sort(key=lambda event: (event["ts"], -event["dur"]))
        open_events = []  # the innermost one is the last
        for event in of_thread:
            while open_events and open_events[-1]["end"] <= event["ts"]:
                open_events.pop()
            if open_events:
                open_events[-1]["own"] -= event["dur"]
            event |= {"end": event["ts"] + event["dur"], "own": event["dur"]}
            open_events.append(event)
        times += [(e["name"], e["own"]) for e in of_thread if e["cat"] == "cpu_op"]
    return times


def kind_times(trace: dict) -> dict[str, float]:
    """Milliseconds per step of each kind."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    steps = {e["name"] for e in events if e["name"].startswith("ProfilerStep#")}
    if not steps:
        sys.exit("error: the trace has no step: call `profiler.step()` after each step")
    kernels = [event for event in events if event["cat"] in GPU_WORK]
    times = [(event["name"], event["dur"]) for event in kernels]
    if not kernels:
        times = own_times([e for e in events if e["cat"] in ("cpu_op", "user_annotation")])
    result = dict.fromkeys([*KINDS, "the rest"], 0.0)
    for name, microseconds in times:
        result[kind_of(name)] += microseconds / 1e3 / len(steps)
    return result


def profile_chapter_1(steps: int, flags: list[str], file: Path) -> float:
    """Writes a trace of these steps. Returns the milliseconds of a step by the clock."""
    chapter_1 = load_chapter(1)
    warmup = 5
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    plan = schedule(wait=warmup, warmup=1, active=steps)
    options = {"on_trace_ready": lambda done: done.export_chrome_trace(str(file))}
    profiler = profile(activities=activities, schedule=plan, acc_events=True, **options)
    original = chapter_1.timed
    milliseconds = []
    begin = time.perf_counter()

    @contextmanager
    def timed(phase, times, wait):
        nonlocal begin
        with original(phase, times, wait):
            yield
        if phase == "update":  # the last one of a step
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            milliseconds.append(1e3 * (time.perf_counter() - begin))
            profiler.step()
            begin = time.perf_counter()  # the profiler's own time is not the step's

    chapter_1.timed = timed
    chapter_1.DEMO["experiment_name"] = None  # a run without a name writes nothing
    sys.argv = [str(script_of(1)), "--demo", *flags, "--max-steps", str(warmup + 1 + steps)]
    # In logged steps, the chapter waits for the GPU after each phase.
    sys.argv += ["--log-freq", str(10**6), "--eval-freq", "0", "--warmup-steps", "0"]
    with profiler:
        chapter_1.main()
    return statistics.mean(milliseconds[warmup + 1 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="measured steps [10]")
    parser.add_argument("--read", type=Path, help="a trace that was written before")
    parser.add_argument("--write", type=Path, help="keeps the trace in this file")
    own, flags = parser.parse_known_args()
    wall = None
    with tempfile.TemporaryDirectory() as folder:
        file = own.read or own.write or Path(folder) / "trace.json"
        if not own.read:
            wall = profile_chapter_1(own.steps, flags, file)
        try:
            trace = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            sys.exit(f"error: cannot read the trace {file} ({error})")
    times = kind_times(trace)
    total = sum(times.values())
    print("| | ms per step | share |\n|---|---|---|")
    for kind, ms in times.items():
        print(f"| {kind} | {ms:.1f} | {ms / total:.0%} |")
    print(f"| together | {total:.1f} | |")
    if wall:
        print(f"| a step by the clock, under the profiler | {wall:.1f} | |")


if __name__ == "__main__":
    main()
