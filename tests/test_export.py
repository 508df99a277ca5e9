"""tools/export-metrics.py: what TensorBoard, W&B and Comet get is what the run logged."""

import json
import os
import re
import time
import zipfile

import pytest
from helpers.runner import REPOSITORY, Run, load, run_tool
from transformers import AutoConfig

TOOL = REPOSITORY / "tools" / "export-metrics.py"
RECORDS = [
    {"step": 10, "epoch": 0.5, "loss": 3.5, "grad_norm": None, "tokens_per_second": 900.0},
    {"step": 20, "epoch": 1.0, "loss": 2.5, "grad_norm": 1.5, "tokens_per_second": 950.0},
    {"step": 20, "epoch": 1.0, "eval/loss": 2.75},
]
PARAMETERS = {"model_name": "tiny", "lr": 0.002, "from_scratch": True, "dataset_subset": None}
PARAMETERS |= {"global_batch": 8, "comet_project_name": "my-project"}


def write(run, records):
    run.mkdir(exist_ok=True)
    lines = [json.dumps(record) + "\n" for record in records]
    (run / "metrics.jsonl").write_text("".join(lines) + '{"step": 30, "lo')  # being written


@pytest.fixture
def run(tmp_path):
    run = tmp_path / "my-run"
    (run / "comet").mkdir(parents=True)
    (run / "parameters.json").write_text(json.dumps(PARAMETERS))
    write(run, RECORDS)
    zipfile.ZipFile(run / "comet" / "1.zip", "w").close()  # as Comet's archive is until the end
    return run


def export(folder, run, service: str, output) -> str:
    return run_tool(folder, TOOL.name, run, "--to", service, "-o", folder / output)


def read_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    scalars = {n: [(e.step, e.value) for e in events.Scalars(n)] for n in events.Tags()["scalars"]}
    return scalars, events


@pytest.mark.rest
def test_tensorboard(run, tmp_path):
    export(tmp_path, run, "tensorboard", "tb")
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


@pytest.mark.rest
def test_wandb_offline(run, tmp_path):
    output = export(tmp_path, run, "wandb", "wb")
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
    assert sorted(history) == [10, 20]
    for record in RECORDS:
        logged = history[record["step"]]
        assert all(logged.get(k) == v for k, v in record.items() if k != "step")


@pytest.mark.rest
def test_tensorboard_while_the_run_goes_on(run, tmp_path):
    """It begins later than the tool. `final` is that of earlier steps."""
    (run / "final").mkdir()
    os.utime(run / "final", (0, 0))
    run.rename(tmp_path / "later")
    flags = [run, "--to", "tensorboard", "-o", tmp_path / "tb", "--follow"]
    process = Run(TOOL, flags, tmp_path / "output.txt")
    process.wait_for(f"waiting for {run}\n")
    (tmp_path / "later").rename(run)

    def losses():
        folder = tmp_path / "tb" / "my-run"
        return read_tensorboard(folder)[0].get("loss", []) if folder.exists() else []

    def wait_for(count):
        end = time.monotonic() + 60
        while len(losses()) != count:
            assert time.monotonic() < end, process.output
            time.sleep(0.05)

    wait_for(2)
    write(run, [*RECORDS, {"step": 30, "epoch": 1.5, "loss": 2.0, "new": 1}])
    wait_for(3)
    assert process.status is None
    os.utime(run / "final")
    assert process.wait(30) == 0
    assert "4 records" in process.output
    assert losses() == [(10, 3.5), (20, 2.5), (30, 2.0)]
    assert read_tensorboard(tmp_path / "tb" / "my-run")[0]["new"] == [(30, 1)]


@pytest.mark.rest
def test_comet(run, tmp_path):
    """The archive has the names, steps and values of the records."""
    output = export(tmp_path, run, "comet", "out")
    (file,) = re.findall("^comet upload (.*[.]zip)$", output, re.MULTILINE)
    with zipfile.ZipFile(file) as archive:
        assert json.loads(archive.read("experiment.json"))["project_name"] == "my-project"
        messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
    logged = [m["payload"]["metric"] for m in messages if m["type"] == "metric_msg"]
    found = [(metric["metricName"], metric["step"], metric["metricValue"]) for metric in logged]
    for record in RECORDS:
        for name in record.keys() - {"step", "epoch"}:
            count = 1 if record[name] is not None else 0
            assert found.count((name, record["step"], record[name])) == count, name


# Config, and the parameters that a token uses, counted by hand
SMALL = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 100}
SMALL |= {"num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 10}
LAYER = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 2 * 8  # q, k, v, o and two norms
MLP = 3 * 8 * 10
GPT2 = {"n_embd": 8, "n_layer": 3, "n_head": 2, "vocab_size": 100}
USED = {
    "llama, tied": (SMALL | {"tie_word_embeddings": True}, LAYER + MLP, 8 + 100 * 8),
    "llama": (SMALL | {"tie_word_embeddings": False}, LAYER + MLP, 8 + 100 * 8),
    # positions are looked up; biases; the head is tied
    "gpt2": (GPT2, 12 * 8 * 8 + 9 * 8 + 4 * 8, 2 * 8 + 100 * 8),
    "mixtral": (
        SMALL | {"num_local_experts": 5, "num_experts_per_tok": 2},
        LAYER + 5 * 8 + 2 * MLP,
        8 + 100 * 8,
    ),
    "qwen3_moe": (
        SMALL | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 10},
        LAYER + 2 * 4 + 6 * 8 + 2 * MLP,
        8 + 100 * 8,
    ),
}


@pytest.mark.parametrize("case", USED)
def test_operations_per_token(case):
    """Of a mixture, the experts that a token uses."""
    options, layer, others = USED[case]
    config = AutoConfig.for_model(case.split(",")[0], **options)
    flops = load(REPOSITORY / "tools" / "models.py").flops_per_token(config, 16)
    assert flops == 6 * (3 * layer + others) + 12 * 3 * 8 * 16


@pytest.mark.rest
def test_tflops_of_a_run(trainer, model, tmp_path):
    """Of the whole model and of the whole job, divided by the devices."""
    run = trainer("--max-steps", 2, "--eval-freq", 0, processes=2)
    export(tmp_path, run.folder, "tensorboard", "tb")
    scalars, _ = read_tensorboard(tmp_path / "tb" / "run")
    models = load(REPOSITORY / "tools" / "models.py")
    flops = models.flops_per_token(models.load_config(str(model)), 32)
    expected = [speed * flops / 2 / 1e12 for speed in run.column("tokens_per_second")]
    assert [value for _, value in scalars["tflops_per_device"]] == pytest.approx(expected)
