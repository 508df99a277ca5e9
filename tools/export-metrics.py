"""Shows runs elsewhere: converts their files for TensorBoard, W&B or Comet.

    python tools/export-metrics.py outputs/demo-* --to tensorboard
    python tools/export-metrics.py outputs/my-run --to wandb --follow     # while the run goes on
    python tools/export-metrics.py outputs/my-run --to comet              # also of a killed run

The tool reads `metrics.jsonl` and `parameters.json`. Both files are up to date while a run goes on,
and after it was killed. Besides what the run has logged, each logged step gets `tflops_per_device`.

W&B writes a folder for `wandb sync`. With `WANDB_MODE=online`, W&B sends the records at once. Comet
writes an archive for `comet upload`. If an API key is configured, the tool uploads the archive.
"""

import argparse
import json
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from models import REPOSITORY, fail, flops_per_token, load_config

PAUSE = 2  # seconds between two looks at a run that goes on


def read_records(run: Path) -> list[dict]:
    """The records in `metrics.jsonl` of a run; a value may be None.

    A last line without its end is left out, because the run is writing it.
    """
    file = run / "metrics.jsonl"
    try:
        lines = file.read_text("utf-8").splitlines(keepends=True)
    except (OSError, ValueError) as error:
        sys.exit(f"error: cannot read the run {run}: {error}")
    records = []
    for number, line in enumerate(lines, 1):
        if line.endswith("\n"):
            try:
                record = json.loads(line)
                values = [record["step"], *record.values()]
                assert all(x is None or isinstance(x, (int, float)) for x in values)
            except (ValueError, TypeError, KeyError, AssertionError, AttributeError):
                sys.exit(f"error: line {number} of {file} is no record of a run")
            records.append(record)
    return records


def flops_per_token_and_device(run: Path, parameters: dict) -> float:
    """0 where the model is not known."""
    if "world_size" not in parameters:  # chapter 9
        return 0
    saved = [file.parent for file in run.glob("*/config.json")]  # of a checkpoint, or of final/
    source = str(saved[0]) if saved else parameters["model_name"]
    try:
        config = load_config(source)
        flops = flops_per_token(config, parameters["seq_length"])
    except (OSError, ValueError, AttributeError) as error:
        print(f"no tflops_per_device: {source} has no config to count with ({error!r:.100})")
        return 0
    return flops / parameters["world_size"]


def wait_for(run: Path) -> None:
    """Returns when the run has begun to write its records."""
    if not (run / "metrics.jsonl").exists():
        print(f"waiting for {run}", flush=True)
    try:
        while not (run / "metrics.jsonl").exists():
            time.sleep(PAUSE)
    except KeyboardInterrupt:
        sys.exit("stopped")


def has_ended(run: Path) -> bool:
    """Whether the run has written its model after its last record."""
    final, records = run / "final", run / "metrics.jsonl"
    return final.exists() and final.stat().st_mtime >= records.stat().st_mtime


class TensorBoard:
    def __init__(self, run: Path, output: Path, parameters: dict):
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
                if name != "step":
                    self.writer.add_scalar(name, value, record["step"])
        self.writer.flush()

    def close(self) -> None:
        plain = (bool, int, float)
        known = {k: v if isinstance(v, plain) else str(v) for k, v in self.parameters.items()}
        if known:
            self.writer.add_hparams(known, {}, run_name=".")
        self.writer.close()


class Wandb:
    def __init__(self, run: Path, output: Path, parameters: dict):
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
            values = {k: v for k, v in record.items() if k != "step"}
            self.run.log(values, step=record["step"])

    def close(self) -> None:
        self.run.finish()


class Comet:
    """An archive with all records of a run; is uploaded if an API key is configured."""

    def __init__(self, run: Path, output: Path, parameters: dict):
        os.environ["COMET_DISABLE_AUTO_LOGGING"] = "1"  # of this process, which is not the run
        os.environ["COMET_AUTO_LOG_DISABLE"] = "0"  # with 1, Comet writes no archive
        os.environ.setdefault("COMET_GET_OR_ADD_EXPERIMENT_RETRY_TOTAL", "1")  # as in the chapters
        import comet_ml

        logging.getLogger("comet_ml").setLevel(logging.ERROR)
        output.mkdir(parents=True, exist_ok=True)
        own = ("log_code", "log_graph", "parse_args", "log_git_metadata", "log_env_details")
        config = comet_ml.ExperimentConfig(
            name=run.name,
            offline_directory=str(output),
            auto_output_logging=False,
            **dict.fromkeys(own, False),
        )
        self.experiment = comet_ml.start(
            online=False,
            mode="create",
            workspace=parameters.get("comet_workspace"),
            project_name=parameters.get("comet_project_name"),
            experiment_config=config,
        )
        self.archive = output / f"{self.experiment.get_key()}.zip"
        self.has_key = bool(comet_ml.get_config("comet.api_key"))

    def add(self, records: list[dict], parameters: dict) -> None:
        self.experiment.log_parameters(parameters)
        for record in records:
            values = {k: v for k, v in record.items() if k not in ("step", "epoch")}
            self.experiment.log_metrics(values, step=record["step"], epoch=record.get("epoch"))

    def close(self) -> None:
        self.experiment.end()
        if not self.has_key:
            print(f"comet upload {self.archive}")
            return
        command = [sys.executable, "-m", "comet_ml.scripts.comet", "upload", self.archive]
        env = os.environ | {"COMET_LOGGING_CONSOLE": "info"}  # or there is no address to read below
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            reasons = re.findall(r"^\S*(?:Error|Exception): .*", done.stderr, re.MULTILINE)
            reason = reasons[-1] if reasons else done.stderr
            fail(f"not sent: repeat it by `comet upload {self.archive}` ({reason:.300})")
        print("\n".join(re.findall(r"uploaded .*://\S+", done.stderr)))


EXPORTERS = {"tensorboard": TensorBoard, "wandb": Wandb, "comet": Comet}


def missing(package: str) -> None:
    fail(f'{package} is not installed: pip install -c constraints.txt ".[{package}]"')


def export(runs: list[Path], kind: str, output: Path, follow: bool) -> int:
    """Exports all records, and with `follow` new ones until the runs end. Returns their number."""
    exporters = {}
    flops = {}  # of each run, per token and device
    # A run that resumes writes the records after its checkpoint again. Resume is exact, so they
    # are the same, and each is exported once.
    done = {run: set() for run in runs}
    try:
        while True:
            ended = all(has_ended(run) for run in runs)
            for run in runs:
                new = []
                for record in read_records(run):
                    key = record["step"], "eval/loss" in record
                    if key not in done[run]:
                        done[run].add(key)
                        new.append({k: v for k, v in record.items() if v is not None})
                if new:
                    parameters = json.loads((run / "parameters.json").read_text())
                    if run not in exporters:
                        exporters[run] = EXPORTERS[kind](run, output, parameters)
                        flops[run] = flops_per_token_and_device(run, parameters)
                    for record in new:
                        if flops[run] and record.get("tokens_per_second"):
                            tflops = record["tokens_per_second"] * flops[run] / 1e12
                            record["tflops_per_device"] = tflops
                    exporters[run].add(new, parameters)
            if ended or not follow:
                break
            time.sleep(PAUSE)
    except KeyboardInterrupt:
        print("stopped")
    for exporter in exporters.values():
        exporter.close()
    return sum(map(len, done.values()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    add("--to", choices=EXPORTERS, required=True)
    add("-o", "--output", type=Path, help="folder [outputs/tensorboard and so on]")
    add("--follow", action="store_true", help="from their start to their final/ folder")
    args = parser.parse_args()
    output = args.output or REPOSITORY / "outputs" / args.to
    runs = [run.resolve() for run in args.runs]
    if len({run.name for run in runs}) < len(runs):
        fail("two runs have the same name: export them one by one, each to an -o of its own")
    if args.follow and args.to == "comet" and len(runs) > 1:
        fail("a process writes one archive of Comet at a time: follow each run by its own command")
    for run in runs:
        if args.follow:
            wait_for(run)
        read_records(run)  # before anything is written
    groups = [runs] if args.follow else [[run] for run in runs]
    count = sum(export(group, args.to, output, args.follow) for group in groups)
    print(f"{count} records in {output}")


if __name__ == "__main__":
    main()
