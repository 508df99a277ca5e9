"""Stopping and going on: exactly, at any moment, and never at the price of what was saved."""

import json
import re
import shutil
import signal
import sys

import pytest
import torch
from helpers.assertions import assert_one_sentence, assert_same_model, assert_synced, exact
from helpers.runner import in_step, patches


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
    """After this step, and at once: no evaluation takes the time that a launcher leaves."""
    flags = ["-m", dropout_model, "--max-steps", 9, "--eval-freq", 3]
    whole = trainer(*flags, name="whole")
    kill = "os.kill(os.getpid(), signal.{})"
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        stop = kill.format(signum.name)
        if signum == signal.SIGTERM:  # a launcher may pass on what the process has already
            stop += ";" + stop
        options = {"name": signum.name, "before": in_step(3, stop, rank=0)}
        run = trainer(*flags, status=128 + signum, **options)
        assert run.checkpoints == ["step-00000003"]
        assert "Stopped after step 3: with -e, the same command" in run.output
        assert not (run.folder / "final").exists()
        assert run.column("eval/loss") == []
    # A signal in the last step leaves nothing to do.
    at_end = in_step(6, kill.format("SIGTERM"), rank=0)
    resumed = trainer(*flags, name="SIGINT", before=at_end)
    assert resumed.column("loss") == whole.column("loss")
    assert_same_model(resumed, whole)
    # The second Ctrl-C ends the run at once.
    twice = in_step(3, ";".join([kill.format("SIGINT")] * 2), rank=0)
    run = trainer(*flags, name="twice", before=twice, status=-signal.SIGINT)
    assert run.checkpoints == []


def test_batch_size_and_steps_may_change(trainer):
    """The order of samples goes on at the same place, whatever is read of it at a time."""
    trainer("--max-steps", 10, "-b", 8)
    state = json.loads((trainer.folder / "run" / "step-00000010" / "state.json").read_text())
    flags = ["--max-steps", 14, "-b", 2, "--gradient-accumulation-steps", 2]
    flags += ["--weight-decay", 0.5, "--adam-beta2", 0.9]
    result = trainer(*flags)
    assert re.findall("^note: (.*) was", result.output, re.MULTILINE) == [
        "batch_size",
        "gradient_accumulation_steps",
        "max_steps",
        "adam_beta2",
        "weight_decay",
        "global_batch",
    ]
    assert "note: weight_decay was 0.01, and is 0.5 now" in result.output
    checkpoint = trainer.folder / "run" / "step-00000014"
    after = json.loads((checkpoint / "state.json").read_text())
    assert (state["samples"], after["samples"]) == (80, 80 + 4 * 4)
    decay, _ = torch.load(checkpoint / "training_state.pt")["optimizer"]["param_groups"]
    assert (decay["weight_decay"], decay["betas"]) == (0.5, (0.9, 0.9))
    again = trainer("--max-steps", 15, *flags[2:])  # nothing has changed since
    assert re.findall("^note: (.*) was", again.output, re.MULTILINE) == ["max_steps"]
    # The model of another step, as if the last run had died before it wrote its own
    (again.folder / "final/step-00000015").rename(again.folder / "final/step-00000014")
    for said in ("Done: the model is in", "Already complete"):
        assert said in trainer("--max-steps", 15, *flags[2:]).output
    # 4 steps of a cosine of 14, at the place where step 10 stands on it
    assert result.column("learning_rate")[10] == pytest.approx(0.00188255, rel=1e-4)


# What a resume refuses if it has changed. It says what else has changed, and goes on.
REFUSED = "model_name tokens_hash seq_length seed dtype"


def test_changes_of_a_resume(chapter_1, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train-llm.py", "-e", "run"])
    args = chapter_1.parse_args()
    setup = args.as_dict() | {"global_batch": 8, "tokens_hash": "4f"}
    for name in {*setup} - {"experiment_name"}:
        args.save_dir = f"{tmp_path}/{name}"
        folder = tmp_path / name / "run" / "step-00000001"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}")
        (folder / "parameters.json").write_text(json.dumps(setup | {name: "before"}, default=str))
        said = f"{name} was before, and is {setup[name]} now"
        if name == "tokens_hash":
            said = "the text or the tokenizer has changed"
        if name in REFUSED.split():
            with pytest.raises(SystemExit, match=f"error: {re.escape(said)}: undo this, or choose"):
                chapter_1.open_run(args, setup)
        else:
            chapter_1.open_run(args, setup)
            assert f"note: {said}" in capsys.readouterr().out


@pytest.mark.rest
def test_another_training_under_the_same_name_is_refused(trainer, tmp_path):
    before = trainer("--max-steps", 3, "--dtype", "bf16")
    after = trainer("--max-steps", 3, "--dtype", "fp16", status=1)
    assert_one_sentence(after.output, "undo this, or choose another -e")
    assert after.records == before.records
    (before.folder / "step-00000003" / "parameters.json").unlink()  # as older versions
    assert_one_sentence(trainer("--max-steps", 4, status=1).output, "parameters.json")
    # Files that change places, after which the samples have other texts
    folder = tmp_path / "texts"
    folder.mkdir()
    for file, text in {"a.txt": "some words " * 5000, "b.txt": "other ones " * 5000}.items():
        (folder / file).write_text(text)
    flags = ["-d", f"{folder}/*.txt", "--ckpt-freq", 2]
    before = trainer("--max-steps", 3, *flags, name="data")
    (folder / "a.txt").rename(folder / "c.txt")
    output = trainer("--max-steps", 5, *flags, name="data", status=1).output
    assert_one_sentence(output, "the text or the tokenizer has changed")
    # The same files under another name, and a checkpoint of an older version, without the hash
    (folder / "c.txt").rename(folder / "a.txt")
    flags[1] = f"{folder}/../texts/*.txt"
    assert "note: dataset_name was" in trainer("--max-steps", 5, *flags, name="data").output
    file = before.folder / "step-00000005" / "parameters.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokens_hash": None}))
    output = trainer("--max-steps", 6, *flags, name="data", status=1).output
    assert_one_sentence(output, "the text or the tokenizer has changed")


@pytest.mark.rest
def test_full_disk_while_saving(trainer):
    flags = ["--max-steps", 9, "--ckpt-freq", 3]
    whole = trainer(*flags, name="whole")
    trainer("--max-steps", 3, "--ckpt-freq", 3, "--lr-scheduler", "constant", name="full")
    constant = [*flags, "--lr-scheduler", "constant"]
    for size in (50_000, 300_000):  # the model does not fit; the optimizer state does not fit
        result = trainer(*constant, name="full", status=1, largest_file=size)
        assert "Traceback" in result.output  # an error in the loop keeps it
        assert "File too large" in result.output
        assert result.checkpoints == ["step-00000003"]
    assert trainer(*constant, name="full").checkpoints == whole.checkpoints


def test_files_are_on_the_disk_before_a_folder_gets_its_name(trainer):
    """A killed process cannot show a missing sync. Other chapters: test_matrix.py"""
    result = trainer("--max-steps", 2, "--ckpt-freq", 1, before=patches("files_on_disk"))
    assert_synced(result.output, ["step-00000001", "step-00000002", "final"])


def test_two_runs_of_one_name(trainer):
    """The second run ends, and changes no file. A killed run holds nobody up."""
    flags = ["--max-steps", 4, "--ckpt-freq", 2, "--eval-freq", 0]

    def files() -> dict:
        paths = (trainer.folder / "run").rglob("*")
        return {path: path.read_bytes() for path in paths if path.is_file()}

    # The process stops itself, as a process on a machine that hangs.
    stop = "print('in step 3', flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
    first = trainer.start(*flags, before=in_step(3, stop, rank=0))
    try:
        first.wait_for("in step 3")
        before = files()
        second = trainer(*flags, status=1)
        assert_one_sentence(second.output, "run/lock")
        assert "Continuing from" not in second.output  # locked before it chooses a checkpoint
        assert files() == before
    finally:
        first.process.kill()
        first.wait()
    third = trainer(*flags)
    assert "Continuing from" in third.output
    assert third.column("step") == [1, 2, 3, 4]
