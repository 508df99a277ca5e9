"""Runs scripts of this repository the way a user does, without paying for the imports each time.

A server process imports torch, transformers, datasets and Comet once (preload.py). Every run is a
fork of it: a process of its own with its own arguments, signals, output and exit status.
"""

import atexit
import faulthandler
import importlib.util
import itertools
import multiprocessing
import multiprocessing.connection
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = REPOSITORY / "tests" / "helpers" / "scripts"


def __getattr__(name: str) -> Path:
    """The scripts are CHAPTER_1, CHAPTER_2 and so on."""
    number = name.removeprefix("CHAPTER_").zfill(2)
    if name.startswith("CHAPTER_") and number in CHAPTERS_BY_NUMBER:
        return CHAPTERS_BY_NUMBER[number]
    raise AttributeError(name)


def load(script: Path):
    """A script as a module, for tests of its functions. It may import others of its folder.

    The environment of the tests stays as it is.
    """
    if str(script.parent) not in sys.path:
        sys.path.append(str(script.parent))
    spec = importlib.util.spec_from_file_location(f"{script.parent.name}-{script.stem}", script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for its dataclasses
    with mock.patch.dict(os.environ):
        spec.loader.exec_module(module)
    return module


_chapters = load(REPOSITORY / "tools" / "chapters.py")
FACTS, CONTINUES = _chapters.FACTS, _chapters.CONTINUES
CHAPTERS_BY_NUMBER = {name[:2]: script for name, script in _chapters.SCRIPTS.items()}

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["helpers.preload"])


def _start_server() -> None:
    """Once. It finds `helpers.preload` in the folder of the tests."""
    paths = [str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH")]
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, paths))):
        forkserver.ensure_running()


def _child(script: Path, arguments: list[str], output: Path, options: dict) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable()  # a crash of a library prints where all threads are
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(options.get("env", {}))
    os.chdir(options.get("cwd", "/"))
    if "largest_file" in options:  # bytes: writing beyond fails like a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (options["largest_file"],) * 2)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(Path(script).parent))  # as Python does
    if "before" in options:
        # Chapters silence ranks above 0. What this code prints goes to the file nevertheless.
        own_output = open(1, "w", closefd=False)
        exec(options["before"], {"print": partial(print, file=own_output, flush=True)})
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def patches(*names: str) -> str:
    """For `before`: these modules of patches/, in this order."""
    return "".join(f"import helpers.patches.{name}\n" for name in names)


def in_step(number: int, action: str, rank: int = 1) -> str:
    """For `before`: AdamW's step with this number does something else first, on one rank."""
    return f"from helpers.patches.in_step import on\non({number}, {rank}, {action!r})\n"


def wait_for(run, text: str, timeout: float) -> None:
    """Returns when the run has printed this."""
    end = time.monotonic() + timeout
    while text not in run.output:
        assert run.status is None, f"ended before {text!r}:\n{run.output}"
        assert time.monotonic() < end, f"no {text!r} within {timeout} s:\n{run.output}"
        time.sleep(0.01)


class Run:
    """A script that runs; `output` is what it has printed so far, both streams together."""

    def __init__(self, script: Path, arguments, output: Path, **options):
        self.file = output
        _start_server()
        self.process = _context.Process(
            target=_child, args=(script, [str(a) for a in arguments], output, options)
        )
        self.process.start()

    @property
    def output(self) -> str:
        return self.file.read_text() if self.file.exists() else ""

    def wait(self, timeout: float = 240) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            raise TimeoutError(f"still running after {timeout} s:\n{self.output}")
        return self.process.exitcode

    @property
    def status(self) -> int | None:
        return self.process.exitcode

    def wait_for(self, text: str, timeout: float = 60) -> None:
        wait_for(self, text, timeout)

    def signal(self, signum: int) -> None:
        os.kill(self.process.pid, signum)


_numbers = itertools.count()


def outcome(folder: Path, script: Path, *arguments, timeout: float = 240, **options):
    """Runs a script to its end: exit status and output."""
    run = Run(script, arguments, folder / f"outcome-{next(_numbers)}.txt", **options)
    return run.wait(timeout), run.output


def python(*arguments, status: int = 0, timeout: float = 300, **options):
    """What a real start of Python prints, with its imports. It ends with this status."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def run_tool(folder: Path, name: str, *arguments, status: int = 0, **options) -> str:
    """The output of a script of tools/, which ends with this status."""
    found, output = outcome(folder, REPOSITORY / "tools" / name, *arguments, **options)
    assert found == status, output
    return output


# Below those that systems give to outgoing connections, and others in each worker of pytest-xdist
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
_ports = itertools.count(20_000 + 2_500 * _worker + os.getpid() * 37 % 2_000)
_held = deque(maxlen=100)


def free_port() -> int:
    """A port for a server of a test. It stays held: only sockets that allow sharing may have it."""
    for port in _ports:
        holder = socket.socket()
        with suppress(OSError):
            holder.bind(("", port))
            # As servers do. Two sockets may share an address if both allow it, and one listens.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _held.append(holder)
            return port


GRACE = 3  # seconds that the other workers have to leave after torchrun's SIGTERM


class Job:
    """A script on several ranks of one node, each a `Run` with the variables of torchrun."""

    def __init__(self, script: Path, arguments, output: Path, processes: int, **options):
        together = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        together |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        together |= {"GROUP_WORLD_SIZE": 1, "TORCHELASTIC_RESTART_COUNT": 0}
        one_thread = "import torch; torch.set_num_threads(1)\n"  # as torchrun has it
        options["before"] = one_thread + options.get("before", "")
        self.ranks = []
        for rank in range(processes):
            variables = together | {"RANK": rank, "LOCAL_RANK": rank}
            env = options.get("env", {}) | {name: str(value) for name, value in variables.items()}
            file = output.with_suffix(f".rank{rank}.txt")
            self.ranks.append(Run(script, arguments, file, **options | {"env": env}))

    @property
    def output(self) -> str:
        return "".join(run.output for run in self.ranks)

    def wait(self, timeout: float = 240) -> int:
        """The status of the first rank that failed. As torchrun does, it ends the others then."""
        sentinels = {run.process.sentinel: run for run in self.ranks}
        end = time.monotonic() + timeout
        status = 0
        while sentinels and not status:
            ended = multiprocessing.connection.wait(sentinels, max(0, end - time.monotonic()))
            statuses = [sentinels.pop(sentinel).wait() for sentinel in ended]
            status = max(statuses, key=abs, default=0)
            if not ended:
                break
        last = time.monotonic() + (GRACE if status else 0)
        for run in sentinels.values() if status else ():
            with suppress(ProcessLookupError):
                run.signal(signal.SIGTERM)  # as torchrun does
        for run in sentinels.values():
            run.process.join(max(0, last - time.monotonic()))
            if run.process.exitcode is None:
                run.process.kill()
                run.process.join()
                if not status:
                    raise TimeoutError(f"still running after {timeout} s:\n{self.output}")
        return status

    def wait_for(self, text: str, timeout: float = 60) -> None:
        self.ranks[0].wait_for(text, timeout)

    def signal(self, signum: int) -> None:
        for run in self.ranks:
            run.signal(signum)
