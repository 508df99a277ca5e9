"""Chapter 7 trains what chapter 1 trains, with the layers on different ranks."""

import re
import shutil

import pytest
from helpers.assertions import assert_one_sentence, assert_same_folder, tensors_of
from helpers.models import LLAMA, UNEVEN_MODELS, write_model
from helpers.runner import CHAPTER_7, CHAPTER_13, patches
from helpers.trainer import resume
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.rest

CHAPTER = CHAPTER_7


def test_final_is_the_folder_of_chapter_1(trainer, train, tied, tmp_path):
    """To the last bit: a learning rate of 0 leaves the weights that were read."""
    flags = ["--no-from-scratch", "--max-steps", 1, "--lr", 0, "--eval-freq", 0]
    single = trainer(*flags, "-m", tied, "-b", 4, name="single")
    run = train(*flags, "-m", tied, "-b", 1, name="split", processes=4)
    assert_same_folder(single.folder / "final", run.folder / "final")
    # Files with other names: rank 0 reads them all, and each stage gets its own
    shutil.copytree(tied, tmp_path / "other")
    tensors = load_file(tied / "model.safetensors")
    tensors = {name.removeprefix("model."): x for name, x in tensors.items()}
    save_file(tensors, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    run = train(*flags, "-m", tmp_path / "other", "-b", 2, name="other")
    assert_same_folder(single.folder / "final", run.folder / "final")


@pytest.mark.parametrize(
    ("schedule", "processes", "batch"), [("1f1b", 2, 2), ("1f1b", 4, 4), ("zbv", 2, 4)]
)
def test_a_tied_head_gets_its_weight_in_the_compute_precision(
    trainer, train, tied, schedule, processes, batch
):
    """Half of the bytes of an fp32 weight, and nearly the losses of chapter 1."""
    flags = ["-m", tied, "--no-from-scratch", "--max-steps", 3, "--eval-freq", 3]
    flags += ["--dtype", "bf16"]
    single = trainer(*flags, "-b", batch, name="single")
    flags += ["-b", 1, "--pipeline-parallel", 2, "--schedule", schedule]
    run = train(*flags, name="run", processes=processes, before=patches("broadcasts"))
    for name in ("loss", "eval/loss"):
        assert run.column(name) == pytest.approx(single.column(name), rel=2e-3)
    numbers = tensors_of(tied)["model.embed_tokens.weight"].numel() * 2 // processes
    calls = 3 + 1  # before each step and each evaluation
    found = re.findall(r"^sent (.*)", run.output, re.MULTILINE)
    assert found == [f"torch.bfloat16 {2 * numbers}"] * calls


SMALL = {"model_type": "llama"} | UNEVEN_MODELS["llama"] | {"num_hidden_layers": 4}
# Ranks, flags, the model, the status, and a part of the sentence
REFUSED = {
    "ranks": (3, ["--pipeline-parallel", 2], SMALL, 2, "must divide the number of ranks, 3"),
    "fp16": (1, ["--dtype", "fp16"], SMALL, 2, "would skip a step on one stage alone"),
    "two numbers": (1, ["--layers-per-stage", "2,2"], SMALL, 1, "1 stages cannot share 4 layers"),
    "granite": (1, [], SMALL | {"model_type": "granite"}, 1, "granite is none of llama"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_sentence(train, tmp_path, case):
    processes, flags, config, status, part = REFUSED[case]
    folder = write_model(tmp_path / "m", **config)
    flags = ["-m", folder, *flags, "--max-steps", 1]
    result = train(*flags, processes=processes, status=status)
    assert_one_sentence(result.run.ranks[0].output, part)


def test_two_preparations_in_a_run(train, tmp_path):
    """One for the schedule of the training, and one for that of ten evaluations."""
    flags = ["-m", write_model(tmp_path / "m", **SMALL), "--max-steps", 10, "--eval-freq", 1]
    run = train(*flags, "--pipeline-parallel", 2, before=patches("preparations"))
    assert len(run.column("eval/loss")) == 10
    assert [rank.output.count("\nprepared") for rank in run.run.ranks] == [2, 2]


@pytest.mark.parametrize("script", [CHAPTER_7, CHAPTER_13], ids=lambda path: path.parent.name)
def test_dropout(trainer, tmp_path, script):
    """Each rank draws masks of its own in each step, and a resumed run draws them again."""
    dropout = LLAMA | {"attention_dropout": 0.3, "tie_word_embeddings": False}
    flags = ["-m", write_model(tmp_path / "dropout", **dropout), "--max-steps", 4, "--ckpt-freq", 2]
    flags += ["--eval-freq", 0, "--keep-checkpoints", 9]
    flags += ["--pipeline-parallel", 2] * (script == CHAPTER_7)
    flags += ["--pipeline-parallel", 2, "--tensor-parallel", 1] * (script == CHAPTER_13)
    train = trainer.of(script)
    run = train(*flags, name="run", before=patches("seeds"))
    seeds = [re.findall(r"^seed (\d+)", rank.output, re.MULTILINE)[-4:] for rank in run.run.ranks]
    assert len({*seeds[0], *seeds[1]}) == 8  # of four steps on two ranks
    resume(run, train, 2, *flags)
    plain = write_model(tmp_path / "plain", **dropout | {"attention_dropout": 0.0})
    without = train(*flags, "-m", plain, name="without")
    assert without.column("loss")[1:] != run.column("loss")[1:]
