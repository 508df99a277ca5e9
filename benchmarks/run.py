"""The chapters against what people would use instead: one table of speed, memory and scaling.

    python benchmarks/run.py                                   # the demo's model, on this machine
    python benchmarks/run.py --compile --devices 1 --rounds 7
    python benchmarks/run.py --shape llama-3.2-1b -b 8 -s 2048 --devices 1 2 4 8     # on GPUs

Each round runs every contender once, each in processes of its own, in an order that alternates.
All train on the same global batches of `-b` samples, which the devices share, in the same
precision, from the same weights, and with the same setting of OpenMP (GOMP_SPINCOUNT). Where the
losses do not agree, the script ends with an error, so that nobody wins by doing less. A model is
given by its shape alone: nothing is downloaded.

tokens/s     of the whole job: the median window of 5 steps after the warm-up. Then median, and
             least to most, over the rounds
MFU          operations per token (docs/metrics.md) * tokens/s, divided by the peak of the devices
             in their datasheet, for dense bf16; empty for other precisions and devices
of products  the same, divided by the rate of large matrix products, measured in each round
memory       per device, GB (1e9 bytes): reserved by PyTorch, peak; on CPUs resident in the process
efficiency   tokens/s, divided by those of the same method on one device and by the devices; on
             CPUs, where all processes share the same cores, not divided by them
ratio        of tokens/s to chapter 1 within each round: median, and least to most
"""

import argparse
import datetime
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
from chapters import FACTS, SCRIPTS

import models

REPOSITORY = Path(__file__).resolve().parents[1]
# Those whose losses can be compared: 8 is chapter 2 without its flags. 9, the Trainer, is a peer.
COMPARED = [name for name, facts in FACTS.items() if "losses" not in facts or name[:2] == "08"]
CHAPTERS = [SCRIPTS[name] for name in COMPARED if name[:2] != "09"]
PEERS = REPOSITORY / "benchmarks" / "peers"
ON_GPU = torch.cuda.is_available()
WINDOW = 5  # steps
# FLOP/s of dense bf16 in the datasheets of NVIDIA, by a part of the device's name
PEAKS = {"A100": 312e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12}
SPIN_COUNT = "10000"  # GOMP_SPINCOUNT of every contender, the value that the chapters set

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
# Without dropout, of which each would draw other random numbers
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 50257,
    "n_positions": 1024,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SHAPES = {
    "demo": json.loads((REPOSITORY / "models" / "tiny-llama" / "config.json").read_text()),
    "gpt2-124m": GPT2 | {"n_embd": 768, "n_layer": 12, "n_head": 12},
    "gpt2-355m": GPT2 | {"n_embd": 1024, "n_layer": 24, "n_head": 16},
    "llama-3.2-1b": LLAMA
    | {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
}


@dataclass
class Contender:
    method: str
    devices: int
    script: Path
    flags: list[str] = field(default_factory=list)
    torchrun: bool = False
    comet: bool = False
    results: list[dict] = field(default_factory=list)  # one per round

    @property
    def is_chapter(self) -> bool:
        return self.script in CHAPTERS

    def column(self, name: str) -> list[float]:
        return [result[name] for result in self.results]


METHODS = ("chapters", "comet", "trainer", "trainer-tuned", "trainer-liger", "trainer-fsdp")
METHODS += ("accelerate", "lightning", "transformers-tp")
# Of peers that are not in Transformers alone. A peer without its package has no row.
PACKAGES = {name: "accelerate" for name in METHODS if name.startswith("trainer")}
PACKAGES |= {"accelerate": "accelerate", "lightning": "lightning", "transformers-tp": "accelerate"}
THREE = "13-3d-parallel"
# Chapters in which a group of devices has the same samples, and the flag of its size
GROUPS = {"06-tensor-parallel": "--tensor-parallel", THREE: "--tensor-parallel"}
GROUPS |= {"11-context-parallel": "--context-parallel"}
PP = "07-pipeline-parallel"  # one pipeline of all devices, with as many micro-batches as stages


def contenders(args) -> list[Contender]:
    """Chapter 1 first: the others are compared with it."""
    found = []
    for devices in args.devices:
        ddp, sharded = " DDP" if devices > 1 else "", devices > 1

        def add(method, script, *flags, torchrun=sharded, devices=devices, **options):
            found.append(Contender(method, devices, script, [*flags], torchrun, **options))

        if "chapters" in args.methods:
            for compiled in [False, True] if args.compile else [False]:
                flag, name = ("--compile", ", compiled") if compiled else ("--no-compile", "")
                if devices == 1:
                    add(f"chapter 1{name}", CHAPTERS[0], flag)
                for script in CHAPTERS[1:]:
                    flags = [flag]
                    listed = SHAPES[args.shape]["model_type"] == "llama"
                    if script.parent.name in (*GROUPS, PP) and not listed:
                        continue  # a family that some of these chapters do not know
                    if script.parent.name in GROUPS:
                        # The largest groups that this shape allows; each has a share of the batch
                        size = math.gcd(devices, SHAPES[args.shape]["num_key_value_heads"])
                        flags += [GROUPS[script.parent.name], size]
                        flags += ["-b", args.batch_size * size // devices]
                    if script.parent.name == THREE:
                        flags += ["--pipeline-parallel", devices // size]
                    add(
                        f"chapter {int(script.parent.name[:2])}{name}",
                        script,
                        *flags,
                        torchrun=True,
                    )
        if "comet" in args.methods and devices == 1:
            add("chapter 1, Comet offline", CHAPTERS[0], "--no-compile", comet=True)
        if "trainer" in args.methods:
            add(f"Trainer{ddp}", PEERS / "trainer.py")
        if "trainer-tuned" in args.methods:
            add(f"Trainer{ddp}, tuned", PEERS / "trainer.py", "--tuned")
        # Liger 0.8.5 does not compile with PyTorch 2.11
        if "trainer-liger" in args.methods and ON_GPU and find_spec("liger_kernel"):
            add(f"Trainer{ddp}, Liger", PEERS / "trainer.py", "--liger")
        if "trainer-fsdp" in args.methods and sharded and ON_GPU:  # on CPUs it would be DDP
            add("Trainer FSDP, tuned", PEERS / "trainer.py", "--tuned", "--fsdp")
        flag, name = ("--compile", ", compiled") if args.compile else ("--no-compile", "")
        if "accelerate" in args.methods:
            add(f"Accelerate{ddp}{name}", PEERS / "accelerate_loop.py", flag)
        if "lightning" in args.methods:
            add(f"Lightning{ddp}{name}", PEERS / "lightning_fit.py", flag)
        # It does not clip: only where nobody does. It splits the kv heads, as chapter 6 does.
        heads = SHAPES[args.shape].get("num_key_value_heads", 1)
        unclipped = "--max-grad-norm 0" in args.flags and args.dtype == "fp32"
        if "transformers-tp" in args.methods and sharded and unclipped and heads % devices == 0:
            add("Transformers TP", PEERS / "transformers_tp.py")
    return found


def run(contender: Contender, flags: list[str], args, limit_s: float | None = None) -> dict | None:
    """One run: tokens per second, losses, memory per device. None if it failed."""
    launch = [sys.executable]
    if contender.torchrun:
        launch += ["-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc-per-node", contender.devices]
    batch = ["-b", args.batch_size // contender.devices]
    with tempfile.TemporaryDirectory() as folder:
        command = [*launch, contender.script, *flags, *batch, *contender.flags]
        if contender.is_chapter:
            command += ["-e", "run", "--save-dir", folder, "--ckpt-freq", 10**6]
        else:
            command += ["--warmup", args.warmup]
        env = os.environ | {"GOMP_SPINCOUNT": SPIN_COUNT}
        env |= {"COMET_AUTO_LOG_DISABLE": str(not contender.comet).lower()}
        options = {"capture_output": True, "text": True, "env": env, "timeout": limit_s}
        done = subprocess.run([*map(str, command)], **options)
        if done.returncode:
            print(f"{done.stderr}\nerror: {contender.method} failed", file=sys.stderr)
            return None
        if not contender.is_chapter:
            return json.loads([line for line in done.stdout.splitlines() if line[:1] == "{"][-1])
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    measured = [record for record in records if record["step"] > args.warmup]
    memory = "memory/peak_reserved_gb" if ON_GPU else "memory/resident_gb"
    return {
        "tokens_per_second": statistics.median(r["tokens_per_second"] for r in measured),
        "losses": [record["loss"] for record in records],
        "peak_gb": max(record[memory] for record in records),
        "data_share": statistics.median(r["time/data_ms"] / r["time/total_ms"] for r in measured),
    }


def write_shape(folder: Path, shape: str) -> None:
    """A folder for `-m`: the config of this shape and the tokenizer of the demo."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((REPOSITORY / "models" / "tiny-llama" / name).read_bytes())
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))


def work(folder: str, args) -> list:
    """Chapter 1's flags of every contender."""
    flags = ["--demo", "-m", folder, "-s", args.seq_length, "--dtype", args.dtype]
    flags += ["--max-steps", args.warmup + args.steps, "--log-freq", WINDOW, "--eval-freq", 0]
    return [*flags, "--warmup-steps", 0, "--lr", 1e-4, *shlex.split(args.flags)]


def matrix_rate(dtype: torch.dtype) -> float:
    """FLOPs per second of large matrix products on one device: the best of 5, by the clock."""
    device, n, repeats = ("cuda", 8192, 20) if ON_GPU else ("cpu", 2048, 3)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    rates = []
    for _ in range(6):
        begin = time.perf_counter()
        for _ in range(repeats):
            a @ b
        if ON_GPU:
            torch.cuda.synchronize()
        rates.append(2 * n**3 * repeats / (time.perf_counter() - begin))
    del a, b
    torch.cuda.empty_cache()
    return max(rates[1:])


def datasheet_peak(dtype: torch.dtype) -> float | None:
    """FLOP/s of one device, or None where this is not known."""
    if not ON_GPU or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def check_losses(found: list[Contender], tolerance: float) -> None:
    first = found[0]
    for contender in found:
        for losses in contender.column("losses"):
            pairs = zip(losses, first.results[0]["losses"], strict=True)
            for loss, expected in pairs:
                if not abs(loss - expected) <= tolerance * expected:
                    names = f"{contender.method} has {loss}, {first.method} {expected}"
                    sys.exit(f"error: the losses differ, {names}")


def table(
    found: list[Contender], flops_per_token: float, rates: list[float], peak: float | None
) -> str:
    def spread(values: list[float], form: str) -> list[str]:
        ends = f"{min(values):{form}} to {max(values):{form}}"
        return [f"{statistics.median(values):{form}}", ends]

    header = "devices | method | tokens/s | min to max | MFU | of products | memory | efficiency |"
    lines = [f"| {header} ratio | min to max |", "|---" * 10 + "|"]
    for contender in found:
        speeds = contender.column("tokens_per_second")
        machines = contender.devices if ON_GPU else 1
        flops = [speed * flops_per_token / machines for speed in speeds]
        mfu = f"{statistics.median(flops) / peak:.2f}" if peak else ""
        shares = [done / rate for done, rate in zip(flops, rates, strict=True)]
        of_products = f"{statistics.median(shares):.2f}"
        alone = next(
            (
                other.column("tokens_per_second")
                for other in found
                if other.devices == 1
                and other.method.replace(" DDP", "") == contender.method.replace(" DDP", "")
            ),
            None,
        )
        efficiency = ""
        if alone and contender.devices > 1:
            shares = (a / b / machines for a, b in zip(speeds, alone, strict=True))
            efficiency = f"{statistics.median(shares):.2f}"
        baseline = found[0].column("tokens_per_second")
        ratios = [a / b for a, b in zip(speeds, baseline, strict=True)]
        cells = [str(contender.devices), contender.method, *spread(speeds, ",.0f")]
        cells += [mfu, of_products, f"{max(contender.column('peak_gb')):.2f}"]
        lines.append("| " + " | ".join([*cells, efficiency, *spread(ratios, ".3f")]) + " |")
    return "\n".join(lines)


def machine() -> str:
    name = torch.cuda.get_device_name() if ON_GPU else processor()
    count = f"{torch.cuda.device_count()} × {name}" if ON_GPU else f"{name}, {os.cpu_count()} cores"
    packages = ["torch", "transformers", "accelerate", "lightning", "liger-kernel"]
    found = [name for name in packages if find_spec(name.replace("-", "_"))]
    versions = ", ".join(f"{name} {version(name)}" for name in found)
    return f"{count}; Python {platform.python_version()}, {versions}"


def processor() -> str:
    """Its name, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="demo")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2], help="[1 2]")
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(METHODS), help="[all]"
    )
    parser.add_argument("--only", nargs="+", help="of these methods, the rows with these names")
    parser.add_argument("-b", "--batch-size", type=int, default=8, help="samples, global [8]")
    parser.add_argument("-s", "--seq-length", type=int, default=256, help="[256]")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16" if ON_GPU else "fp32")
    switch = argparse.BooleanOptionalAction
    parser.add_argument("--compile", action=switch, default=ON_GPU, help="compiled ones, too")
    parser.add_argument("--flags", default="", help="for all, e.g. --activation-checkpointing")
    parser.add_argument("--rounds", type=int, default=5, help="[5]")
    parser.add_argument("--steps", type=int, default=40, help="measured steps of each run [40]")
    parser.add_argument("--warmup", type=int, default=10, help="steps before, left out [10]")
    output = REPOSITORY / "outputs" / "benchmarks.md"
    parser.add_argument(
        "-o", "--output", type=Path, default=output, help="the table is added there"
    )
    args = parser.parse_args(argv)
    if args.steps % WINDOW or args.warmup % WINDOW or min(args.steps, args.rounds) < 1:
        parser.error(f"--steps and --warmup must be multiples of {WINDOW}, --rounds at least 1")
    for devices in args.devices:
        if devices < 1 or args.batch_size % devices:
            parser.error(f"{devices} devices cannot share a batch of {args.batch_size}")
        if ON_GPU and devices > torch.cuda.device_count():
            parser.error(f"there are {torch.cuda.device_count()} GPUs, not {devices}")
    for name, package in PACKAGES.items():
        if name in args.methods and not find_spec(package):
            print(
                f'no row for {name}: pip install ".[benchmarks]" installs {package}',
                file=sys.stderr,
            )
            args.methods.remove(name)
    if "chapters" not in args.methods or 1 not in args.devices:
        parser.error("the ratios need chapter 1: chapters in --methods, and 1 in --devices")
    return args


def main() -> None:
    args = parse_args()
    found = contenders(args)
    if args.only:
        found = [one for one in found if one.method in ("chapter 1", *args.only)]
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    rates = []
    with tempfile.TemporaryDirectory() as folder:
        write_shape(Path(folder), args.shape)
        config = AutoConfig.from_pretrained(folder)
        flags = work(folder, args)
        for number in range(args.rounds):
            rates.append(matrix_rate(dtype))
            order = found[:] if number % 2 == 0 else found[::-1]
            for contender in order:
                result = run(contender, flags, args)
                if not result:
                    if contender.is_chapter:
                        sys.exit(1)
                    found.remove(contender)  # a peer that fails has no row
                    continue
                contender.results.append(result)
                speed = contender.results[-1]["tokens_per_second"]
                what = f"{contender.devices} × {contender.method}: {speed:,.0f} tokens/s"
                print(f"round {number + 1}: {what}", file=sys.stderr)
    check_losses(found, 1e-3 if args.dtype == "fp32" else 2e-2)

    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    tokens = f"{args.batch_size} × {args.seq_length} tokens per step, {args.dtype}"
    shares = [share for c in found if c.is_chapter for share in c.column("data_share")]
    rate = statistics.median(rates) / 1e12
    peak = datasheet_peak(dtype)
    datasheet = f"datasheet: {peak / 1e12:.0f} TFLOP/s" if peak else "no peak of a datasheet"
    size = f"{parameters / 1e6:,.1f}M parameters"
    text = f"""### {datetime.date.today()}, {args.shape}: {size}, {tokens}

{machine()}.
Matrix products: {rate:.3f} TFLOP/s ({datasheet}). The chapters wait for data for at most
{max(shares):.2%} of a step. MFU = operations per token × tokens/s ÷ peak of the datasheet;
*of products* = the same ÷ matrix products of the devices; memory in GB per device; ratio to
chapter 1 within each round.

```
python benchmarks/run.py {shlex.join(sys.argv[1:])}
```

{table(found, models.flops_per_token(config, args.seq_length), rates, peak)}
"""
    print(text)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with args.output.open("a") as file:
        file.write(text + "\n")
    print(f"added to {args.output}", file=sys.stderr)


if __name__ == "__main__":
    main()
