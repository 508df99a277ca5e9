"""Many trainings in the processes of one job."""

import json

import torch
from helpers.chapters import damaged
from helpers.runner import CHAPTERS_BY_NUMBER, SCRIPTS, Job, free_port
from helpers.trainer import Folder

STEPS, BATCH = 2, 24  # samples per step, for 1, 2, 3, 4 and 8 ranks
AGAIN, WHOLE, OFFLOAD = "--activation-checkpointing", "--no-reshard-after-forward", "--cpu-offload"
PARTS = ["--rank", 4, "--density", 0.05, "--alpha", 9]


def described(folder, name, number, model, batch, more) -> dict:
    script = CHAPTERS_BY_NUMBER.get(number, number)  # or a script
    if number == "19":
        script = damaged(script, folder, {"LOSS_CHUNK = 1024": "LOSS_CHUNK = 50"})
    flags = ["-e", name, "-m", folder / model, "--save-dir", folder]
    flags += PARTS if number == "14" else ["--no-from-scratch"]
    flags += ["-d", folder / "text.jsonl", "-s", 32, "-b", batch, "--lr", 1e-4, "--log-freq", 1]
    flags += ["--max-steps", STEPS, "--eval-freq", STEPS // 2, "--ckpt-freq", 99, *more]
    (folder / name).mkdir()
    env = {"MASTER_PORT": str(free_port())}
    case = {"name": name, "script": str(script), "env": env, "folder": str(folder / name)}
    return case | {"flags": [str(flag) for flag in flags]}


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
