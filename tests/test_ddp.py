"""Chapter 2 trains what chapter 1 trains, on any number of ranks."""

import json
import re
import signal
from collections import Counter

import pytest
from helpers.assertions import assert_one_sentence, assert_same_losses, told
from helpers.models import LLAMA, write_model
from helpers.runner import CHAPTER_2, CHAPTER_8, Run, in_step, patches
from helpers.trainer import resume

pytestmark = pytest.mark.rest


def test_equal_weights_and_one_reduction(trainer):
    """Losses are those of chapter 1, and the ranks end with the same weights."""
    flags = ["--max-steps", 8, "--eval-freq", 4, "--lr", 1e-3]
    flags += ["--gradient-accumulation-steps", 2]
    single = trainer(*flags, "-b", 12, name="single")
    ddp = trainer(*flags, "-b", 4, name="ddp", processes=3, before=patches("buckets"))
    assert_same_losses(single, ddp, 8)
    assert len({tuple(digest) for digest in told(ddp, "weights ")}) == 1
    # One bucket holds this model: averaged once per step, whatever the accumulation
    assert told(ddp, "buckets ") == [["8"]] * 3
    # Gradients lie in the bucket when it is averaged.
    assert told(ddp, "gradients in ") == [["1"]] * 3


def test_accumulation_and_ranks_are_the_same_to_the_bit_of_dropout(trainer, dropout_model):
    """A micro-batch has the same dropout masks wherever it is computed."""
    flags = ["-m", dropout_model, "-b", 4, "--max-steps", 6]
    single = trainer(*flags, "--gradient-accumulation-steps", 4, name="single")
    flags += ["--gradient-accumulation-steps", 2]
    ddp = trainer(*flags, name="ddp", processes=2)
    assert_same_losses(single, ddp, 6)


@pytest.mark.parametrize("chapter", [CHAPTER_2, CHAPTER_8], ids=lambda path: path.parent.name)
def test_a_compiled_layer_is_one_graph(trainer, tmp_path, chapter):
    """Also a layer that is larger than a bucket, which is 25 MB."""
    wide = LLAMA | {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 1}
    folder = write_model(tmp_path / "wide", **wide)
    flags = ["-m", folder, "--compile", "--max-steps", 2, "--eval-freq", 0, "-b", 1]
    found = []
    for name, options in (("one", {}), ("ddp", {"processes": 1, "script": chapter})):
        result = trainer(*flags, name=name, before=patches("graphs"), **options)
        (graphs,) = re.findall(r"^graphs (\d+) largest (\d+)", result.output, re.MULTILINE)
        found.append(graphs)
    assert found[0] == found[1]
    assert int(found[0][1]) > 25 * 2**20


def test_each_sample_is_used_once(trainer):
    """Over all ranks of an epoch, also when it goes on with another number of them."""
    flags = ["--num-epochs", 1, "--ckpt-freq", 5, "--eval-freq", 0]
    first = trainer(*flags, "-b", 4, "--max-steps", 7, processes=3, before=patches("buckets"))
    second = trainer(
        *flags, "-b", 6, "--gradient-accumulation-steps", 2, processes=2, before=patches("buckets")
    )
    parts = [*told(first, "samples "), *told(second, "samples ")]
    used = Counter(sample for part in parts for sample in part)
    newest = second.folder / second.checkpoints[-1] / "state.json"
    state = json.loads(newest.read_text())
    assert set(used.values()) == {1}
    assert len(used) == state["samples"]
    parameters = json.loads(newest.with_name("parameters.json").read_text())
    train_samples = parameters["dataset_samples"]
    assert train_samples - 24 < state["samples"] <= train_samples
    assert [len(part) for part in told(first, "samples ")] == [28] * 3


def test_resume_on_other_numbers_of_ranks_and_under_the_other_chapter(trainer, dropout_model):
    """The losses of an undisturbed run. On as many ranks, test_matrix.py compares all bits."""
    flags = ["-m", dropout_model, "--max-steps", 12, "--eval-freq", 6, "--ckpt-freq", 4]
    flags += ["--keep-checkpoints", 9, "-b", 4, "--log-freq", 3]
    two, four = ["--gradient-accumulation-steps", 2], ["--gradient-accumulation-steps", 4]
    single = trainer(*flags, *four, name="single")
    ddp = trainer(*flags, *two, name="ddp", processes=2)
    assert_same_losses(single, ddp, 6)  # the saved steps 4 and 8 are logged, too
    for name, origin, options, processes in (
        ("single-ddp", single, two, 2),
        ("ddp-single", ddp, four, 0),
        ("ddp-on-4", ddp, ["--gradient-accumulation-steps", 1], 4),
    ):
        resume(origin, trainer, 4, *flags, *options, name=name, processes=processes, near=6)


def test_a_signal_to_one_rank_stops_all(trainer):
    stop = in_step(3, "os.kill(os.getpid(), signal.SIGTERM)")
    result = trainer("--max-steps", 6, processes=2, before=stop, status=128 + signal.SIGTERM)
    assert "Stopped after step 3:" in result.output
    assert result.checkpoints == ["step-00000003"]
    assert [rank.process.exitcode for rank in result.run.ranks] == [128 + signal.SIGTERM] * 2


def test_rank_0_alone_speaks(trainer):
    """And logs the memory of each rank, and that of the worst."""
    result = trainer("--max-steps", 2, processes=3, comet=True)
    assert len([*(result.folder / "comet").glob("*.zip")]) == 1
    assert "step 2/2" in result.run.ranks[0].output
    assert [run.output for run in result.run.ranks[1:]] == ["", ""]
    record = result.records[0]
    ranks = [record[f"memory/rank{rank}/resident_gb"] for rank in range(3)]
    assert len(set(ranks)) > 1
    assert record["memory/resident_gb"] == max(ranks)


DIFFERENCES = {
    "lr": "sys.argv += ['--lr', '0.5']",
    "tokens_hash": "sys.argv[sys.argv.index('-d') + 1] = os.environ['OTHER']",
    "step of the checkpoint": "pathlib.Path.glob = lambda *_: iter(())",
}


def test_ranks_that_differ_are_refused(trainer, texts):
    """Say rank 1 is a node with another flag, other data, or no checkpoint."""
    before = trainer("--max-steps", 2, processes=2, name="step of the checkpoint")
    other = trainer.folder / "other.txt"
    other.write_text(" ".join(texts))
    for name, difference in DIFFERENCES.items():
        patch = f"import os, pathlib, sys\nif os.environ['RANK'] == '1':\n    {difference}"
        options = {"processes": 2, "before": patch, "env": {"OTHER": str(other)}}
        after = trainer("--max-steps", 4, status=1, name=name, **options)
        sentence = after.output[after.output.index("error: ranks differ in [") :]
        assert f"'{name}'" in sentence.splitlines()[0]
        assert name == before.folder.name or not (trainer.folder / name / "metrics.jsonl").exists()
    assert before.checkpoints == ["step-00000002"]
    assert len(before.column("loss")) == 2


@pytest.mark.parametrize(
    ("env", "missing"), [({}, "RANK"), ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR")]
)
def test_without_torchrun(tmp_path, env, missing):
    """Also if the shell still has variables of an earlier job."""
    run = Run(CHAPTER_2, ["--demo"], tmp_path / "output", env=env)
    assert run.wait() == 1
    assert_one_sentence(run.output, f"environment variable {missing} expected, but not set")
