"""Shows runs elsewhere: turns their `metrics.jsonl` into what TensorBoard, W&B or a table reads.

    python tools/export-metrics.py outputs/demo-* --to tensorboard
    python tools/export-metrics.py outputs/my-run --to wandb --follow     # while the run goes on
    python tools/export-metrics.py outputs/demo-* --to csv -o tables

The parameters of the run come with it. A run that ended, and was offline for Comet, has all of them
in its archive: every flag, the sizes of model and data, the device, the versions. Of other runs,
only the flags that never change are known (`state.json` of the newest checkpoint).

W&B writes a folder for `wandb sync`; with `WANDB_MODE=online` it sends the records at once.
"""

import argparse
import csv
import json
import os
import sys
import time
import zipfile
from contextlib import suppress
from pathlib import Path

PAUSE = 2  # seconds between two looks at a run that goes on


def read_records(run: Path) -> list[dict]:
    """The complete lines of `metrics.jsonl`; a value that was not finite is None."""
    try:
        lines = (run / "metrics.jsonl").read_text("utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]
    except OSError as error:
        fail(f"cannot read the run {run}: {error}")
    except ValueError as error:
        fail(f"{run / 'metrics.jsonl'} is not the record of a run: {error}")


def read_parameters(run: Path) -> dict:
    """What the newest checkpoint and the archives for Comet say; empty before the first one."""
    parameters = {}
    if states := sorted(run.glob("step-*/state.json")):
        state = json.loads(states[-1].read_text())
        parameters = state["flags"] | {"train_samples": state["train_samples"]}
        parameters["global_batch"] = state["samples"] / state["step"]
    for archive in sorted(run.glob("comet/*.zip"), key=os.path.getmtime):
        with suppress(zipfile.BadZipFile):  # still being written
            for line in zipfile.ZipFile(archive).read("messages.json").splitlines():
                message = json.loads(line)
                if message["type"] == "parameter_msg":
                    found = message["payload"]["param"]
                    if found["source"] == "manual":  # the others are words of the command line
                        parameters[found["paramName"]] = found["paramValue"]
    return parameters


class TensorBoard:
    def __init__(self, run: Path, output: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            missing("tensorboard")
        # An earlier export into the same folder is hidden from its first step on
        self.writer = SummaryWriter(output / run.name, purge_step=0)
        self.parameters = {}

    def add(self, records: list[dict], parameters: dict) -> None:
        self.parameters = parameters  # TensorBoard takes them once
        for record in records:
            for name, value in record.items():
                if name != "step" and value is not None:
                    self.writer.add_scalar(name, value, record["step"])
        self.writer.flush()

    def close(self) -> None:
        plain = (bool, int, float)
        known = {k: v if isinstance(v, plain) else str(v) for k, v in self.parameters.items()}
        if known:
            self.writer.add_hparams(known, {}, run_name=".")
        self.writer.close()


class Wandb:
    def __init__(self, run: Path, output: Path):
        try:
            import wandb
        except ImportError:
            missing("wandb")
        output.mkdir(parents=True, exist_ok=True)
        mode = os.environ.get("WANDB_MODE", "offline")
        settings = wandb.Settings(silent=True, x_disable_stats=True)  # this process is not the run
        project = os.environ.get("WANDB_PROJECT", "distributed-training-demo")
        self.run = wandb.init(
            project=project,
            name=run.name,
            dir=output,
            mode=mode,
            settings=settings,
            reinit="create_new",
        )
        if mode == "offline":
            print(f"wandb sync {Path(self.run.dir).parent}")

    def add(self, records: list[dict], parameters: dict) -> None:
        self.run.config.update(parameters, allow_val_change=True)
        for record in records:
            values = {k: v for k, v in record.items() if k != "step" and v is not None}
            self.run.log(values, step=record["step"])

    def close(self) -> None:
        self.run.finish()


class Csv:
    """One table per run, with a column for each name; parameters are lines that begin with #."""

    def __init__(self, run: Path, output: Path):
        output.mkdir(parents=True, exist_ok=True)
        self.file = output / f"{run.name}.csv"
        self.records = []

    def add(self, records: list[dict], parameters: dict) -> None:
        self.records += records
        columns = dict.fromkeys(name for record in self.records for name in record)
        with self.file.open("w", newline="", encoding="utf-8") as file:
            file.writelines(
                f"# {name}: {json.dumps(value)}\n" for name, value in parameters.items()
            )
            table = csv.DictWriter(file, list(columns))
            table.writeheader()
            table.writerows(self.records)

    def close(self) -> None:
        pass


EXPORTERS = {"tensorboard": TensorBoard, "wandb": Wandb, "csv": Csv}


def fail(message: str) -> None:
    sys.exit(f"error: {message}")


def missing(package: str) -> None:
    fail(f'{package} is not installed: pip install -c constraints.txt ".[{package}]"')


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--to", choices=EXPORTERS, required=True)
    parser.add_argument("-o", "--output", type=Path, help="folder [outputs/tensorboard and so on]")
    parser.add_argument("--follow", action="store_true", help="until all runs have a final/ folder")
    args = parser.parse_args()
    repository = Path(__file__).resolve().parents[1]
    output = args.output or repository / "outputs" / args.to
    runs = [run.resolve() for run in args.runs]
    if len({run.name for run in runs}) < len(runs):
        fail("two runs have the same name: export them one by one, each to an -o of its own")
    for run in runs:
        read_records(run)  # before anything is written
    exporters = {run: EXPORTERS[args.to](run, output) for run in runs}
    # A run that resumes writes the records after its checkpoint again. Resume is exact, so they
    # are the same, and each is exported once.
    done = {run: set() for run in runs}
    try:
        while True:
            finished = all((run / "final").exists() for run in runs)
            for run, exporter in exporters.items():
                new = []
                for record in read_records(run):
                    key = record["step"], "eval/loss" in record
                    if key not in done[run]:
                        done[run].add(key)
                        new.append(record)
                if new:
                    exporter.add(new, read_parameters(run))
            if finished or not args.follow:
                break
            time.sleep(PAUSE)
    except KeyboardInterrupt:
        print("stopped")
    for run, exporter in exporters.items():
        exporter.add([], read_parameters(run))  # Comet writes its archive when the run ends
        exporter.close()
    print(f"{sum(map(len, done.values()))} records in {output}")


if __name__ == "__main__":
    main()
