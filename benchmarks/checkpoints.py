"""What a checkpoint costs: the stall of training, for each way to save the same state.

    python benchmarks/checkpoints.py                        # 16M parameters, on a CPU too
    python benchmarks/checkpoints.py --shape llama-3.2-1b --processes 1
    python benchmarks/checkpoints.py --slow-disk 50 --only shard async      # 50 MB/s per process

Contenders: chapter 1 (`torch.save`), chapter 3 (torch.distributed.checkpoint, each rank its
shards), and chapter 5 with each format and with --async-checkpoint. `--slow-disk` delays `write`
and `fsync` of the folder of the run, from outside, with slow-disk.c; it needs a C compiler.

The stall is the wall time from the step that saves to the end of the next one, less the median
time of a step. The cost is the same over all steps until the next save: a save may slow these down,
too. The first save of a run is left out, since it also allocates memory that the later ones use
again.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig

REPOSITORY = Path(__file__).resolve().parents[1]
NAMES = ("01-single-gpu", "03-fsdp", "05-multi-node")
SINGLE, FSDP, NODES = (REPOSITORY / name / "train-llm.py" for name in NAMES)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
COMMON = {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 2048}
SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2} | COMMON,
    "small": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 15} | COMMON,
    "llama-3.2-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
    },
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--processes", type=int, default=2, help="of chapters 3 and 5")
    parser.add_argument("--saves", type=int, default=4, help="measured ones of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="from one save to the next")
    parser.add_argument("--slow-disk", type=float, help="MB/s of each process that writes")
    parser.add_argument("--only", nargs="+", help="the contenders that have one of these words")
    return parser.parse_args()


def compile_slow_disk(folder: Path) -> Path:
    """slow-disk.c as a library that is loaded before all others."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        sys.exit("error: --slow-disk needs a C compiler: apt install gcc")
    library = folder / "slow-disk.so"
    source = REPOSITORY / "benchmarks" / "slow-disk.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, source], check=True)
    return library


def write_model(folder: Path, shape: dict) -> None:
    """A config of this shape, tied, and the demo's tokenizer."""
    source = REPOSITORY / "models" / "tiny-llama"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    ends = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": True}
    config = AutoConfig.for_model("llama", **shape, **ends)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)


def run(args, model: Path, launch: list) -> tuple[float, float, float]:
    """The median stall and cost of a save, and the median time of a step, in seconds."""
    steps = args.steps * (args.saves + 2)
    with tempfile.TemporaryDirectory() as folder:
        command = [*launch, "--demo", "-m", model, "-s", 64, "-b", 1]
        command += ["--max-steps", steps, "--ckpt-freq", args.steps, "--keep-checkpoints", 1]
        command += ["--log-freq", 1, "--eval-freq", 0, "-e", "run", "--save-dir", folder]
        env = os.environ | {"COMET_AUTO_LOG_DISABLE": "true"}
        if args.slow_disk:
            env |= {"SLOW_FOLDER": folder, "SLOW_BYTES_PER_S": str(args.slow_disk * 1e6)}
            env |= {"SLOW_FSYNC_S": "0.01", "LD_PRELOAD": str(model / "slow-disk.so")}
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=env)
        if done.returncode:
            sys.exit(done.stderr)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    # Of each step, up to where its metrics are read, which is before its checkpoint
    times = [json.loads(line)["time/total_ms"] / 1e3 for line in lines]
    saves = range(2 * args.steps, steps, args.steps)
    step = statistics.median(times[args.steps :])
    stalls = [times[save] - step for save in saves]
    costs = [sum(times[save : save + args.steps]) - args.steps * step for save in saves]
    return statistics.median(stalls), statistics.median(costs), step


def main() -> None:
    args = parse_args()
    fsdp = [*TORCHRUN, args.processes, FSDP]
    name = f"chapter 3, {args.processes} process{'es' if args.processes > 1 else ''}"
    contenders = {
        "chapter 1, torch.save": [sys.executable, SINGLE],
        f"{name}, DCP": fsdp,
    }
    nodes = [*TORCHRUN, args.processes, NODES]
    for how in ("shard", "full", "local"):
        contenders[f"{name}, {how}".replace("3", "5")] = [*nodes, "--checkpoint-format", how]
    contenders[f"{name}, async".replace("3", "5")] = [*nodes, "--async-checkpoint"]
    if args.only:
        chosen = [name for name in contenders if any(word in name for word in args.only)]
        contenders = {name: contenders[name] for name in chosen}
    results = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), SHAPES[args.shape])
        if args.slow_disk:
            compile_slow_disk(Path(folder))
        for number in range(args.rounds):
            for name in list(contenders) if number % 2 == 0 else list(contenders)[::-1]:
                results[name].append(run(args, Path(folder), contenders[name]))
                stall, cost, _ = results[name][-1]
                print(f"round {number + 1}: {name}: {stall:.3f} s, {cost:.3f} s", file=sys.stderr)

    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if gpu else f"{platform.machine()} CPU"
    print(f"{device}, {os.cpu_count()} CPU cores; torch {torch.__version__}; {args.shape}")
    print(f"{args.slow_disk} MB/s per process\n" if args.slow_disk else "")
    print("| | stall, s | min to max | cost, s | min to max | a step, s |")
    print("|---|---|---|---|---|---|")
    for name, runs in results.items():
        stalls, costs, steps = zip(*runs, strict=True)
        cells = [
            f"{statistics.median(x):.2f} | {min(x):.2f} to {max(x):.2f}" for x in (stalls, costs)
        ]
        print(f"| {name} | {' | '.join(cells)} | {statistics.median(steps):.2f} |")


if __name__ == "__main__":
    main()
