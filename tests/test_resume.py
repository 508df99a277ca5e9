"""Stopping and going on: exactly, at any moment, and never at the price of what was saved."""

import json
import re
import shutil
import signal
import time

import pytest
from conftest import assert_one_sentence, assert_same_model, exact, in_step


def test_resume_is_exact(trainer, dropout_model):
    """Also across an epoch, at steps that are logged for the checkpoint alone."""
    flags = ["-m", dropout_model, "--num-epochs", 2, "--log-freq", 4, "--eval-freq", 9, "-b", 8]
    flags += ["--gradient-accumulation-steps", 2, "--ckpt-freq", 7, "--keep-checkpoints", 9]
    whole = trainer(*flags, name="whole")
    middle = whole.checkpoints[len(whole.checkpoints) // 2]
    for number, checkpoint in enumerate([whole.checkpoints[0], middle]):
        name = f"resumed-{number}"
        shutil.copytree(whole.folder / checkpoint, trainer.folder / name / checkpoint)
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
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        run = trainer.start(*flags, name=signum.name)
        run.wait_for("step 30/150")
        run.signal(signum)
        if signum == signal.SIGTERM:  # a launcher may pass on what the process has already
            time.sleep(0.01)
            run.signal(signum)
        assert run.wait(30) == 128 + signum
        (checkpoint,) = (trainer.folder / signum.name).glob("step-*")
        step = json.loads((checkpoint / "state.json").read_text())["step"]
        assert f"Stopped after step {step}: with -e, the same command" in run.output
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
    assert "warning: the global batch has changed" in result.output
    after = json.loads((trainer.folder / "run" / "step-00000014" / "state.json").read_text())
    assert (state["samples"], after["samples"]) == (80, 80 + 4 * 4)
    assert after["lasting"] == state["lasting"]
    again = trainer("--max-steps", 15, *flags[2:])  # the batch has not changed since
    assert "warning: the global batch" not in again.output
    # 4 steps of a cosine of 14, at the place where step 10 stands on it
    assert result.column("learning_rate")[10] == pytest.approx(0.00188255, rel=1e-4)


CHANGES = {"--seed": 1, "--dtype": "bf16", "--lr-scheduler-options": "{num_cycles: 2}"}


@pytest.mark.rest
def test_another_training_under_the_same_name_is_refused(trainer, dropout_model, tmp_path):
    before = trainer("--max-steps", 3)
    changes = CHANGES | {"-m": dropout_model}
    for flag, value in changes.items():
        after = trainer("--max-steps", 3, flag, value, status=1)
        assert_one_sentence(after.output, "keep it, or choose another -e")
    assert after.records == before.records
    # The same file with other text in it
    data = tmp_path / "same.txt"
    data.write_text("some words " * 5000)
    trainer("--max-steps", 3, "-d", data, name="data")
    data.write_text("some words " * 6000)
    output = trainer("--max-steps", 5, "-d", data, name="data", status=1).output
    assert_one_sentence(output, "train_samples was")


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

sync, rename = os.sync, pathlib.Path.rename
synced = {}

def sizes(folder):
    return {str(file): file.stat().st_size for file in folder.rglob("*")}

def watched_sync():
    synced.clear()
    for folder in pathlib.Path(os.environ["SAVES"]).rglob("incomplete"):
        synced.update(sizes(folder))
    sync()

def watched_rename(path, target):
    if path.name == "incomplete":
        on_disk = sizes(path) == synced
        print("\\nnamed", pathlib.Path(target).name, on_disk, flush=True)
    return rename(path, target)

os.sync, pathlib.Path.rename = watched_sync, watched_rename
"""


def assert_synced(output: str, names: list[str]) -> None:
    """Each folder had all of its files, on the disk, when it got its name."""
    found = re.findall(r"^named (\S+) (\w+)$", output, re.MULTILINE)
    assert found == [(name, "True") for name in names]


def test_files_are_on_the_disk_before_a_folder_gets_its_name(trainer):
    """A killed process cannot show a missing sync. Chapters 2 to 10: test_quick.py"""
    env = {"SAVES": str(trainer.folder)}
    result = trainer("--max-steps", 2, "--ckpt-freq", 1, before=WATCH_DISK, env=env)
    assert_synced(result.output, ["step-00000001", "step-00000002", "final"])


def test_links_in_place_of_folders(trainer):
    """People move checkpoints to another disk. The links go, the run goes on."""
    flags = ["--ckpt-freq", 1, "--keep-checkpoints", 1, "--lr-scheduler", "constant"]
    run = trainer("--max-steps", 2, *flags)
    moved = trainer.folder / "moved"
    moved.mkdir()
    for name in ("step-00000002", "final"):
        (run.folder / name).rename(moved / name)
        (run.folder / name).symlink_to(moved / name)
    run = trainer("--max-steps", 4, *flags)
    assert "Continuing from" in run.output
    assert run.checkpoints == ["step-00000004"]
    assert not (run.folder / "final").is_symlink()
    assert (moved / "step-00000002" / "state.json").exists()


def test_two_runs_of_one_name(trainer):
    """The second run ends, and changes no file. A killed run holds nobody up."""
    flags = ["--max-steps", 4, "--ckpt-freq", 2, "--eval-freq", 0]

    def files() -> dict:
        paths = (trainer.folder / "run").rglob("*")
        return {path: path.read_bytes() for path in paths if path.is_file()}

    # The process stops itself, as a process on a machine that hangs.
    stop = "print('in step 3', flush=True)\n        os.kill(os.getpid(), signal.SIGSTOP)"
    first = trainer.start(*flags, before=in_step(3, stop, rank=0))
    try:
        first.wait_for("in step 3")
        before = files()
        second = trainer(*flags, status=1)
        assert_one_sentence(second.output, "run/lock")
        assert files() == before
    finally:
        first.process.kill()
        first.wait()
    third = trainer(*flags)
    assert "Continuing from" in third.output
    assert third.column("step") == [1, 2, 3, 4]
