"""Many trainings in the processes of one job."""

import json

import torch
from helpers.runner import CHAPTERS_BY_NUMBER, SCRIPTS, Job, free_port
from helpers.trainer import Folder

AGAIN, WHOLE, OFFLOAD = "--activation-checkpointing", "--no-reshard-after-forward", "--cpu-offload"
PARTS = ["--rank", 4, "--density", 0.05, "--alpha", 9]
STEPS = ["--max-steps", 2, "--eval-freq", 1, "--ckpt-freq", 1, "--log-freq", 1]
STEPS += ["--keep-checkpoints", 9]


def described(folder, name: str, script, flags, **more) -> dict:
    """A case of many_trainings.py: two steps, with an evaluation and a checkpoint after each."""
    script = CHAPTERS_BY_NUMBER.get(script, script)
    flags = ["-e", name, "--save-dir", folder, *STEPS, *flags]
    (folder / name).mkdir(exist_ok=True)  # with the checkpoint of another run
    case = {"name": name, "script": str(script), "folder": str(folder / name)}
    case |= {"flags": [str(flag) for flag in flags], "env": {"MASTER_PORT": str(free_port())}}
    return case | more


def run_cases(folder, name, cases, processes, before="") -> Job:
    (folder / f"{name}.json").write_text(json.dumps(cases))
    many, output = SCRIPTS / "many_trainings.py", folder / f"{name}.txt"
    job = Job(many, [folder / f"{name}.json"], output, processes, before=before)
    assert job.wait(500) == 0, job.output[-5000:]
    return job


class Case(Folder):
    def gradients(self, step: int) -> dict:
        """Of all ranks; those of a stage are equal on all of its ranks."""
        files = sorted(self.folder.glob(f"gradients-{step}-*"))
        return {name: g for file in files for name, g in torch.load(file).items()}

    @property
    def graphs(self) -> list[int]:
        """How many each rank has compiled."""
        return [int(file.read_text()) for file in sorted(self.folder.glob("graphs-*"))]
