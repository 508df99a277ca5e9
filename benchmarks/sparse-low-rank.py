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
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["GOMP_SPINCOUNT"] = "10000"
os.environ["COMET_AUTO_LOG_DISABLE"] = "true"
os.environ["HF_HUB_OFFLINE"] = "1"

REPOSITORY = Path(__file__).resolve().parents[1]
DENSE = REPOSITORY / "01-single-gpu" / "train-llm.py"
SPARSE = REPOSITORY / "14-sparse-low-rank" / "train-llm.py"
DEMO_MODEL = REPOSITORY / "tiny-llama"
NARROW = {"hidden_size": 96, "intermediate_size": 288, "num_attention_heads": 3}
NARROW |= {"num_key_value_heads": 1}
WITHOUT_S = {
    "count = math.ceil(args.density * rows * columns)": "count = 0",
    "torch.nn.init.zeros_(self.B)": "torch.nn.init.uniform_(self.B, -(rank**-0.5), rank**-0.5)",
    "rows, columns = len(self.B), self.A.shape[1]": "(rows, rank), columns = self.B.shape, "
    "self.A.shape[1]",
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["loss"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="of loss")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of loss")
    parser.add_argument("--steps", type=int, default=300, help="of loss [%(default)s]")
    parser.add_argument("--lr", type=float, default=2e-3, help="of loss [%(default)s]")
    parser.add_argument("--rank", type=int, default=32, help="[%(default)s]")
    parser.add_argument("--density", type=float, default=0.03, help="[%(default)s]")
    parser.add_argument("--alpha", type=float, default=32.0, help="[%(default)s]")
    parser.add_argument("--records", type=Path, help="a file of results of loss")
    args = parser.parse_args()
    {"loss": loss}[args.what](args)


if __name__ == "__main__":
    main()
