"""Chapters 2 and 3 against chapter 1: the same global batches on one device, and on more.

    python benchmarks/chapters.py                           # the demo's model, 1 and 2 processes
    python benchmarks/chapters.py --processes 1 2 4 8 --flags "-m FOLDER -s 2048 --dtype bf16"

Each round runs every contender once, in an order that alternates. `-b` is the batch of chapter 1;
the ranks of the others share it. The speed of a run is that of its median window of 5 steps, which
ignores what else a shared machine does for a while. Printed: the median and the spread of tokens
per second over the rounds, and the ratio to chapter 1 within each round. The losses must agree, or
it ends with an error.
"""

import argparse
import itertools
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
CHAPTERS = sorted(REPOSITORY.glob("[0-9][0-9]-*/train-llm.py"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chapters", type=int, nargs="+", default=[2, 3], choices=[2, 3])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("-b", "--batch-size", type=int, default=8, help="blocks per global batch")
    parser.add_argument("--flags", default="", help="for all contenders, e.g. another model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60, help="measured steps of each run")
    parser.add_argument("--warmup", type=int, default=10, help="steps before, left out")
    return parser.parse_args()


def run(args, chapter: int, processes: int) -> dict:
    """One run of a chapter (chapter 1 on 0 processes): its losses and tokens per second."""
    launch = [*TORCHRUN, processes] if processes else [sys.executable]
    launch.append(CHAPTERS[chapter - 1])
    flags = ["--demo", *shlex.split(args.flags), "-b", args.batch_size // max(processes, 1)]
    flags += ["--max-steps", args.warmup + args.steps, "--log-freq", 5]
    flags += ["--eval-freq", 0, "--ckpt-freq", 10**6, "--warmup-steps", 0, "--lr", 1e-4]
    with tempfile.TemporaryDirectory() as folder:
        command = [*launch, *flags, "-e", "run", "--save-dir", folder]
        env = os.environ | {"COMET_AUTO_LOG_DISABLE": "true"}
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=env)
        if done.returncode:
            sys.exit(done.stderr)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    speeds = [record["tokens_per_second"] for record in records if record["step"] > args.warmup]
    losses = [record["loss"] for record in records]
    return {"tokens_per_second": statistics.median(speeds), "losses": losses}


def main() -> None:
    args = parse_args()
    contenders = {"chapter 1": (1, 0)}
    for chapter, processes in itertools.product(args.chapters, args.processes):
        if args.batch_size % processes:
            sys.exit(f"error: {processes} processes cannot share a batch of {args.batch_size}")
        name = f"chapter {chapter}, {processes} process{'es' if processes > 1 else ''}"
        contenders[name] = (chapter, processes)
    results = {name: [] for name in contenders}
    for number in range(args.rounds):
        for name in list(contenders) if number % 2 == 0 else list(contenders)[::-1]:
            results[name].append(run(args, *contenders[name]))
            speed = results[name][-1]["tokens_per_second"]
            print(f"round {number + 1}: {name}: {speed:,.0f} tokens/s", file=sys.stderr)

    reference = results["chapter 1"][0]["losses"]
    for name, runs in results.items():
        for loss, expected in (
            pair for r in runs for pair in zip(r["losses"], reference, strict=True)
        ):
            if abs(loss - expected) > 1e-3 * expected:
                sys.exit(f"error: the losses differ: {name} has {loss}, chapter 1 {expected}")

    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if gpu else f"{platform.machine()} CPU"
    print(f"{device}, {os.cpu_count()} CPU cores; torch {torch.__version__}\n")
    print("| | tokens/s | min to max | ratio to chapter 1 | min to max |")
    print("|---|---|---|---|---|")
    baseline = [r["tokens_per_second"] for r in results["chapter 1"]]
    for name, runs in results.items():
        speeds = [r["tokens_per_second"] for r in runs]
        ratios = [a / b for a, b in zip(speeds, baseline, strict=True)]
        speed = f"{statistics.median(speeds):,.0f} | {min(speeds):,.0f} to {max(speeds):,.0f}"
        ratio = f"{statistics.median(ratios):.3f} | {min(ratios):.3f} to {max(ratios):.3f}"
        print(f"| {name} | {speed} | {ratio} |")


if __name__ == "__main__":
    main()
