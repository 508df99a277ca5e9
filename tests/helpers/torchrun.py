"""Jobs of torchrun."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
from helpers.runner import SCRIPTS, Run, wait_for
from helpers.trainer import Folder

FORKING = SCRIPTS / "forking.py"


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


VARIABLES = ["NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "RDZV_ID"]
VARIABLES += ["MAX_RESTARTS", "LOCAL_ADDR", "HANG_DUMPS", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]
VARIABLES += ["PREFLIGHT"]
CLEAN = {name: value for name, value in os.environ.items() if name not in VARIABLES}
# The Python that runs the tests, as that of an active virtual environment
ACTIVE = {"VIRTUAL_ENV": sys.prefix}
ACTIVE |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
