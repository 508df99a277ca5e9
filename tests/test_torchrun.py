"""Chapter 2 under torchrun itself: failures and restarts. Several nodes: test_multi_node.py"""

import sys
from pathlib import Path

import pytest
from helpers.assertions import assert_same_model, exact
from helpers.runner import CHAPTER_2
from helpers.torchrun import Forking, Launch, ending

pytestmark = pytest.mark.rest

TORCHRUN = Path(sys.executable).with_name("torchrun")
ONE_NODE = ["--standalone", "--nproc-per-node", 2]
FLAGS = ["--max-steps", 14, "--ckpt-freq", 4, "--eval-freq", 7, "--lr", 1e-3]


def test_killed_workers_come_back(trainer, tmp_path):
    """Twice; the job goes on from its last checkpoint, exactly."""
    undisturbed = trainer(*FLAGS, name="undisturbed", processes=2)
    script = ending(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    restarts = ["--max-restarts", 2]  # none for another failure
    launch = Forking(trainer, "output", [*ONE_NODE, *restarts, script, CHAPTER_2], *FLAGS)
    assert launch.wait() == 0, launch.output
    assert launch.output.count("Continuing from") == 2
    assert exact(launch.records) == exact(undisturbed.records)
    assert_same_model(launch, undisturbed)


def test_one_rank_raises(trainer, tmp_path):
    """The job ends, and the last that torchrun prints is the traceback of that rank.

    torchrun compares whole seconds: the rank keeps its connections for two more, so the other
    one fails later by its clock, too.
    """
    code = 'import atexit, time; atexit.register(time.sleep, 2); raise ValueError("it breaks")'
    script = ending(tmp_path, code)
    launch = Launch(trainer, "output", [TORCHRUN, *ONE_NODE, script, CHAPTER_2], *FLAGS)
    assert launch.wait() != 0
    cause = launch.output.partition("Root Cause")[2]
    assert "rank      : 1 " in cause
    assert "Traceback" in cause
    assert "ValueError: it breaks" in cause
