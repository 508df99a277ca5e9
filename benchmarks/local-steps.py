"""Chapter 15: held-out loss at equal tokens, with and without local steps.

    python benchmarks/local-steps.py --records local-steps.jsonl
    python benchmarks/local-steps.py --records local-steps.jsonl --methods "DDP" "H = 30" --seeds 0

Each run trains a model of 85,000 parameters from random weights on the text of the demo, in fp32 on
CPUs: 600 steps of 16 samples of 64 tokens. All methods of a seed begin with the same weights and
read the same samples. Runs that the file has are not repeated, so the runs can be started one by
one. The table has the mean over the seeds, and the difference from DDP: of each seed its own.

DDP               chapter 2 on two ranks
half of the data  chapter 2 with half of the samples per step: one replica alone
H = 10            chapter 15 with rounds of 10 steps, outer learning rate 1, no momentum
trap: ...         H = 30, with a mistake in the script; `resume` stops in step 315, within a round;
                  `within a round` has the held-out loss of step 315, and `next loss` the training
                  loss of the step after this evaluation, of a model with a head of its own
"""

import argparse
import json
import multiprocessing
import os
import runpy
import shutil
import socket
import statistics
import sys
import tempfile
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["GOMP_SPINCOUNT"] = "10000"
os.environ["COMET_AUTO_LOG_DISABLE"] = "true"
os.environ["HF_HUB_OFFLINE"] = "1"

REPOSITORY = Path(__file__).resolve().parents[1]
PRELOAD = ["comet_ml", "datasets", "torch", "transformers.models.auto.modeling_auto"]
PRELOAD += ["transformers.modeling_layers", "transformers.models.llama.modeling_llama"]
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
STEPS, SAMPLES = 600, 16
PAPER = ["--outer-lr", 0.7, "--outer-momentum", 0.9]
WARM = ["--outer-start", 200]
# Ranks, flags of chapter 15; chapter 2 has none.
METHODS = {
    "DDP": (2, None),
    "half of the data": (1, None),
    "H = 10": (2, ["--inner-steps", 10]),
    "H = 30": (2, ["--inner-steps", 30]),
    "H = 100": (2, ["--inner-steps", 100]),
    "H = 10, 4 replicas": (4, ["--inner-steps", 10]),
    "H = 30, 4 replicas": (4, ["--inner-steps", 30]),
    "H = 100, 4 replicas": (4, ["--inner-steps", 100]),
    "H = 30, 0.7 and 0.9": (2, ["--inner-steps", 30, *PAPER]),
    "H = 30, 0.7 and 0.9 from step 200": (2, ["--inner-steps", 30, *PAPER, *WARM]),
    "H = 30, 1 and 0 from step 200": (2, ["--inner-steps", 30, *WARM]),
    "H = 30, 4 replicas, 0.7 and 0.9 from step 200": (4, ["--inner-steps", 30, *PAPER, *WARM]),
    "H = 30, bf16 messages": (2, ["--inner-steps", 30, "--outer-dtype", "bf16"]),
}

# Lines of the chapter that take the place of others. Flags as in H = 30, or as in PAPER.
AFTER_ROUND = "                outer.step(averages_only)\n"
MOMENTS = """                for moments in optimizer.state.values():
                    for name in ("exp_avg", "exp_avg_sq"):
                        local = moments[name].to_local()
"""
MEAN = "                        dist.all_reduce(local, dist.ReduceOp.AVG, outer.group)\n"
TRAPS = {
    "trap: wrong sign": {"{p: shared - p for": "{p: p - shared for"},
    "trap: sum for mean": {
        "message, dist.ReduceOp.AVG, self.group": "message, dist.ReduceOp.SUM, self.group"
    },
    "trap: moments reset": {
        AFTER_ROUND: AFTER_ROUND + MOMENTS + "                        local.zero_()\n"
    },
    "trap: moments averaged": {AFTER_ROUND: AFTER_ROUND + MOMENTS + MEAN},
    "trap: same samples": {"micro_step * WORLD_SIZE + RANK) *": "micro_step * WORLD_SIZE) *"},
    "trap: no Nesterov": {"(gradient + beta * momentum)": "momentum"},
    "trap: resume as it is": {},
    "trap: resume without momentum": {'parts | {"outer momentum": momentum}': "parts"},
    "trap: resume with a replica's weights as the shared ones": {"weights | shared}": "weights}"},
    "trap: resume from replica 0": {"outer.replica % state.replicas": "0"},
    "trap: resume with equal names": {
        "{name} of replica {replica}": "{name} of replica",
        "optimizer of replica {replica}": "optimizer of replica",
    },
    "trap: scheduler once per round": {
        "            scheduler.step()": "            if state.step % 30 == 29: scheduler.step()"
    },
    "trap: within a round as it is": {},
    "trap: within a round, a replica's weights": {
        "            outer.swap(model)\n            with autocast": "            with autocast",
        "            outer.swap(model)  # LOCAL: each": "            # LOCAL: each",
    },
    "trap: next loss as it is": {},
    "trap: next loss without reshard": {"module.reshard()": "pass"},
}
# Steps after which the held-out loss, or the training loss of an untied model, is taken
WITHIN_ROUND, NEXT = 315, 316
for name in TRAPS:
    METHODS[name] = METHODS["H = 30"]
    if "Nesterov" in name or "resume" in name:
        METHODS[name] = METHODS["H = 30, 0.7 and 0.9 from step 200"]


# Open sockets, so that no other program gets these ports. The servers of PyTorch may share them.
held_ports = []


def free_port() -> int:
    held_ports.append(socket.socket())
    held_ports[-1].bind(("", 0))
    held_ports[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return held_ports[-1].getsockname()[1]


def run_rank(rank: int, size: int, port: int, script: Path, flags: list, output: Path) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    import torch

    torch.set_num_threads(1)
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_WORLD_SIZE": 1}
    variables |= {"TORCHELASTIC_RESTART_COUNT": 0, "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {name: str(value) for name, value in variables.items()}
    sys.argv = [str(script), *map(str, flags)]
    runpy.run_path(str(script), run_name="__main__")


def damaged(script: Path, folder: Path, lines: dict) -> Path:
    """A copy of the script with these lines."""
    text = script.read_text()
    for line, instead in lines.items():
        if text.count(line) != 1:
            sys.exit(f"error: the chapter has no single line {line!r}")
        text = text.replace(line, instead)
    folder.mkdir()
    (folder / script.name).write_text(text)
    return folder / script.name


def start(ranks: int, script: Path, flags: list, folder: Path, method: str) -> None:
    """Runs the script on so many ranks to its end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    port = free_port()
    outputs = [folder / f"output-{rank}" for rank in range(ranks)]
    processes = [
        context.Process(target=run_rank, args=(rank, ranks, port, script, flags, output))
        for rank, output in enumerate(outputs)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit(f"{outputs[0].read_text()}\nerror: {method} failed")


def write_model(folder: Path, tied: bool) -> None:
    """The model of the demo, with fewer and smaller layers."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((REPOSITORY / "models" / "tiny-llama" / name).read_bytes())
    config = json.loads((REPOSITORY / "models" / "tiny-llama" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | SMALL | {"tie_word_embeddings": tied}))


def train(method: str, seed: int) -> dict:
    """The parameters and the held-out loss of a run."""
    ranks, more = METHODS[method]
    samples = SAMPLES // 2 if method == "half of the data" else SAMPLES
    chapter = "02-ddp" if more is None else "15-local-steps"
    script = REPOSITORY / chapter / "train-llm.py"
    ends = [STEPS]  # of the runs
    if "resume" in method:
        ends = [315, STEPS]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder / "model", tied="next loss" not in method)
        flags = ["--demo", "-e", "run", "--save-dir", folder, "-m", folder / "model", "-s", 64]
        flags += ["-b", samples // ranks, "--max-steps", STEPS, "--lr", 1e-2, "--seed", seed]
        evaluated = WITHIN_ROUND if "within" in method or "next" in method else STEPS
        flags += ["--eval-freq", evaluated, "--ckpt-freq", STEPS, *(more or [])]
        if "next loss" in method:
            flags += ["--log-freq", 1]
        if method in TRAPS:
            script = damaged(script, folder / chapter, TRAPS[method])
        for end in ends:
            if end != STEPS:  # the learning rate is that of the whole run
                flags = [*flags, "--ckpt-freq", end]
            start(ranks, script, flags, folder, method)
            for step in range(end + 1, STEPS + 1):
                shutil.rmtree(folder / "run" / f"step-{step:08d}", ignore_errors=True)
        records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
        parameters = json.loads((folder / "run" / "parameters.json").read_text())
    losses = {record["step"]: record["eval/loss"] for record in records if "eval/loss" in record}
    if "next loss" in method:
        losses = {record["step"]: record["loss"] for record in records if "loss" in record}
        evaluated = NEXT
    return {"parameters": parameters["parameters_total"], "held_out": losses[evaluated]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS], help="[all]")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="[0 1 2]")
    parser.add_argument("--records", type=Path, required=True, help="results, one JSON per line")
    args = parser.parse_args()
    known = {}
    if args.records.exists():
        records = [json.loads(line) for line in args.records.open()]
        known = {(record["method"], record["seed"]): record for record in records}
    for method in dict.fromkeys(["DDP", *args.methods]):
        for seed in args.seeds:
            if (method, seed) not in known:
                known[method, seed] = {"method": method, "seed": seed} | train(method, seed)
                with args.records.open("a") as file:
                    print(json.dumps(known[method, seed]), file=file)
    print("| method | held-out loss | least to most | over DDP | least to most |")
    print("|---|---|---|---|---|")
    for method in args.methods:
        losses = [known[method, seed]["held_out"] for seed in args.seeds]
        over = [
            known[method, seed]["held_out"] - known["DDP", seed]["held_out"] for seed in args.seeds
        ]
        cells = [
            method,
            f"{statistics.mean(losses):.3f}",
            f"{min(losses):.3f} to {max(losses):.3f}",
        ]
        cells += [f"{statistics.mean(over):+.3f}", f"{min(over):+.3f} to {max(over):+.3f}"]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
