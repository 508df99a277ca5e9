"""Stopping and going on: exactly, at any moment, and never at the price of what was saved."""

import json
import shutil
import signal
import time

import pytest
import torch
from conftest import assert_one_sentence, assert_same_model, exact
from runner import REPOSITORY
from safetensors.torch import load_file
from transformers import AutoTokenizer


def test_resume_is_exact(trainer, dropout_model):
    """Also across an epoch, at steps that are logged for the checkpoint alone."""
    flags = ["-m", dropout_model, "--num-epochs", 2, "--log-freq", 4, "--eval-freq", 9, "-b", 8]
    flags += ["--gradient-accumulation-steps", 2, "--ckpt-freq", 7, "--keep-checkpoints", 9]
    whole = trainer(*flags, name="whole")
    middle = whole.checkpoints[len(whole.checkpoints) // 2]
    for number, checkpoint in enumerate([whole.checkpoints[0], middle]):
        name = f"resumed-{number}"
        shutil.copytree(whole.folder / checkpoint, trainer.folder / name / checkpoint)
        # Older versions had a flag that was rarely set.
        state = trainer.folder / name / checkpoint / "state.json"
        saved = json.loads(state.read_text())
        saved["flags"]["decay_steps"] = None
        state.write_text(json.dumps(saved))
        # What a run that died after this checkpoint leaves: later records, half of a line
        text = (whole.folder / "metrics.jsonl").read_text()
        (trainer.folder / name / "metrics.jsonl").write_text(text[: len(text) * 4 // 5])
        resumed = trainer(*flags, name=name)
        assert f"Continuing from {resumed.folder / checkpoint}" in resumed.output
        assert exact(resumed.records) == exact(whole.records)
        assert_same_model(resumed, whole)
    epochs = whole.column("epoch")
    assert epochs[0] < 1 < epochs[-1] <= 2


@pytest.mark.rest
def test_stop_signals_save_and_the_run_goes_on_exactly(trainer, dropout_model):
    flags = ["-m", dropout_model, "--max-steps", 150, "--eval-freq", 60]
    whole = trainer(*flags, name="whole")
    for signum in (signal.SIGTERM, signal.SIGINT):
        run = trainer.start(*flags, name=signum.name)
        run.wait_for("step 30/150")
        run.signal(signum)
        if signum == signal.SIGTERM:  # a launcher may pass on what the process has already
            time.sleep(0.01)
            run.signal(signum)
        assert run.wait(30) == 128 + signum
        (checkpoint,) = (trainer.folder / signum.name).glob("step-*")
        step = json.loads((checkpoint / "state.json").read_text())["step"]
        assert f"Stopped after step {step}: the same command continues" in run.output
        assert not (trainer.folder / signum.name / "final").exists()
    resumed = trainer(*flags, name="SIGINT")
    assert exact(resumed.records) == exact(whole.records)
    assert_same_model(resumed, whole)


def test_batch_size_and_steps_may_change(trainer):
    """The order of samples goes on at the same place, whatever is read of it at a time."""
    trainer("--max-steps", 10, "-b", 8)
    state = json.loads((trainer.folder / "run" / "step-00000010" / "state.json").read_text())
    flags = ["--max-steps", 14, "-b", 2, "--gradient-accumulation-steps", 2]
    result = trainer(*flags)
    after = json.loads((trainer.folder / "run" / "step-00000014" / "state.json").read_text())
    assert (state["samples"], after["samples"]) == (80, 80 + 4 * 4)
    assert after["train_samples"] == state["train_samples"]
    # 4 steps of a cosine of 14, at the place where step 10 stands on it
    assert result.column("learning_rate")[10] == pytest.approx(0.00188255, rel=1e-4)


CHANGES = {
    "--seed": 1,
    "--seq-length": 16,
    "--dtype": "bf16",
    "--lr": 1e-3,
    "--lr-scheduler": "linear",
    "--weight-decay": 0.5,
    "--max-grad-norm": 0.5,
    "--warmup-steps": 3,
    "--adam-beta2": 0.9,
}


@pytest.mark.rest
def test_another_training_under_the_same_name_is_refused(trainer, dropout_model, tmp_path):
    before = trainer("--max-steps", 3)
    other_data = tmp_path / "other.txt"
    other_data.write_text("other words " * 5000)
    changes = CHANGES | {"-m": dropout_model, "-d": other_data}
    for flag, value in changes.items():
        after = trainer("--max-steps", 3, flag, value, status=1)
        assert_one_sentence(after.output, "keep it or take another -e")
    assert after.records == before.records
    # The same file with other text in it
    data = tmp_path / "same.txt"
    data.write_text("some words " * 5000)
    trainer("--max-steps", 3, "-d", data, name="data")
    data.write_text("some words " * 6000)
    assert "has changed" in trainer("--max-steps", 5, "-d", data, name="data", status=1).output


def test_damaged_checkpoint(trainer):
    """The run ends, leaves everything as it is, and goes on from the checkpoint before."""
    whole = trainer("--max-steps", 8, "--ckpt-freq", 3, name="whole")
    trainer("--max-steps", 6, "--ckpt-freq", 3, "--lr-scheduler", "constant")
    damaged = trainer.folder / "run" / "step-00000006"
    flags = ["--max-steps", 8, "--lr-scheduler", "constant"]
    before = (trainer.folder / "run" / "metrics.jsonl").read_text()
    for name in ("state.json", "metrics.jsonl", "model.safetensors", "training_state.pt"):
        content = (damaged / name).read_bytes()
        for rest in (None, content[: len(content) // 2]):
            (damaged / name).unlink()
            if rest is not None:
                (damaged / name).write_bytes(rest)
            if rest is None or name != "metrics.jsonl":  # half of the records are records, too
                result = trainer(*flags, status=1)
                sentence = f"{damaged} is damaged: remove this folder"
                assert_one_sentence(result.output, sentence)
            (damaged / name).write_bytes(content)
    assert result.checkpoints == ["step-00000003", "step-00000006"]
    assert (trainer.folder / "run" / "metrics.jsonl").read_text() == before
    shutil.rmtree(damaged)
    assert trainer(*flags).column("step") == whole.column("step")


SHARDED = ("03-fsdp", "05-multi-node")


@pytest.mark.rest
@pytest.mark.parametrize("chapter", ["02-ddp", *SHARDED])
def test_damaged_checkpoint_of_several_ranks(trainer, chapter):
    """One rank says so for all. Nothing is trained or removed.

    The other chapters read checkpoints with the same lines as one of these.
    """
    options = {"script": REPOSITORY / chapter / "train-llm.py", "processes": 2}
    flags = ["--eval-freq", 0, "--lr-scheduler", "constant"]
    run = trainer("--max-steps", 2, *flags, **options)
    folder = run.folder / "step-00000002"
    damages = {"state.json": 20, "model.safetensors": 99, "training_state.pt": None}
    if chapter in SHARDED:
        damages = {"state.json": None, ".metadata": 99, "__1_0.distcp": 99}
    sentence = f"{folder} is damaged: remove this folder"
    if chapter == "05-multi-node":
        sentence = f"and its run continues from the one before): {folder}: "
    for name, size in damages.items():
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        if size:
            (folder / name).write_bytes(content[:size])
        result = trainer("--max-steps", 3, *flags, **options, status=1)
        assert_one_sentence(result.output, sentence)
        (folder / name).write_bytes(content)
    assert result.checkpoints == ["step-00000002"]
    assert len(result.records) == 2


@pytest.mark.rest
def test_full_disk_while_saving(trainer):
    flags = ["--max-steps", 9, "--ckpt-freq", 3]
    whole = trainer(*flags, name="whole")
    trainer("--max-steps", 3, "--ckpt-freq", 3, "--lr-scheduler", "constant", name="full")
    constant = [*flags, "--lr-scheduler", "constant"]
    for size in (50_000, 300_000):  # the model does not fit; the optimizer state does not fit
        result = trainer(*constant, name="full", status=1, largest_file=size)
        assert "File too large" in result.output
        assert result.checkpoints == ["step-00000003"]
    assert trainer(*constant, name="full").checkpoints == whole.checkpoints


WATCH_DISK = """
import os
import pathlib

fsync, rename = os.fsync, pathlib.Path.rename

def watched_fsync(descriptor):
    number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
    print("\\nfsync", os.readlink(f"/proc/self/fd/{number}"), flush=True)
    fsync(descriptor)

def watched_rename(path, target):
    files = [*path.rglob("*")] if path.name == "incomplete" else []
    print("\\nrename", target, *sorted(str(file) for file in files), flush=True)
    return rename(path, target)

os.fsync, pathlib.Path.rename = watched_fsync, watched_rename
"""


def assert_synced(output: str, run_folder, names: list[str]) -> None:
    """Each folder had all of its files when it got its name, and they were on the disk."""
    synced, named = [], []
    for line in output.splitlines():
        what, *words = line.split(" ")
        if what == "fsync":
            synced.append(words[0])
        if what == "rename" and words[1:]:
            named.append(words[0].rsplit("/", 1)[1])
            assert set(words[1:]) <= set(synced)
            incomplete = f"{run_folder}/incomplete"
            assert synced[-1] == incomplete  # after the files
            files = {word.removeprefix(incomplete) for word in words[1:]}
            folder = run_folder / named[-1]
            assert files == {str(file).removeprefix(str(folder)) for file in folder.rglob("*")}
            synced.clear()
    assert named == names


def test_files_are_on_the_disk_before_a_folder_gets_its_name(trainer):
    """Each file, and then the folder: a killed process cannot show a missing sync.

    Chapters 2 to 10: test_quick.py
    """
    result = trainer("--max-steps", 2, "--ckpt-freq", 1, before=WATCH_DISK)
    assert_synced(result.output, result.folder, ["step-00000001", "step-00000002", "final"])


@pytest.mark.rest
def test_a_loss_that_is_not_finite_is_never_saved(trainer):
    flags = ["--lr", 1e30, "--max-grad-norm", 0, "--max-steps", 50, "--log-freq", 50]
    result = trainer(*flags, "--ckpt-freq", 1, status=1)
    assert_one_sentence(result.output, "not finite")
    for checkpoint in result.folder.glob("step-*"):
        weights = load_file(checkpoint / "model.safetensors").values()
        assert all(torch.isfinite(weight).all() for weight in weights)


@pytest.mark.rest
def test_a_tokenizer_that_saves_folders(trainer, model):
    """With several chat templates it does; a checkpoint has room for that."""
    folder = trainer.folder / "templates"
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    shutil.copytree(model, folder)
    tokenizer.save_pretrained(folder)
    result = trainer("-m", folder, "--max-steps", 2)
    assert any(path.is_dir() for path in (result.folder / "step-00000002").iterdir())
