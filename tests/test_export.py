"""tools/export-metrics.py: what TensorBoard, W&B and a table get is what the run logged."""

import csv
import json
import os
import subprocess
import sys
import time
import zipfile

import pytest
from conftest import assert_one_sentence
from runner import REPOSITORY

TOOL = REPOSITORY / "tools" / "export-metrics.py"
FLAGS = {"model_name": "tiny", "lr": 0.002, "from_scratch": True, "dataset_subset": None}
RECORDS = [
    {"step": 10, "epoch": 0.5, "loss": 3.5, "grad_norm": None, "tokens_per_second": 900.0},
    {"step": 20, "epoch": 1.0, "loss": 2.5, "grad_norm": 1.5, "tokens_per_second": 950.0},
    {"step": 20, "epoch": 1.0, "eval/loss": 2.75},
]
PARAMETERS = FLAGS | {"train_samples": 160, "global_batch": 8, "batch_size": 4, "device": "cpu"}


def write(run, records, step=20):
    (run / f"step-{step:08d}").mkdir(parents=True, exist_ok=True)
    state = {"flags": FLAGS, "step": step, "samples": 8 * step, "train_samples": 160}
    (run / f"step-{step:08d}" / "state.json").write_text(json.dumps(state))
    lines = [json.dumps(record) + "\n" for record in records]
    (run / "metrics.jsonl").write_text("".join(lines) + '{"step": 30, "lo')  # being written


@pytest.fixture
def run(tmp_path):
    write(tmp_path / "my-run", RECORDS)
    (tmp_path / "my-run" / "comet").mkdir()
    # As Comet writes them. `-b` was a word of the command line.
    values = ("b", 4, "cli"), ("batch_size", 4, "manual"), ("device", "cpu", "manual")
    lines = ['{"type": "metric_msg", "payload": {}}']
    for name, value, source in values:
        parameter = {"paramName": name, "paramValue": value, "source": source, "step": None}
        lines.append(json.dumps({"type": "parameter_msg", "payload": {"param": parameter}}))
    with zipfile.ZipFile(tmp_path / "my-run" / "comet" / "1.zip", "w") as archive:
        archive.writestr("messages.json", "\n".join(lines))
    (tmp_path / "my-run" / "comet" / "2.zip").write_bytes(b"PK")  # being written
    return tmp_path / "my-run"


def start(*arguments):
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, TOOL, *map(str, arguments)], env=env, **pipes)


def export(*arguments, status=0) -> str:
    process = start(*arguments)
    output, errors = process.communicate(timeout=100)
    assert process.returncode == status, errors
    return errors if status else output


def read_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    scalars = {n: [(e.step, e.value) for e in events.Scalars(n)] for n in events.Tags()["scalars"]}
    return scalars, events


def test_tensorboard(run, tmp_path):
    for _ in range(2):  # the second export hides the first one
        export(run, "--to", "tensorboard", "-o", tmp_path / "tb")
        time.sleep(1)  # names of files have the second
    scalars, events = read_tensorboard(tmp_path / "tb" / "my-run")
    assert scalars.pop("eval/loss") == [(20, 2.75)]
    assert scalars.pop("grad_norm") == [(20, 1.5)]
    for name in ("loss", "epoch", "tokens_per_second"):
        assert scalars.pop(name) == [(r["step"], r[name]) for r in RECORDS if name in r]
    assert not scalars
    from tensorboard.plugins.hparams import plugin_data_pb2

    data = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = plugin_data_pb2.HParamsPluginData.FromString(data).session_start_info.hparams
    assert {name: getattr(value, value.WhichOneof("kind")) for name, value in hparams.items()} == (
        PARAMETERS | {"dataset_subset": "None"}
    )


def read_wandb(data: bytes):
    """Records of a file in the log format of LevelDB, after a head of 7 bytes.

    A block has 32 KiB. A record, or each part of one: checksum (4 bytes), length (2), kind (1).
    """
    position, whole = 7, b""
    while position < len(data):
        left = 2**15 - position % 2**15
        if left < 7:  # no room for the head of a record
            position += left
            continue
        length, kind = (
            int.from_bytes(data[position + 4 : position + 6], "little"),
            data[position + 6],
        )
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def test_wandb_offline(run, tmp_path):
    output = export(run, "--to", "wandb", "-o", tmp_path / "wb")
    (folder,) = (tmp_path / "wb" / "wandb").glob("offline-run-*")
    assert f"wandb sync {folder}" in output
    from wandb.proto import wandb_internal_pb2

    history, config, name = {}, {}, ""
    for data in read_wandb(next(folder.glob("*.wandb")).read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        name = name or record.run.display_name
        for update in (*record.run.config.update, *record.config.update):
            config[update.key or ".".join(update.nested_key)] = json.loads(update.value_json)
        values = {(i.key or i.nested_key[0]): json.loads(i.value_json) for i in record.history.item}
        if values:
            history.setdefault(values["_step"], {}).update(values)
    assert name == "my-run"
    assert PARAMETERS.items() <= config.items()
    assert "b" not in config
    assert sorted(history) == [10, 20]
    for record in RECORDS:
        logged = history[record["step"]]
        assert all(logged.get(k) == v for k, v in record.items() if k != "step")


def test_csv_while_the_run_goes_on(run, tmp_path):
    """It resumes meanwhile, and writes the same records again."""
    process = start(run, "--to", "csv", "-o", tmp_path / "tables", "--follow")
    table = tmp_path / "tables" / "my-run.csv"

    def rows():
        lines = [line for line in table.read_text().splitlines() if not line.startswith("#")]
        return list(csv.DictReader(lines))

    def wait_for(count):
        end = time.monotonic() + 30
        while not (table.exists() and len(rows()) == count):
            assert time.monotonic() < end, process.poll()
            time.sleep(0.05)

    wait_for(3)
    write(run, RECORDS[:1], step=10)
    time.sleep(3)
    more = {"step": 30, "epoch": 1.5, "loss": 2.0, "new": 1}
    write(run, [*RECORDS, more], step=30)
    wait_for(4)
    assert process.poll() is None
    (run / "final").mkdir()
    assert process.wait(30) == 0
    assert "4 records" in process.communicate()[0]
    expected = [
        {k: "" if v is None else str(v) for k, v in record.items()} for record in [*RECORDS, more]
    ]
    for row, record in zip(rows(), expected, strict=True):
        assert {k: v for k, v in row.items() if v} == {k: v for k, v in record.items() if v}
    assert '# model_name: "tiny"' in table.read_text()


def test_mistakes(run, tmp_path):
    output = ["-o", tmp_path / "out"]
    assert_one_sentence(export(tmp_path / "no", "--to", "csv", *output, status=1), "the run")
    (tmp_path / "other" / "my-run").mkdir(parents=True)
    (tmp_path / "other" / "my-run" / "metrics.jsonl").write_text("text\n")
    other = tmp_path / "other" / "my-run"
    assert_one_sentence(export(run, other, "--to", "csv", *output, status=1), "the same name")
    assert_one_sentence(export(other, "--to", "csv", *output, status=1), "not the record of a run")
    assert not (tmp_path / "out").exists()
