"""Chapter 2 under torchrun itself: failures and restarts. Several nodes: test_multi_node.py"""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import Folder, assert_same_model, exact
from runner import CHAPTER_2, REPOSITORY, Run, wait_for

pytestmark = pytest.mark.rest

TORCHRUN = Path(sys.executable).with_name("torchrun")
FORKING = REPOSITORY / "tests" / "forking.py"


class Launch(Folder):
    """A torchrun with its workers."""

    def __init__(self, trainer, output: str, command: list, *flags, name="run", env=None):
        self.folder, self.file = trainer.folder / name, trainer.folder / output
        command = [*command, *trainer.defaults(name), *flags]
        with self.file.open("w") as file:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=trainer.folder,
            )

    @property
    def output(self) -> str:
        return self.file.read_text()

    @property
    def status(self) -> int | None:
        return self.process.poll()

    def wait_for(self, text: str, timeout: float = 120) -> None:
        wait_for(self, text, timeout)

    def wait(self, timeout: float = 240) -> int:
        end = time.monotonic() + timeout
        while self.status is None:
            if time.monotonic() > end:
                for child in psutil.Process(self.process.pid).children(recursive=True):
                    child.kill()
                self.process.kill()
                raise TimeoutError(f"still running after {timeout} s:\n{self.output}")
            time.sleep(0.02)
        return self.status

    def signal(self, signum: int) -> None:
        os.kill(self.process.pid, signum)

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()


class Forking(Launch):
    """The same as a fork of the server of runner.py, and so are its workers."""

    def __init__(self, trainer, output: str, command: list, *flags, name="run", **options):
        self.folder, self.file = trainer.folder / name, trainer.folder / output
        arguments = [*command, *trainer.defaults(name), *flags]
        self.file.touch()
        self.process = Run(FORKING, arguments, self.file, **options).process

    @property
    def status(self) -> int | None:
        return self.process.exitcode


ONE_NODE = ["--standalone", "--nproc-per-node", 2]
FLAGS = ["--max-steps", 14, "--ckpt-freq", 4, "--eval-freq", 7, "--lr", 1e-3]
# In place of a chapter: rank 1 ends at its sixth step, with this code, in its first two lives. No
# rank finds keys of an earlier life, which would be addresses of dead ranks.
ENDING = """
import os, runpy, signal, sys, torch

calls = iter(range(10**9))
step = torch.optim.AdamW.step
join = torch.distributed.init_process_group

def step_or_end(*arguments, **options):
    if next(calls) == 5:
        CODE
    return step(*arguments, **options)

def join_a_clean_store(*arguments, store, rank, **options):
    key = f"rank {rank} was here"
    assert not store.check([key])
    store.set(key, "")
    join(*arguments, store=store, rank=rank, **options)

torch.distributed.init_process_group = join_a_clean_store
if os.environ["RANK"] == "1" and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < 2:
    torch.optim.AdamW.step = step_or_end
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def ending(folder: Path, code: str) -> Path:
    script = folder / "ending.py"
    script.write_text(ENDING.replace("CODE", code))
    return script


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
    """The job ends, and the last that torchrun prints is the traceback of that rank."""
    script = ending(tmp_path, 'raise ValueError("this rank breaks")')
    launch = Launch(trainer, "output", [TORCHRUN, *ONE_NODE, script, CHAPTER_2], *FLAGS)
    assert launch.wait() != 0
    cause = launch.output.partition("Root Cause")[2]
    assert "rank      : 1 " in cause
    assert "Traceback" in cause
    assert "ValueError: this rank breaks" in cause
