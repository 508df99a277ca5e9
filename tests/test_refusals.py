"""Two runs of one name, cut records, flags that contradict: one sentence, and nothing is lost."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import assert_one_sentence
from runner import CHAPTER_2, REPOSITORY, load
from test_sparse_low_rank import SparseTrainer

LOCAL = ["--checkpoint-format", "local"]
# Chapter, processes, flags
RUNS = [
    ("01-single-gpu", 0, []),
    pytest.param("02-ddp", 2, [], marks=pytest.mark.rest),
    pytest.param("05-multi-node", 2, LOCAL, marks=pytest.mark.rest),
]
# Each process stops itself in its third step, as a process on a machine that hangs.
STOP = """
import os, signal, torch

def step(*arguments, **options):
    steps.append(None)
    if len(steps) == 3:
        print("in step 3", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    return original(*arguments, **options)

steps = []
original = torch.optim.AdamW.step
torch.optim.AdamW.step = step
"""

# Chapter 5 asks for the lock for two minutes.
IMPATIENT = """
import time

sleep = time.sleep
time.sleep = lambda seconds: sleep(min(seconds, 0.05))
"""


def files_of(folder) -> dict:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in files}


def processes_of(job) -> list:
    return getattr(job, "ranks", [job])


@pytest.mark.parametrize(("chapter", "processes", "flags"), RUNS)
def test_two_runs_of_one_name(trainer, chapter, processes, flags):
    """The second run ends, and changes no file. A killed run holds nobody up."""
    options = {"script": REPOSITORY / chapter / "train-llm.py", "processes": processes}
    flags = ["--max-steps", 4, "--ckpt-freq", 2, "--eval-freq", 0, *flags]
    first = trainer.start(*flags, before=STOP, **options)
    try:
        first.wait_for("in step 3")
        before = files_of(trainer.folder / "run")
        second = trainer(*flags, status=None, before=IMPATIENT, **options)
        after = files_of(trainer.folder / "run")
    finally:
        for run in processes_of(first):
            run.process.kill()
            run.wait()
    assert second.status != 0
    output = processes_of(second.run)[0].output
    assert_one_sentence(output, str(trainer.folder / "run"))
    assert "another process" in output
    assert after == before
    third = trainer(*flags, **options)
    assert "Continuing from" in third.output
    assert third.column("step") == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("chapter", "processes"),
    [
        ("01-single-gpu", 0),
        pytest.param("03-fsdp", 1, marks=pytest.mark.rest),
        pytest.param("08-gradient-compression", 1, marks=pytest.mark.rest),
        pytest.param("14-sparse-low-rank", 0, marks=pytest.mark.rest),
    ],
)
def test_cut_records_of_a_checkpoint(trainer, chapter, processes):
    """The next record would stand in the same line, so that nobody could read the file."""
    options = {"script": REPOSITORY / chapter / "train-llm.py", "processes": processes}
    flags = ["--max-steps", 2, "--ckpt-freq", 2, "--eval-freq", 0]
    if chapter.startswith("14"):
        trainer = SparseTrainer(trainer.folder, trainer.model, trainer.dataset)
    trainer(*flags, **options)
    checkpoint = trainer.folder / "run" / "step-00000002"
    records = trainer.folder / "run" / "metrics.jsonl"
    whole = (checkpoint / "metrics.jsonl").read_bytes()
    flags[1] = 3
    first_line = whole.index(b"\n") + 1
    for size in (len(whole) * 3 // 4, len(whole) - 1, first_line, 0):
        (checkpoint / "metrics.jsonl").write_bytes(whole[:size])
        result = trainer(*flags, status=1, **options)
        output = processes_of(result.run)[0].output
        assert_one_sentence(output, f"{checkpoint} is damaged: remove this folder")
        for line in records.read_text().splitlines():
            json.loads(line)


def test_a_thread_of_another_rank_ends_with_the_sentence(monkeypatch):
    """Python allows no change of signals there. Threads read streams and write checkpoints."""
    chapter = load(CHAPTER_2)
    monkeypatch.setattr(chapter, "LOCAL_RANK", 1)
    monkeypatch.setattr(chapter.time, "sleep", lambda seconds: None)
    with ThreadPoolExecutor() as threads:
        failed = threads.submit(chapter.fail, "a mistake")
        with pytest.raises(SystemExit, match="error: a mistake"):
            failed.result()
