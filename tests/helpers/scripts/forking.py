"""Programs as forks of a process that has imported what they need.

As a script, for `Run`, this is torchrun, with forks as its workers. `patch` is for scripts that
start Python's programs with `subprocess.run`.
"""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
import weakref
from functools import partialmethod
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent


def run_script(*arguments):
    weakref.finalize._registry.clear()  # the temporary folders of the process that has forked
    sys.argv = [*arguments]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except Exception:
        traceback.print_exc()  # as Python does; torchrun reports the error of one worker only
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()


def torchrun(*arguments):
    run.run_script_path = run_script
    # Before a restart, workers that wait for a dead one have 5 seconds to end, and not 30.
    LocalElasticAgent._shutdown = partialmethod(LocalElasticAgent._shutdown, timeout=5)
    run.main(["--run-path", "--start-method", "fork", *arguments])


def become(arguments, env, files):
    for number, file in enumerate(files, start=1):
        os.dup2(file.fileno(), number)
    os.environ.update(env)
    if arguments[:2] == ["-m", "torch.distributed.run"]:
        torchrun(*arguments[2:])
    else:
        run_script(*arguments)


class Popen(subprocess.Popen):
    """A fork in place of a process of Python. Its output goes to files."""

    def __init__(self, command, stdout=None, stderr=None, env=os.environ, **options):
        self.fork = None
        is_to_files = hasattr(stdout, "fileno") and hasattr(stderr, "fileno")
        if command[0] != sys.executable or not is_to_files:
            super().__init__(command, stdout=stdout, stderr=stderr, env=env, **options)
            return
        context = multiprocessing.get_context("fork")
        self.fork = context.Process(target=become, args=(command[1:], env, [stdout, stderr]))
        self.fork.start()

    def poll(self):
        return self.fork.exitcode if self.fork else super().poll()

    def wait(self, timeout=None):
        if not self.fork:
            return super().wait(timeout)
        self.fork.join(timeout)
        if self.fork.exitcode is None:
            raise subprocess.TimeoutExpired("a fork", timeout)
        return self.fork.exitcode

    def send_signal(self, signum):
        os.kill(self.fork.pid, signum) if self.fork else super().send_signal(signum)

    def __del__(self):
        if not self.fork:
            super().__del__()


def patch(jobs=True):
    """Without `jobs`, torchrun is a real one, and so are its workers."""
    subprocess.Popen = Popen
    original = subprocess.run

    def fork(command, env=os.environ, check=False, **options):
        is_job = "torch.distributed.run" in command
        if command[0] != sys.executable or (is_job and not jobs):
            return original(command, env=env, check=check, **options)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            context = multiprocessing.get_context("fork")
            process = context.Process(target=become, args=(command[1:], env, [out, err]))
            process.start()
            process.join()
            texts = [os.pread(file.fileno(), 10**8, 0).decode() for file in (out, err)]
        done = subprocess.CompletedProcess(command, process.exitcode, *texts)
        if check:
            done.check_returncode()
        return done

    subprocess.run = fork


if __name__ == "__main__":
    torchrun(*sys.argv[1:])
