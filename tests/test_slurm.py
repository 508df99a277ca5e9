"""launch/slurm.sh on a real Slurm: a controller and two nodes, all of them on this machine.

Two addresses of this machine are the names of the nodes, so that names and addresses are looked up
as on a cluster. Each test has a Slurm of its own, which starts in about two seconds.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from helpers.assertions import exact
from helpers.runner import CHAPTER_2, CHAPTERS_BY_NUMBER, REPOSITORY
from helpers.slurm import Slurm
from helpers.torchrun import CLEAN

pytestmark = pytest.mark.rest

SCRIPT = REPOSITORY / "launch" / "slurm.sh"
OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


class BatchJob:
    """A job of launch/slurm.sh, submitted from another folder than the repository."""

    def __init__(self, slurm: Slurm, options: list, *arguments, script: Path = SCRIPT):
        self.slurm = slurm
        self.number = slurm.ask("sbatch", "--parsable", *options, script, *arguments).strip()
        assert self.number, slurm.report()

    def show(self, name: str) -> str:
        """A fact about the job. The controller may be too busy to answer at once."""
        found = []

        def answered() -> bool:
            text = self.slurm.ask("scontrol", "--oneliner", "show", "job", self.number)
            found[:] = re.findall(rf"\b{name}=(\S+)", text)
            return bool(found)

        self.slurm.wait_for(answered, f"answer about job {self.number}", 60)
        return found[0]

    def log(self, node: int | None = None) -> str:
        """Of the batch script, or of a node."""
        pattern = f"slurm-{self.number}" + (".log" if node is None else f"-{node}-*.log")
        return "".join(file.read_text() for file in self.slurm.work.glob(pattern))

    @property
    def output(self) -> str:
        return self.log(0) + self.log(1)

    def wait_for(self, text: str, timeout: float = 240) -> None:
        def there() -> bool:
            over = self.show("JobState") in OVER
            found = text in self.output
            assert found or not over, f"ended before {text!r}\n{self.slurm.report()}"
            return found

        self.slurm.wait_for(there, f"{text!r} in the logs of the nodes", timeout)

    def end(self, state: str) -> None:
        """Waits until the job is over, in this state."""
        self.slurm.wait_for(lambda: self.show("JobState") in OVER, f"end of job {self.number}")
        assert self.show("JobState") == state, self.slurm.report()


TWO_NODES = ["--nodes", 2]


def records(folder: Path) -> list[dict]:
    return exact([json.loads(line) for line in (folder / "metrics.jsonl").open()])


# In place of a chapter. Each rank leaves a file, whose name is its rank; or it fails.
STAND_IN = """import os, pathlib, sys
if sys.argv[1] == "fails":
    sys.exit("error: this run fails")
folder = pathlib.Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
(folder / os.environ["RANK"]).write_text(os.environ["GROUP_WORLD_SIZE"])
"""


def runs_to_its_end(slurm):
    """On two nodes; a name with a space, and a folder relative to the caller's."""
    job = BatchJob(slurm, TWO_NODES, "stand-in", "runs/a run")
    job.end("COMPLETED")
    assert job.show("ExitCode") == "0:0"
    port = 20_000 + int(job.number) % 10_000
    assert f"Nodes: 127.0.0.1 127.0.0.2; endpoint 127.0.0.1:{port}" in job.log()
    logs = [file.name for file in slurm.work.glob(f"slurm-{job.number}*.log")]
    assert len(logs) == 3
    for node in "01":
        assert any(re.fullmatch(rf"slurm-{job.number}-{node}-[^-]+.*\.log", log) for log in logs)
        assert (slurm.work / "runs" / "a run" / node).read_text() == "2"


def fails(slurm):
    """The status of the job is that of the run, and its log names the logs with the cause."""
    failing = BatchJob(slurm, [], "stand-in", "fails")
    failing.end("FAILED")
    assert failing.show("ExitCode") == "1:0"
    assert "error: this run fails" in failing.output
    logs = f"slurm-{failing.number}-*.log"
    assert f"error: the run ended with status 1: {logs} say why" in failing.log()
    assert failing.show("Restarts") == "0"


# A job script as people write it. The output has the name of the log of a node.
OWN_SCRIPT = f"""#!/bin/sh
#SBATCH --signal=USR1@120 --time=60 --output=slurm-%j-0-own.log
export TORCHELASTIC_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1
srun --cpu-bind=none torchrun --standalone --nproc-per-node 1 {CHAPTER_2} "$@"
"""


def start_without_the_launcher(slurm, trainer, flags) -> BatchJob:
    script = slurm.work / "own.sh"
    script.write_text(OWN_SCRIPT)
    return BatchJob(slurm, [], *trainer.defaults("own"), *flags, script=script)


def stop_at_a_signal(slurm, trainer, job) -> None:
    """Slurm sends SIGUSR1 to all processes of `srun`, torchrun passes it on, and the run saves."""
    job.wait_for("step 5/")
    slurm.ask("scancel", "--signal=USR1", job.number)
    job.end("FAILED")  # the exit code of `srun` is not 0, so the training is not complete
    (stop,) = map(int, re.findall(r"Stopped after step (\d+)", job.output))
    assert (trainer.folder / "own" / f"step-{stop:08d}" / "state.json").exists()
    assert len(records(trainer.folder / "own")) == stop


def test_signal_requeue_and_scancel(slurm, trainer):
    """The run saves at the signal, is queued again, and goes on exactly. scancel saves, too.

    Slurm itself sends this signal before the time limit, up to a minute later than it was told.
    Meanwhile, other jobs on the same nodes run to their end, or fail, or have a signal, too.
    """
    (slurm.work / "stand-in").mkdir()
    (slurm.work / "stand-in" / "train-llm.py").write_text(STAND_IN)
    flags = ["--num-epochs", 3000, "--lr-scheduler", "constant", "--eval-freq", 0]
    flags += ["--gradient-accumulation-steps", 4, "--ckpt-freq", 100, "--keep-checkpoints", 1000]
    job = BatchJob(slurm, TWO_NODES, "02", *trainer.defaults("run"), *flags)
    own = start_without_the_launcher(slurm, trainer, flags)
    job.wait_for("step 5/")
    slurm.ask("scancel", "--batch", "--signal=USR1", job.number)
    stop_at_a_signal(slurm, trainer, own)
    runs_to_its_end(slurm)
    fails(slurm)
    job.wait_for("Continuing from")
    (stop,) = map(int, re.findall(r"Stopped after step (\d+)", job.output))
    assert job.show("Restarts") == "1"
    assert job.log().count("Nodes: ") == 2, "one log for all attempts"
    assert "The time limit is near: the run saves\nThe job is queued again\n" in job.log()
    assert "Terminating" not in job.log(), "srun has killed a node that was saving"
    assert (trainer.folder / "run" / f"step-{stop:08d}").exists()

    job.wait_for(f"step {stop + 5}/")
    slurm.ask("scancel", job.number)
    job.end("CANCELLED")
    last = int(re.findall(r"Stopped after step (\d+)", job.output)[-1])
    assert last >= stop + 5
    assert (trainer.folder / "run" / f"step-{last:08d}").exists()
    trainer(*flags, "--max-steps", last, name="alone", processes=2)
    assert records(trainer.folder / "run") == records(trainer.folder / "alone")
    assert len(records(trainer.folder / "run")) == last


STUBS = {
    "scontrol": 'case $2 in hostnames) echo localhost;; job) echo " Command=$SCRIPT 02";; esac\n'
    "[ $1 != requeue ] || echo $2 > requeued",
    "scancel": 'echo "$*" > stopping',
    # The signal of the time limit arrives while the launcher waits, which is where it sleeps. Then
    # the step gets the signal to stop, and ends.
    "srun": "until grep -q 'State:.S' /proc/$PPID/status; do sleep 0.05; done; kill -USR1 $PPID\n"
    "until [ -s stopping ]; do sleep 0.05; done\n"
    'echo "$LAST" > slurm-1-0-localhost.log',
}
# The last sentences of all chapters, each once
TEXTS = [script.read_text() for script in CHAPTERS_BY_NUMBER.values()]
DONE = [re.findall(r'say\(f"(Done: .*?) {', text) for text in TEXTS]


@pytest.mark.parametrize("last", [*sorted({last for [last] in DONE}), "Stopped after step 9:"])
def test_a_signal_during_the_last_step(tmp_path, last):
    """A training that has become complete is not queued again. The programs of Slurm are stubs.

    The job is a task of an array, whose number stands for all tasks.
    """
    for name, text in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    complete = not last.startswith("Stopped")
    env = CLEAN | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1"}
    env |= {"SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1"}
    env |= {"SLURM_ARRAY_JOB_ID": "1234", "SLURM_ARRAY_TASK_ID": "3"}
    env |= {"SCRIPT": str(SCRIPT), "LAST": last}
    options = {"env": env, "cwd": tmp_path, "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run([SCRIPT, "02", "-e", "run"], **options)
    assert done.returncode == 0, done.stderr
    assert ("The training is complete" in done.stdout) == complete
    assert (tmp_path / "stopping").read_text() == "--signal=TERM 1234_3.0\n"
    assert (tmp_path / "requeued").exists() != complete
    assert complete or (tmp_path / "requeued").read_text() == "1234_3\n"
