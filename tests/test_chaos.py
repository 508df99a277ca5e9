"""A round of tests/chaos.py with one kill for each chapter and a fixed seed; it notices damages."""

import random

import chaos
import pytest
from conftest import Trainer, damaged
from runner import CHAPTER_2

pytestmark = pytest.mark.rest


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return chaos.prepare(tmp_path_factory.mktemp("chaos"))


@pytest.fixture
def round_of(prepared, tmp_path):
    def begin(chapter: str) -> chaos.Chaos:
        trainer = Trainer(tmp_path, prepared.model, prepared.dataset)
        trainer.shards, trainer.mixture = prepared.shards, prepared.mixture
        return chaos.Chaos(trainer, chapter, "round", random.Random(f"{chapter} 0"))

    return begin


@pytest.mark.parametrize("chapter", chaos.CHAPTERS)
def test_nothing_is_lost(round_of, chapter):
    print(round_of(chapter).run(kills=1))


def test_a_run_that_hangs_says_where(round_of, tmp_path, monkeypatch):
    """Rank 1 sleeps, and rank 0 waits for its gradients."""
    monkeypatch.setattr(chaos, "LIMIT", 12)
    line = '        with timer("update"):\n'
    sleep = "        if RANK == 1 and state.step == 3:\n            time.sleep(1000)\n"
    one = round_of("02-ddp")
    one.script = damaged(CHAPTER_2, tmp_path, {line: sleep + line})
    with pytest.raises(AssertionError, match="no end within 12 s") as error:
        one.run()
    stacks = str(error.value).split("Current thread ")[1:]
    assert len(stacks) >= 2
    assert "in main" in str(error.value)


def test_a_checkpoint_that_lacks_its_last_records_is_noticed(round_of, tmp_path):
    """The records that a killed run leaves are those of later steps."""
    one = round_of("02-ddp")
    line = '(run_folder / "metrics.jsonl").write_text(records)'
    one.script = damaged(CHAPTER_2, tmp_path, {line: "pass"})
    with pytest.raises(AssertionError):
        one.run()
