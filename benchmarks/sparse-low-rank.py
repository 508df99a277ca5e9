"""Chapter 14: what sparse plus low-rank weights save, and what they cost.

    python benchmarks/sparse-low-rank.py memory     # bytes that a training step keeps
    python benchmarks/sparse-low-rank.py speed      # seconds of processor time per step
    python benchmarks/sparse-low-rank.py loss       # after the same tokens of the demo, three seeds
    python benchmarks/sparse-low-rank.py places     # time to draw the places of S

All use the model of the demo and its text, on the CPU. `dense` is chapter 1. `smaller, dense` is
chapter 1 with a narrower model, which has about as many parameters as chapter 14. `low rank` is
chapter 14 without S: its copy draws B at random, because with B = 0 nothing would learn.

memory    Bytes of weights, support, gradients and moments, which are equal to the formula, and of
          the tensors that autograd keeps for the backward pass.
speed     Median over the steps, with several shapes of the batch, in turns: --rounds.
loss      Held-out loss after --steps steps. With --records FILE, runs that the file has are not
          repeated, so the runs can be started one by one: --methods dense --seeds 0.
"""

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["GOMP_SPINCOUNT"] = "10000"
os.environ["COMET_AUTO_LOG_DISABLE"] = "true"
os.environ["HF_HUB_OFFLINE"] = "1"
import numpy as np
import torch

REPOSITORY = Path(__file__).resolve().parents[1]
DENSE = REPOSITORY / "01-single-gpu" / "train-llm.py"
SPARSE = REPOSITORY / "14-sparse-low-rank" / "train-llm.py"
DEMO_MODEL = REPOSITORY / "models" / "tiny-llama"
NARROW = {"hidden_size": 96, "intermediate_size": 288, "num_attention_heads": 3}
NARROW |= {"num_key_value_heads": 1}
WITHOUT_S = {
    "count = math.ceil(args.density * rows * columns)": "count = 0",
    "torch.nn.init.zeros_(self.B)": "torch.nn.init.uniform_(self.B, -(rank**-0.5), rank**-0.5)",
    "rows = self.B.shape[0]": "rows, rank = self.B.shape",
}
METHODS = ["dense", "smaller, dense", "low rank", "sparse plus low rank"]


def script_and_model(method: str, folder: Path) -> tuple[Path, Path]:
    """The script and the model of a method. The edited ones are written into the folder."""
    if method == "smaller, dense":
        model = folder / "narrow"
        model.mkdir(exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (model / name).write_bytes((DEMO_MODEL / name).read_bytes())
        config = json.loads((DEMO_MODEL / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | NARROW))
        return DENSE, model
    if method == "low rank":
        text = SPARSE.read_text()
        for line, instead in WITHOUT_S.items():
            if text.count(line) != 1:
                sys.exit(f"error: chapter 14 has no single line {line!r}")
            text = text.replace(line, instead)
        script = folder / SPARSE.parent.name / SPARSE.name
        script.parent.mkdir(exist_ok=True)
        script.write_text(text)
        return script, DEMO_MODEL
    return (DENSE if method == "dense" else SPARSE), DEMO_MODEL


# -- Loss ------------------------------------------------------------------------------------------


def train(method: str, seed: int, args: argparse.Namespace) -> dict:
    """The losses of a run."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        script, model = script_and_model(method, folder)
        flags = ["--demo", "-e", "run", "--save-dir", folder, "-m", model, "--seed", seed]
        flags += ["-s", 128, "-b", 8, "--max-steps", args.steps, "--lr", args.lr]
        flags += ["--eval-freq", args.steps, "--ckpt-freq", args.steps]
        if script != DENSE:
            flags += ["--rank", args.rank, "--density", args.density, "--alpha", args.alpha]
        command = [sys.executable, *map(str, [script, *flags])]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"error: {' '.join(command)}\n{done.stderr}")
        records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
        parameters = json.loads((folder / "run" / "parameters.json").read_text())
    return {
        "parameters": parameters["parameters_total"],
        "loss": [record for record in records if "loss" in record][-1]["loss"],
        "held_out": records[-1]["eval/loss"],
    }


def settings(method: str, seed: int, args: argparse.Namespace) -> dict:
    record = {"method": method, "seed": seed, "steps": args.steps, "lr": args.lr}
    if "rank" in method:
        record |= {"rank": args.rank, "density": args.density, "alpha": args.alpha}
    return record


def loss(args: argparse.Namespace) -> None:
    known = []
    if args.records and args.records.exists():
        known = [json.loads(line) for line in args.records.open()]
    print("| method | parameters | held-out loss | min to max | training loss |")
    print("|---|---|---|---|---|")
    for method in args.methods:
        results = []
        for seed in args.seeds:
            wanted = settings(method, seed, args)
            found = [record for record in known if wanted.items() <= record.items()]
            result = found[0] if found else wanted | train(method, seed, args)
            if args.records and not found:
                with args.records.open("a") as file:
                    print(json.dumps(result), file=file)
            results.append(result)
        held_out = [result["held_out"] for result in results]
        cells = [method, f"{results[0]['parameters']:,}", f"{statistics.mean(held_out):.4f}"]
        cells += [f"{min(held_out):.4f} to {max(held_out):.4f}"]
        cells += [f"{statistics.mean(result['loss'] for result in results):.4f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


# -- Memory and speed ------------------------------------------------------------------------------


def load(script: Path):
    """A chapter as a module."""
    spec = importlib.util.spec_from_file_location(script.parent.name, script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for its dataclasses
    spec.loader.exec_module(module)
    return module


class Training:
    """The model of a method with its optimizer, and random tokens."""

    def __init__(self, method: str, folder: Path, args: argparse.Namespace, tokens: int):
        script, model = script_and_model(method, folder)
        self.chapter = load(script)
        config = self.chapter.AutoConfig.from_pretrained(model)
        flags = {"model_name": str(model), "from_scratch": True, "seq_length": 128}
        flags |= {"dtype": "fp32", "compile": False}
        flags["attention"] = None
        flags |= {"seed": 0, "activation_checkpointing": False, "weight_decay": 0.01}
        flags |= {"rank": args.rank, "density": args.density, "alpha": args.alpha}
        flags = SimpleNamespace(**flags)
        torch.manual_seed(0)
        self.model = self.chapter.build_model(flags, torch.device("cpu"), None).train()
        groups = self.chapter.parameter_groups(self.model, flags)
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)
        self.tokens = torch.randint(0, config.vocab_size, (tokens // 128, 128))

    def loss(self) -> torch.Tensor:
        return self.model(input_ids=self.tokens, labels=self.tokens, use_cache=False).loss

    def step(self) -> float:
        """Seconds of processor time."""
        begin = time.process_time()
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.process_time() - begin

    def layers(self) -> list:
        return [m for m in self.model.modules() if type(m).__name__ == "SparseLinear"]

    def kept_bytes(self) -> int:
        """What autograd keeps for the backward pass: each storage once, without parameters."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        own = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        kept = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self.loss()
        return sum(kept.values())


def megabytes(tensors) -> float:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 1e6


def formula(dense: Training, sparse: Training, args: argparse.Namespace) -> float:
    """16 bytes per number, and for each value of S 4 bytes for its place."""
    parameters = dense.model.num_parameters()
    places = 0
    for layer in sparse.layers():
        rows, columns = len(layer.B), layer.A.shape[1]
        values = math.ceil(args.density * rows * columns) if args.density else 0
        parameters += args.rank * (rows + columns) + values - rows * columns
        places += values
    return (16 * parameters + 4 * places) / 1e6


def memory(args: argparse.Namespace) -> None:
    print(
        "| method | weights | places of S | gradients | moments | together | by the formula ",
        end="",
    )
    print("| kept for backward |\n|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        dense = Training("dense", Path(temporary), args, 1024)
        for method in ("dense", "sparse plus low rank"):
            training = Training(method, Path(temporary), args, 1024)
            kept = training.kept_bytes() / 1e6
            training.loss().backward()
            training.optimizer.step()
            parameters = [*training.model.parameters()]
            states = training.optimizer.state.values()
            sizes = [
                megabytes(parameters),
                megabytes(layer.support for layer in training.layers()),
                megabytes(parameter.grad for parameter in parameters),
                megabytes(x for state in states for x in state.values() if x.dim()),
            ]
            computed = formula(dense, training, args)
            if abs(sum(sizes) - computed) > 1e-6:
                sys.exit(f"error: {sum(sizes)} MB, but {computed} MB by the formula")
            numbers = [*sizes, sum(sizes), computed, kept]
            print(f"| {method} | {' | '.join(f'{number:.3f}' for number in numbers)} |")


def speed(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    print("| tokens per step | dense, ms | sparse plus low rank, ms | ratio | min to max |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        for tokens in (128, 512, 2048, 8192):
            names = ("dense", "sparse plus low rank")
            pair = [Training(name, Path(temporary), args, tokens) for name in names]
            for training in pair:
                training.step()
            rounds = [[training.step() for training in pair] for _ in range(args.rounds)]
            ratios = [sparse / dense for dense, sparse in rounds]
            times = [f"{1e3 * statistics.median(each):.1f}" for each in zip(*rounds, strict=True)]
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            cells = [f"{tokens:,}", *times, f"{statistics.median(ratios):.2f}", spread]
            print(f"| {' | '.join(cells)} |", flush=True)


def places(args: argparse.Namespace) -> None:
    chapter = load(SPARSE)
    print("| matrix | density | places, s | full permutation, s |\n|---|---|---|---|")
    for rows, columns, density in ((2048, 8192, 0.03), (4096, 4096, 0.05), (4096, 11008, 0.05)):
        size = rows * columns
        times = []
        for draw in (
            lambda size, density: chapter.random_places(size, math.ceil(density * size), (0, 0)),
            lambda size, _: np.random.RandomState(0).permutation(size),
        ):
            begin = time.process_time()
            draw(size, density)
            times.append(time.process_time() - begin)
        print(
            f"| {rows:,} × {columns:,} | {density} | {times[0]:.2f} | {times[1]:.2f} |", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["memory", "speed", "loss", "places"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="of loss")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of loss")
    parser.add_argument("--steps", type=int, default=300, help="of loss [%(default)s]")
    parser.add_argument("--lr", type=float, default=2e-3, help="of loss [%(default)s]")
    parser.add_argument("--rounds", type=int, default=9, help="of speed [%(default)s]")
    parser.add_argument("--rank", type=int, default=32, help="[%(default)s]")
    parser.add_argument("--density", type=float, default=0.03, help="[%(default)s]")
    parser.add_argument("--alpha", type=float, default=32.0, help="[%(default)s]")
    parser.add_argument("--records", type=Path, help="a file of results of loss")
    args = parser.parse_args()
    {"memory": memory, "speed": speed, "loss": loss, "places": places}[args.what](args)


if __name__ == "__main__":
    main()
