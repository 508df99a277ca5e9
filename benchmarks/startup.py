"""How long it takes from the command to the first step: with nothing in the cache, and again.

    python benchmarks/startup.py
    python benchmarks/startup.py --chapters 1 --flags "-m FOLDER -d data.jsonl"

Cold: the caches of datasets and compiled kernels are empty, so the text is read and tokenized.
Warm: they are as the run before left them. Python's own files are in the system's cache both times.
"""

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
CHAPTERS = sorted(REPOSITORY.glob("0[1-8]-*/train-llm.py"))  # 9 has other flags and other output
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
# What a chapter prints, and what is over when it does
SIGNS = {
    "imports": ", torch ",
    "data": "Training on ",
    "model": "Attention ",
    "step": "step 1/",
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chapters", type=int, nargs="+", default=[1, 2, 3], choices=[1, 2, 3])
    parser.add_argument("--processes", type=int, default=2, help="of chapters 2 and 3 [2]")
    parser.add_argument("--flags", default="", help="for all, e.g. another model")
    parser.add_argument("--rounds", type=int, default=3, help="[3]")
    return parser.parse_args()


def start(args, chapter: int, cache: str) -> dict[str, float]:
    """Seconds from the command to each sign."""
    launch = [sys.executable, *([*TORCHRUN, args.processes] if chapter > 1 else [])]
    flags = ["--demo", *shlex.split(args.flags), "--max-steps", 1, "--log-freq", 1, "-e", "run"]
    flags += ["--eval-freq", 0, "--ckpt-freq", 10**6]
    env = os.environ | {"HF_HOME": cache, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/compiled"}
    env |= {"COMET_AUTO_LOG_DISABLE": "true", "HF_HUB_OFFLINE": "1"}
    seconds, waiting, output = {}, dict(SIGNS), []
    with tempfile.TemporaryDirectory() as folder:
        command = [*launch, CHAPTERS[chapter - 1], *flags, "--save-dir", folder]
        begin = time.perf_counter()
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen([*map(str, command)], env=env, **pipes)
        for line in process.stdout:
            output.append(line)
            for name in [name for name, sign in waiting.items() if sign in line]:
                seconds[name] = time.perf_counter() - begin
                del waiting[name]
        if process.wait() or waiting:
            sys.exit(f"{''.join(output)}\nerror: chapter {chapter} failed")
    return seconds


def main() -> None:
    args = parse_args()
    results = {}
    for number in range(args.rounds):
        for chapter in args.chapters if number % 2 == 0 else args.chapters[::-1]:
            with tempfile.TemporaryDirectory() as cache:
                for kind in ("cold", "warm"):
                    seconds = start(args, chapter, cache)
                    results.setdefault((chapter, kind), []).append(seconds)
                    print(f"chapter {chapter}, {kind}: {seconds['step']:.1f} s", file=sys.stderr)
    print("| | imports | data | model | first step, s | min to max |\n|---|---|---|---|---|---|")
    for (chapter, kind), runs in sorted(results.items()):
        cells = [f"{statistics.median(run[name] for run in runs):.1f}" for name in SIGNS]
        steps = [run["step"] for run in runs]
        spread = f"{min(steps):.1f} to {max(steps):.1f}"
        print(f"| chapter {chapter}, {kind} | {' | '.join(cells)} | {spread} |")


if __name__ == "__main__":
    main()
