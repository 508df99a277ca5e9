"""The scripts of learn/by-hand/: their results, their form, and what a damage does.

Their bytes, their memory and their order are checked with the exercises (test_exercises.py)."""

import re

import pytest
from helpers.assertions import assert_one_sentence
from helpers.runner import REPOSITORY, Job, outcome

FOLDER = REPOSITORY / "learn" / "by-hand"
SCRIPTS = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}
FUNCTIONS = {"ddp": 2, "tensor_parallel": 2, "pipeline": 2}  # the others have one
PROCESSES = [(name, 2) for name in SCRIPTS]
PROCESSES += [("float8", 4), ("sharded_loading", 4)]  # the others on 4: test_exercises.py


def launch(name: str, folder, processes: int, text: str | None = None) -> list[str]:
    """The output of each rank. `text` takes the place of the script."""
    script = SCRIPTS[name]
    if text:
        script = folder / script.name
        script.write_text(text)
    job = Job(script, [], folder / name, processes)
    assert job.wait() == 0, job.output
    return [run.output for run in job.ranks]


def results(output: str) -> list[tuple[int, float]]:
    """Bytes and largest difference, for each part of the script."""
    found = re.findall(r"(\d+) bytes (?:sent|read), largest difference ([-+.e\d]+|nan|inf)", output)
    return [(int(sent), float(difference)) for sent, difference in found]


@pytest.mark.parametrize(("name", "processes"), PROCESSES)
def test_results(tmp_path, name, processes):
    """The results are those of one process, on each rank, and each rank has sent bytes."""
    for output in launch(name, tmp_path, processes):
        parts = results(output)
        assert len(parts) == FUNCTIONS.get(name, 1)
        assert all(sent > 0 and difference < 1e-9 for sent, difference in parts), output


def test_the_printed_order(tmp_path):
    """What learn/by-hand/README.md promises: the order is printed while the stages run."""
    for rank, output in enumerate(launch("pipeline", tmp_path, 2)):
        printed = re.findall(r": (\w\d), micro-batches in memory: ?(.*)$", output, re.M)
        orders = ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]
        steps = " ".join(step for step, _ in printed)
        assert steps == f"F0 F1 F2 F3 B0 B1 B2 B3 {orders[rank]}"
        kept = [len(kept.split()) for _, kept in printed]
        assert (max(kept[:8]), max(kept[8:])) == (4, 2 - rank)


@pytest.mark.rest
@pytest.mark.parametrize(
    ("name", "processes"), [("ddp", None), ("ddp", 1), ("pipeline", None), ("pipeline", 4)]
)
def test_the_wrong_number_of_processes(tmp_path, name, processes):
    """Without torchrun, with one process, and with too many for two stages: one sentence."""
    env = {"WORLD_SIZE": str(processes)} if processes else {}
    status, output = outcome(tmp_path, SCRIPTS[name], env=env)
    assert status == 1
    remedy = f"start it as torchrun --standalone --nproc-per-node 2 {SCRIPTS[name]}"
    assert_one_sentence(output, remedy)
