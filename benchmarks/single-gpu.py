"""Chapter 1 against `transformers.Trainer`: the same model, batches and precision, in turns.

    python benchmarks/single-gpu.py                              # the demo's model
    python benchmarks/single-gpu.py --compile                    # chapter 1 with --compile
    python benchmarks/single-gpu.py --shape llama-3.2-1b -b 8 -s 2048 --tuned     # on a GPU

Each round runs every contender once, each in a process of its own, in an order that alternates.
Comet is off, as the Trainer reports to nobody here; `--comet` adds a run that writes its archive.
Printed: the median and the spread of tokens per second, the ratio to the Trainer within each round,
and the share of the matrix-product rate of this device, measured here:
(6 * parameters + 12 * layers * hidden size * sequence length) FLOPs per token.
The losses must agree, so that nobody is faster by doing less.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
CHAPTER_1 = REPOSITORY / "01-single-gpu" / "train-llm.py"
TRAINER = REPOSITORY / "benchmarks" / "peers" / "trainer.py"

LLAMA_1B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=["demo", "llama-3.2-1b"], default="demo")
    parser.add_argument("-b", "--batch-size", type=int, default=8)
    parser.add_argument("-s", "--seq-length", type=int, default=256)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], help="[bf16 on GPUs, fp32 on CPU]")
    parser.add_argument("--compile", action="store_true", help="chapter 1 also with --compile")
    parser.add_argument(
        "--tuned", action="store_true", help="a Trainer with compile and Liger, too"
    )
    parser.add_argument("--comet", action="store_true", help="chapter 1 also with Comet offline")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="measured steps of each run")
    parser.add_argument("--warmup", type=int, default=10, help="steps before, left out")
    return parser.parse_args()


def model_folder(shape: str, folder: Path) -> Path:
    """The shape's config with the tiny tokenizer; no weights are needed."""
    tiny = REPOSITORY / "tiny-llama"
    if shape == "demo":
        return tiny
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny / name).read_bytes())
    (folder / "config.json").write_text(json.dumps(LLAMA_1B))
    return folder


def run_chapter(flags: list[str], warmup: int, extra: list[str], comet: bool = False) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, CHAPTER_1, *flags, *extra, "-e", "run", "--save-dir", folder]
        command += ["--ckpt-freq", 1_000_000]
        env = {"COMET_AUTO_LOG_DISABLE": str(not comet).lower()} | os.environ
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=env)
        if done.returncode:
            sys.exit(done.stderr)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "loss" in record]
    seconds = [record["time/total_ms"] / 1e3 for record in records if record["step"] > warmup]
    tokens_per_step = records[-1]["tokens_per_second"] * records[-1]["time/total_ms"] / 1e3
    return {
        "tokens_per_second": tokens_per_step / statistics.mean(seconds),
        "losses": [record["loss"] for record in records],
        "peak_gb": records[-1]["memory/peak_reserved_gb"],
    }


def run_trainer(flags: list[str], warmup: int, extra: list[str]) -> dict:
    command = [sys.executable, TRAINER, *flags, "--warmup", warmup, *extra]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def matrix_rate(device: str, dtype) -> float:
    """FLOPs per second of a large square matrix product: the best of 5, by the clock."""
    import torch

    n, repeats = (8192, 20) if device == "cuda" else (2048, 3)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    rates = []
    for _ in range(6):
        begin = time.perf_counter()
        for _ in range(repeats):
            a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        rates.append(2 * n**3 * repeats / (time.perf_counter() - begin))
    return max(rates[1:])


def main() -> None:
    args = parse_args()
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = args.dtype or ("bf16" if device == "cuda" else "fp32")
    with tempfile.TemporaryDirectory() as temporary:
        model = model_folder(args.shape, Path(temporary))
        config = transformers.AutoConfig.from_pretrained(model)
        flags = ["--demo", "-m", model, "-b", args.batch_size, "-s", args.seq_length]
        flags += ["--max-steps", args.warmup + args.steps, "--log-freq", args.warmup]
        flags += ["--eval-freq", 0, "--dtype", dtype, "--warmup-steps", 0, "--lr", 1e-4]
        with torch.device("meta"):
            shape = transformers.AutoModelForCausalLM.from_config(config)
        contenders = {
            "transformers.Trainer": (run_trainer, []),
            "chapter 1, eager": (run_chapter, ["--no-compile"]),
        }
        if args.compile or device == "cuda":
            contenders["chapter 1, --compile"] = (run_chapter, ["--compile"])
        if args.comet:
            with_comet = partial(run_chapter, comet=True)
            contenders["chapter 1, eager, Comet"] = (with_comet, ["--no-compile"])
        if args.tuned:
            contenders["transformers.Trainer, compile, Liger"] = (run_trainer, ["--tuned"])

        results = {name: [] for name in contenders}
        for number in range(args.rounds):
            order = list(contenders) if number % 2 == 0 else list(contenders)[::-1]
            for name in order:
                run, extra = contenders[name]
                results[name].append(run(flags, args.warmup, extra))
                print(
                    f"round {number + 1}: {name}: {results[name][-1]['tokens_per_second']:,.0f}",
                    file=sys.stderr,
                )

    reference = results["transformers.Trainer"][0]["losses"]
    tolerance = 1e-3 if dtype == "fp32" else 2e-2
    for name, runs in results.items():
        for run in runs:
            for loss, expected in zip(run["losses"], reference, strict=True):
                if abs(loss - expected) > tolerance * expected:
                    sys.exit(f"error: the losses differ, {name} has {loss}, the Trainer {expected}")

    parameters = sum(p.numel() for p in shape.parameters())
    attention = 12 * config.num_hidden_layers * config.hidden_size * args.seq_length
    rate = matrix_rate(device, torch.bfloat16 if dtype == "bf16" else torch.float32)
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    tokens = f"{args.batch_size} x {args.seq_length} tokens per step"
    print(f"{name}, {torch.get_num_threads()} threads; {versions}")
    print(f"{args.shape}: {parameters / 1e6:,.1f}M parameters, {tokens}, {dtype}")
    print(f"matrix products in {dtype}: {rate / 1e12:.3f} TFLOP/s\n")
    print("| method | tokens/s | min to max | ratio to the Trainer | share of the matrix rate |")
    print("|---|---|---|---|---|")
    baseline = [run["tokens_per_second"] for run in results["transformers.Trainer"]]
    for name, runs in results.items():
        speeds = [run["tokens_per_second"] for run in runs]
        ratio = statistics.median(a / b for a, b in zip(speeds, baseline, strict=True))
        share = statistics.median(speeds) * (6 * parameters + attention) / rate
        row = [
            name,
            f"{statistics.median(speeds):,.0f}",
            f"{min(speeds):,.0f} to {max(speeds):,.0f}",
        ]
        print("| " + " | ".join([*row, f"{ratio:.2f}", f"{share:.2f}"]) + " |")


if __name__ == "__main__":
    main()
