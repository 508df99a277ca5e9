"""A Slurm on this machine: a controller and two nodes."""

import getpass
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from helpers.runner import free_port
from helpers.torchrun import ACTIVE, CLEAN

# Without cgroups, accounting and limits of resources. `config_overrides` allows more CPUs than the
# machine has. `cred_expire` is how long a job that is queued again waits, at least. The scheduler
# looks every second for a job to start, and not every minute.
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket,cred_expire=5
FirstJobId={first_job}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1
SlurmdParameters=config_overrides
NodeName=127.0.0.1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=127.0.0.2 NodeHostname={host} NodeAddr=127.0.0.2 Port={ports[2]} CPUs=4
PartitionName=all Nodes=ALL Default=YES State=UP
"""


class Slurm:
    def __init__(self, folder: Path, work: Path):
        self.folder, self.work, self.daemons = folder, work, []
        (folder / "state").mkdir()
        conf = folder / "slurm.conf"
        facts = {"host": socket.gethostname().partition(".")[0], "user": getpass.getuser()}
        facts["ports"] = [free_port() for _ in range(3)]
        # slurm.sh derives the port of a job from its number, so numbers begin at a free port.
        facts["first_job"], *_ = [free_port() % 10_000 for _ in range(5)]
        conf.write_text(CONFIG.format(folder=folder, **facts))
        # A session inside a job of another Slurm has its variables.
        self.env = {name: x for name, x in (CLEAN | ACTIVE).items() if not name.startswith("SLURM")}
        self.env |= {"SLURM_CONF": str(conf)}
        self.env |= {"NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "1", "PREFLIGHT": "0"}

    def start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid"}
        files |= {"log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{end}" for option, end in files.items()]
        self.daemon("munged", "--foreground", "--force", *options)
        self.wait_for(lambda: (self.folder / "munge.socket").exists(), "munge", 30)
        self.daemon("slurmctld", "-D")
        for node in ("127.0.0.1", "127.0.0.2"):
            self.daemon("slurmd", "-D", "-N", node)
        self.wait_for(lambda: self.ask("sinfo", "-h", "-o", "%T %D") == "idle 2\n", "nodes", 60)

    def daemon(self, name: str, *options: str) -> None:
        """In the foreground: its process id is that of the child, and its messages are kept."""
        path = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
        with (self.folder / f"{name}-{len(self.daemons)}.txt").open("w") as output:
            streams = {"stdout": output, "stderr": subprocess.STDOUT}
            self.daemons.append(subprocess.Popen([path, *options], env=self.env, **streams))

    def stop(self) -> None:
        """First the jobs, whose processes are not children of ours, then our own children."""
        self.ask("scancel", "--full", "--signal=KILL", "--user", getpass.getuser())
        self.ask("scancel", "--user", getpass.getuser())
        end = time.monotonic() + 60
        while self.ask("squeue", "-h") and time.monotonic() < end:
            time.sleep(0.5)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()

    def ask(self, *command) -> str:
        """What a command of Slurm prints; nothing if it fails, as while the controller starts."""
        words = [str(word) for word in command]
        options = {"env": self.env, "cwd": self.work, "capture_output": True, "text": True}
        return subprocess.run(words, timeout=60, **options).stdout

    def wait_for(self, condition, name: str, timeout: float = 180) -> None:
        end = time.monotonic() + timeout
        while not condition():
            late = time.monotonic() > end or any(daemon.poll() for daemon in self.daemons)
            assert not late, f"no {name} within {timeout} s\n{self.report()}"
            time.sleep(0.3)

    def report(self) -> str:
        files = [*self.work.glob("*.log"), *self.folder.glob("*.txt"), *self.folder.glob("*.log")]
        texts = [f"== {file.name}\n{file.read_text()[-3000:]}" for file in files]
        return "\n".join([self.ask("squeue"), *texts])
