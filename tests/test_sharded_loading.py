"""Chapter 21: weights, losses and files of chapter 3, and no rank that holds the whole model."""

import json
import re
import shutil
import signal

import pytest
from helpers.assertions import assert_same_model, exact, final_tensors, tensors_of
from helpers.runner import CHAPTER_3, CHAPTER_21, SCRIPTS, Job, patches
from helpers.trainer import take_over
from safetensors.torch import save_file

pytestmark = pytest.mark.rest

TOOL = SCRIPTS / "families.py"
# Tied and untied, experts, other names in files, buffers in files, layers of several kinds
SAMPLE = ["apertus", "bamba", "deepseek_v3", "gemma3_text", "gpt2", "mixtral", "olmo_hybrid"]
ENDS = {
    "apertus from scratch": "Transformers draws mlp.act_fn.alpha_p elsewhere: use chapter 3",
    "olmo_hybrid pretrained": "the files of .* have other tensors: use chapter 3",
}


@pytest.mark.parametrize(
    ("ranks", "families"), [(3, SAMPLE), (2, ["--cpu-offload", "llama", "mixtral"])]
)
def test_families_are_those_of_chapter_1(tmp_path, ranks, families):
    """On 3 ranks, no number of rows divides. With one row, the last ranks have none."""
    job = Job(TOOL, families, tmp_path / "families.txt", ranks)
    assert job.wait() == 0, job.output
    names = [name for name in families if not name.startswith("-")]
    expected = {f"{name} {start}" for name in names for start in ("pretrained", "from scratch")}
    lines = job.ranks[0].output
    other = re.findall("^OTHER (.*)$", lines, re.MULTILINE)
    ends = [f"{name} ends: error: {end}" for name, end in ENDS.items() if name in expected]
    assert all(map(re.fullmatch, ends, other)), other  # all ranks end with the same sentence
    assert len(ends) == len(other)
    assert {*re.findall("^same (.*)$", lines, re.MULTILINE)} == expected - ENDS.keys(), lines


# A layer as large as the embeddings, in which most weights are joined tensors of experts
MIXTURE = ["--tied", "--experts", 8, "--vocabulary", 12000]


@pytest.mark.parametrize(("ranks", "more"), [(1, []), (2, MIXTURE), (4, []), (4, MIXTURE)])
def test_memory(tmp_path, ranks, more):
    """Start: the shards, and rows of a unit. From scratch and at the end: a unit, too."""
    script = SCRIPTS / "loading_memory.py"
    job = Job(script, more, tmp_path / "memory.txt", ranks)
    assert job.wait() == 0, job.output
    lines = [json.loads(x) for x in job.ranks[0].output.splitlines() if x.startswith("{")]
    assert [line["what"] for line in lines] == ["pretrained", "final/", "from scratch"]
    for line in lines:
        unit = line["unit_gb"]
        rows = 1.1 * unit / ranks
        most = rows + 1.1 * unit
        if line["what"] != "final/":
            most += line["shard_gb"]
        if line["what"] == "pretrained":
            most = line["shard_gb"] + rows
            assert set(line["read"]) == {1}
        assert max(line["gb"]) < most, line
        assert min(line["gb"]) > line["shard_gb"] * 0.9, line


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, ["--gradient-accumulation-steps", 2, "--no-from-scratch"]),
        (3, ["--cpu-offload", "--no-reshard-after-forward"]),
    ],
)
def test_a_run_of_chapter_3_to_the_last_bit(trainer, pretrained, ranks, flags):
    """Losses, norms and model. Each chapter continues the checkpoint of the other."""
    # Some models have a second copy of the weights, which no index names. Here it has other values.
    model = shutil.copytree(pretrained, trainer.folder / "model")
    weights = {name: x + 1 for name, x in tensors_of(model).items()}
    save_file(weights, model / "consolidated.safetensors", metadata={"format": "pt"})
    flags = ["-m", model, "--max-steps", 6, "--ckpt-freq", 3, "--eval-freq", 3, *flags]
    options = {"processes": ranks}
    before = trainer(*flags, name="chapter-3", script=CHAPTER_3, **options)
    run = trainer(*flags, name="chapter-21", script=CHAPTER_21, **options)
    assert exact(run.records) == exact(before.records)
    assert_same_model(run, before)
    for origin, name, script in ((before, "on-21", CHAPTER_21), (run, "on-3", CHAPTER_3)):
        take_over(origin, trainer, name, 3)
        resumed = trainer(*flags, name=name, script=script, **options)
        assert "Continuing from" in resumed.output
        assert exact(resumed.records) == exact(before.records)
        assert_same_model(resumed, before)


def test_a_kill_while_final_is_written(trainer):
    options = {"script": CHAPTER_21, "processes": 2}
    flags = ["--max-steps", 4, "--ckpt-freq", 4]
    killed = trainer(*flags, before=patches("kill_at_file_2"), status=None, **options)
    assert killed.status == -signal.SIGKILL
    assert killed.checkpoints == ["step-00000004"]
    assert not (killed.folder / "final").exists()
    run = trainer(*flags, **options)
    assert len(run.column("loss")) == 4
    assert not [*run.folder.glob("incomplete-*")]
    files = sorted(file.name for file in (run.folder / "final").glob("*.safetensors"))
    index = json.loads((run.folder / "final" / "model.safetensors.index.json").read_text())
    assert sorted({*index["weight_map"].values()}) == files
    assert index["weight_map"].keys() == final_tensors(run).keys()
    assert len(files) == 4  # embeddings, two layers, the norm
