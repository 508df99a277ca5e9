"""The chapters on one GPU: the losses of chapter 1, and exact resumes. In parts of 9 minutes.

    python benchmarks/gpu.py --list                # the parts and their rows
    python benchmarks/gpu.py --part 1              # one part; again: only rows that are not done
    python benchmarks/gpu.py                       # all parts, in order
    python benchmarks/gpu.py --rehearse            # on a CPU, with tiny models, nothing compiled
    python benchmarks/gpu.py --table               # the table of all rows so far, for the records

Each row is written to a file as soon as it exists. So a part that ends early loses one row, and the
next call of this part goes on there. Rows that need a missing package are skipped. Speed is
measured by run.py, and where a step goes by tools/step-timeline.py.

Several ranks share one GPU. Each rank is a torchrun node of its own, so its LOCAL_RANK is 0. NCCL
refuses two ranks on one GPU of a host, so each rank also has its own NCCL_HOSTID, and sends through
sockets. So such a run shows whether the results are right, and nothing about speed.
"""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.append(str(REPOSITORY / "tools"))
from chapters import CONTINUES, FACTS, script_of  # noqa: E402

TITLES = {
    1: "Losses in fp32, with NCCL",
    2: "Losses in bf16, compiled",
    3: "Resumes in fp32",
}
# Of a record, if they are installed
PACKAGES = ("torch", "transformers", "datasets", "accelerate", "mosaicml-streaming", "peft")


@dataclass
class Row:
    part: int
    name: str
    measure: Callable[[], dict]  # the cells of the row
    needs: tuple[str, ...] = ()  # packages


class Failed(Exception):
    """A row that has no result, with the reason."""


# -- Processes -------------------------------------------------------------------------------------


def start(command: list, ranks: int, limit_s: float) -> str:
    """The output of a script on so many ranks; 0: without torchrun. Raises `Failed`."""
    processes = []
    with tempfile.TemporaryFile("w+") as output, ExitStack() as stack:
        port = free_port()
        for rank in range(max(ranks, 1)):
            launch = [sys.executable]
            env = dict(os.environ)
            if ranks:
                launch += ["-m", "torch.distributed.run", "--nnodes", ranks, "--node-rank", rank]
                launch += ["--nproc-per-node", 1]
                launch += ["--master-addr", "127.0.0.1", "--master-port", port]
                env |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_P2P_DISABLE": "1"}
                env |= {"NCCL_SHM_DISABLE": "1", "OMP_NUM_THREADS": "1"}
            arguments = [str(part) for part in [*launch, *command]]
            process = subprocess.Popen(arguments, stdout=output, stderr=output, env=env)
            stack.callback(end, process)
            processes.append(process)
        deadline = time.monotonic() + limit_s
        while (states := [process.poll() for process in processes]) != [0] * len(processes):
            if any(states) or time.monotonic() > deadline:
                break  # the other ranks would wait for a failed one
            time.sleep(0.05)
        late = not any(states) and None in states
        stack.close()
        output.seek(0)
        text = output.read()
    if late:
        raise Failed(f"not done after {limit_s:.0f} s")
    if any(states):
        errors = re.findall(r"^.*(?:error|Error|exception)\b.*$", text, re.MULTILINE)
        print(text[-5000:], file=sys.stderr)
        raise Failed(errors[0].strip()[:200] if errors else "failed")
    return text


def end(process: subprocess.Popen) -> None:
    """Ends a process, and with it the worker that torchrun has started."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# Open sockets, so that no other program gets these ports. The servers of PyTorch may share them.
held_ports = []


def free_port() -> int:
    held_ports.append(socket.socket())
    held_ports[-1].bind(("", 0))
    held_ports[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return held_ports[-1].getsockname()[1]


# -- Rows ------------------------------------------------------------------------------------------

TEXT = f"{REPOSITORY}/more/*/train-llm.py"
PIPELINE = ["-b", 2, "--gradient-accumulation-steps", 4, "--pipeline-parallel", 2]
CHAT = ["-d", REPOSITORY / "models" / "tiny-chat" / "rows", "-s", 256]
# Ranks, and flags for 8 samples per step; `same` is the row whose losses a chapter must have. Below
# are the rows of chapters that need nothing special.
CHAPTERS = {
    1: {"ranks": 0, "flags": ["-b", 8]},
    5: {"ranks": 2, "flags": ["-b", 4, "--shard-size", 2], "same": 1},
    6: {"ranks": 2, "flags": ["-b", 8, "--tensor-parallel", 2], "same": 1},
    7: {"ranks": 2, "flags": PIPELINE, "same": 1},
    "7, three stages": {"ranks": 3, "flags": [*PIPELINE[:-1], 3], "same": 1},
    8: {"ranks": 2, "flags": ["-b", 4, "--compress", "dct", "--keep", 1], "same": 1},
    11: {"ranks": 2, "flags": ["-b", 8, "--context-parallel", 2], "same": 1},
    13: {"ranks": 4, "flags": [*PIPELINE, "--tensor-parallel", 2], "same": 1},
    "3, a mixture": {"ranks": 2, "flags": ["-b", 4], "model": "tiny-mixtral"},
    12: {
        "ranks": 2,
        "flags": ["-b", 4, "--expert-parallel", 2],
        "model": "tiny-mixtral",
        "same": "3, a mixture",
    },
    15: {"ranks": 2, "flags": ["-b", 4, "--shard-size", 2, "--replicas", 1], "same": 1},
    9: {"ranks": 2, "same": 1},
    # These read other rows or train another model, so no row has the same losses.
    4: {"ranks": 2, "flags": ["-b", 4]},
    10: {"ranks": 2, "flags": ["-b", 4, "--shard-size", 2]},
    "14, two ranks": {"ranks": 2, "flags": ["-b", 4], "same": 14},
    "15, two replicas": {"ranks": 2, "flags": ["-b", 4, "--replicas", 2, "--inner-steps", 2]},
    # With another optimizer
    "18, two ranks": {"ranks": 2, "flags": ["-b", 4], "same": 18},
    # On conversations
    16: {"ranks": 1, "flags": ["-b", 8, *CHAT]},
    "16, two ranks": {"ranks": 2, "flags": ["-b", 4, *CHAT], "same": 16},
    17: {"ranks": 1, "flags": ["-b", 8, *CHAT]},
    "17, two ranks": {"ranks": 2, "flags": ["-b", 4, *CHAT], "same": 17},
    22: {"ranks": 1, "flags": ["-b", 8, *CHAT]},
    "22, two ranks": {"ranks": 2, "flags": ["-b", 4, *CHAT], "same": 22},
}
for name in CONTINUES:
    differs = {"ranks": 1, "flags": ["-b", 8]}
    equal = {"ranks": 2, "flags": ["-b", 4], "same": 1}
    CHAPTERS.setdefault(int(name[:2]), differs if "losses" in FACTS[name] else equal)


def number_of(key: int | str) -> int:
    """The number of a chapter, from a key of `CHAPTERS`."""
    return int(str(key).partition(",")[0])


class Measurements:
    """The rows of all parts, their file, and the folder for what they write."""

    def __init__(self, args, folder: Path):
        self.args, self.folder = args, folder
        self.deadline = time.monotonic() + 60 * args.minutes
        self.steps = 4 if args.rehearse else 20

    # -- The file --

    def done(self) -> dict[tuple[int, str], dict]:
        """The newest result of each row, by part and name."""
        if not self.args.output.exists():
            return {}
        lines = self.args.output.read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return {(row["part"], row["name"]): row for row in rows}

    def write(self, row: Row, result: dict) -> None:
        self.args.output.parent.mkdir(parents=True, exist_ok=True)
        entry = {"part": row.part, "name": row.name} | result
        with self.args.output.open("a") as file:
            print(json.dumps(entry), file=file, flush=True)

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    # -- Losses and resumes --

    def model(self, name: str) -> Path:
        """A folder with the small model of this name and random weights, the same in each part."""
        folder = self.folder / name
        if not folder.exists():
            import torch
            from transformers import AutoConfig, AutoModelForCausalLM

            shutil.copytree(REPOSITORY / "models" / name, folder)
            torch.manual_seed(0)
            config = AutoConfig.from_pretrained(folder)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder

    def train(self, key, dtype: str, folder: Path) -> list[dict]:
        """The records of a run of a chapter. A folder with checkpoints continues its run."""
        known = CHAPTERS[key]
        number = number_of(key)
        model = self.model(known.get("model", "tiny-llama"))
        length = 32 if self.args.rehearse else 256
        if number == 9:
            command = self.trainer(dtype, folder, model, length)
        else:
            data = self.shards(model, length) if number == 10 else TEXT
            command = [script_of(number), "--demo", "-e", folder.name, "--save-dir", folder.parent]
            command += ["-m", model, "-d", data, "-s", length, "--num-epochs", 99]
            command += ["--max-steps", self.steps, "--warmup-steps", 0, "--log-freq", 1]
            command += ["--eval-freq", self.steps, "--ckpt-freq", self.steps // 2]
            command += ["--dtype", dtype, *known["flags"]]
            command += [] if number == 14 else ["--no-from-scratch"]
            if dtype == "fp32" or self.args.rehearse:
                command += ["--no-compile"]
        start(command, known["ranks"], self.seconds_left())
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def trainer(self, dtype: str, folder: Path, model: Path, length: int) -> list:
        """The command of chapter 9, with FSDP. On CPUs, this is DDP."""
        command = [script_of(9), "--config-name", "demo", "parallel=fsdp", "report_to=[]"]
        command += [f"hydra.run.dir={folder}", f"save_dir={folder.parent}"]
        command += [f"model.name={model}", "model.from_scratch=false"]
        command += [f"data.data_files={TEXT}", f"data.seq_length={length}"]
        command += ["training.num_train_epochs=99", f"training.max_steps={self.steps}"]
        command += ["training.per_device_train_batch_size=4", "training.logging_steps=1"]
        command += [f"training.eval_steps={self.steps}", f"training.save_steps={self.steps // 2}"]
        command += ["optimizer.warmup_steps=0"]
        return [*command, f"parallel.bf16={str(dtype == 'bf16').lower()}"]

    def shards(self, model: Path, length: int) -> Path:
        """The rows of chapter 10."""
        folder = self.folder / "shards"
        if not folder.exists():
            script = REPOSITORY / "tools" / "prepare-data.py"
            command = [
                script,
                TEXT,
                "-o",
                folder,
                "--no-shuffle",
                "--mds",
                "-m",
                model,
                "-s",
                length,
            ]
            start(command, 0, self.seconds_left())
        return folder

    def losses(self, key, dtype: str, part: int) -> dict:
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            records = self.train(key, dtype, Path(folder) / "run")
        losses = [record["loss"] for record in records if "loss" in record]
        if len(losses) != self.steps:
            raise Failed(f"{len(losses)} losses, not {self.steps}")
        held_out = [record["eval/loss"] for record in records if "eval/loss" in record]
        result = {"ranks": CHAPTERS[key]["ranks"] or 1, "last loss": losses[-1]}
        result |= {"held-out loss": held_out[-1] if held_out else None}
        base = self.done().get((part, f"chapter {CHAPTERS[key].get('same')}"), {}).get("losses")
        if base:
            pairs = zip(losses, base, strict=True)
            difference = max(abs(a - b) / b for a, b in pairs)
            result["largest difference"] = difference
            result["same"] = difference < (1e-5 if dtype == "fp32" else 1e-2)
        return result | {"losses": losses}

    def resume(self, key) -> dict:
        """Whether a run that continues from its middle repeats the second half."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            run = Path(folder) / "run"
            before = self.train(key, "fp32", run)
            newest = max(run.glob("step-*"))
            if int(newest.name[5:]) != self.steps:
                raise Failed(f"the newest checkpoint is {newest.name}")
            shutil.rmtree(newest)
            shutil.rmtree(run / "final")
            after = self.train(key, "fp32", run)
        pairs = [
            (a["loss"], b["loss"])
            for a, b in zip(before, after, strict=True)
            if "loss" in a and a["step"] > self.steps // 2
        ]
        difference = max(abs(a - b) / a for a, b in pairs)
        return {"steps": len(pairs), "largest difference": difference, "exact": difference == 0}

    # -- All of them --

    def rows(self) -> list[Row]:
        rows = []
        chosen = self.args.chapters
        wanted = [key for key in CHAPTERS if not chosen or number_of(key) in chosen]
        # A row comes after the one with which it is compared.
        for key in sorted(wanted, key=lambda key: (number_of(key), str(key))):
            needs = FACTS[script_of(number_of(key)).parent.name].get("needs", ())
            for part, dtype in ((1, "fp32"), (2, "bf16")):
                measure = partial(self.losses, key, dtype, part)
                rows.append(Row(part, f"chapter {key}", measure, needs))
            if key != 9:  # it has other checkpoints, and a test of its own
                rows.append(Row(3, f"chapter {key}", partial(self.resume, key), needs))
        return sorted(rows, key=lambda row: row.part)


def run_parts(measurements: Measurements, parts: list[int]) -> bool:
    """Runs the rows of these parts. Returns whether all of them have a result."""
    complete = True
    rows = measurements.rows()
    for part in parts:
        measurements.deadline = time.monotonic() + 60 * measurements.args.minutes
        print(f"Part {part}: {TITLES[part]}", flush=True)
        for row in rows:
            finished = measurements.done().get((row.part, row.name), {"error": "not yet"})
            if row.part != part or "error" not in finished:
                continue
            missing = [package for package in row.needs if not installed(package)]
            if missing:
                print(f"  {row.name}: skipped, needs {', '.join(missing)}", flush=True)
                continue
            if measurements.seconds_left() < 10:
                print(f"  {row.name}: no time left, call --part {part} again", flush=True)
                complete = False
                continue
            begin = time.monotonic()
            try:
                result = row.measure()
            except (Exception, SystemExit) as error:
                result = {"error": f"{error!r:.300}"}
                complete = False
            result["seconds"] = time.monotonic() - begin
            measurements.write(row, result)
            print(f"  {row.name}: {cells_of(result)}", flush=True)
    return complete


def cells_of(result: dict) -> str:
    shown = {key: value for key, value in result.items() if key not in HIDDEN}
    return ", ".join(f"{key} {form(value)}" for key, value in shown.items())


def form(value) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.7g}" if value > 1 else f"{value:.3g}"
    return str(value)


HIDDEN = ("part", "name", "losses")


def table(done: dict[tuple[int, str], dict]) -> str:
    """All rows, in Markdown."""
    text = [f"{device_name()}; {', '.join(versions())}"]
    for part, title in TITLES.items():
        rows = [row for (number, _), row in done.items() if number == part]
        if not rows:
            continue
        keys = list(dict.fromkeys(key for row in rows for key in row if key not in HIDDEN))
        text += [
            f"\n### {title}\n",
            "| | " + " | ".join(keys) + " |",
            "|---" * (len(keys) + 1) + "|",
        ]
        for row in rows:
            cells = [form(row.get(key)) for key in keys]
            text.append("| " + " | ".join([row["name"], *cells]) + " |")
    return "\n".join(text)


# -- Packages and flags ----------------------------------------------------------------------------


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def versions() -> list[str]:
    return [f"{package} {installed(package)}" for package in PACKAGES if installed(package)]


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--part", type=int, nargs="+", choices=TITLES, default=[*TITLES], help="[all]")
    add("--chapters", type=int, nargs="+", help="of parts 1 to 3: only these chapters")
    add("--minutes", type=float, default=9, help="a part starts no row after this time [9]")
    add("--rehearse", action="store_true", help="on a CPU, with tiny models")
    add("--list", action="store_true", help="prints the rows, and runs none")
    add("--table", action="store_true", help="prints the table of the rows so far")
    add("-o", "--output", type=Path, help="the file of rows [outputs/gpu.jsonl]")
    args = parser.parse_args()
    name = "gpu-rehearsal.jsonl" if args.rehearse else "gpu.jsonl"
    args.output = args.output or REPOSITORY / "outputs" / name
    return args


def main() -> None:
    args = parse_args()
    import torch

    if not args.rehearse and not args.table and not torch.cuda.is_available():
        sys.exit("error: no GPU is here: --rehearse runs every part on the CPU")
    if args.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    complete = True
    with tempfile.TemporaryDirectory() as folder:
        measurements = Measurements(args, Path(folder))
        if args.list:
            for row in measurements.rows():
                print(f"part {row.part}, {TITLES[row.part]}: {row.name}")
            return
        if not args.table:
            complete = run_parts(measurements, args.part)
        print("\n" + table(measurements.done()))
    if not complete:
        sys.exit("error: some rows have no result, as the lines above say")


if __name__ == "__main__":
    main()
