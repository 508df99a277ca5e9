"""`Trainer` runs a chapter and reads what it wrote."""

import copy
import itertools
import json
import shutil
from pathlib import Path

import torch
from helpers.assertions import assert_same_losses, assert_same_model, exact
from helpers.runner import CHAPTER_1, CHAPTER_2, Job, Run, patches


class Folder:
    """What a run has written into its folder."""

    def __init__(self, folder: Path, output: str = ""):
        self.folder, self.output = folder, output

    @property
    def records(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").open()]

    def column(self, name: str) -> list[float]:
        return [record[name] for record in self.records if name in record]

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("step-*"))


class Result(Folder):
    def __init__(self, run: Run | Job, folder: Path, status: int):
        super().__init__(folder, run.output)
        self.run, self.status = run, status


class Trainer:
    """`trainer(...)` runs a chapter to its end; `trainer.start(...)` lets it run.

    That is chapter 1, or with `processes` chapter 2 on so many ranks, without torchrun.
    """

    script, processes = None, 0

    def __init__(self, folder: Path, model: Path, dataset: Path):
        self.folder, self.model, self.dataset = folder, model, dataset
        self.numbers = itertools.count()

    def of(self, script: Path) -> "Trainer":
        """The same with another chapter, on two ranks if a call does not say otherwise."""
        other = copy.copy(self)
        other.script, other.processes = script, 2
        return other

    def defaults(self, name: str) -> list:
        defaults = ["-e", name, "--save-dir", self.folder, "-m", self.model, "--from-scratch"]
        return [*defaults, "-d", self.dataset, "-s", 32, "-b", 4, "--lr", 1e-2, "--log-freq", 1]

    def start(self, *flags, name="run", script=None, comet=False, processes=None, **options):
        script = script or self.script
        processes = self.processes if processes is None else processes
        output = self.folder / f"output-{next(self.numbers)}.txt"
        env = {"COMET_AUTO_LOG_DISABLE": str(not comet).lower()} | options.pop("env", {})
        flags = [*self.defaults(name), *flags]
        if processes:
            return Job(script or CHAPTER_2, flags, output, processes, env=env, **options)
        return Run(script or CHAPTER_1, flags, output, env=env, **options)

    def __call__(self, *flags, name="run", status=0, **options) -> Result:
        run = self.start(*flags, name=name, **options)
        result = Result(run, self.folder / name, run.wait())
        assert status is None or result.status == status, result.output
        return result


def take_over(origin, trainer, name: str, step: int) -> Path:
    """A run's folder as it was after this step, in any format, with the records of all steps."""
    folder = trainer.folder / name
    for checkpoint in origin.folder.glob(f"**/step-{step:08d}"):
        shutil.copytree(checkpoint, folder / checkpoint.relative_to(origin.folder))
    shutil.copy(origin.folder / "metrics.jsonl", folder)
    return folder


def resume(run, trainer, step: int, *flags, name="resumed", again=None, near=0, **options):
    """Begins the run again at this step. It repeats the rest to the last bit.

    `near`: on other ranks, so many logged losses and norms are equal but for rounding.
    """
    take_over(run, trainer, name, step)
    resumed = (again or trainer)(*flags, name=name, **options)
    assert f"Continuing from {resumed.folder}" in resumed.output
    if near:
        assert_same_losses(run, resumed, near, grad_norm=3e-5)
    else:
        assert exact(resumed.records) == exact(run.records)
        assert_same_model(resumed, run)
    return resumed


def gradients_of(trainer, *flags, name, **options):
    """The gradients of the first step by name, and the run."""
    file = trainer.folder / f"gradients-{name}"
    options |= {"env": {"GRADIENTS": str(file)}, "before": patches("first_gradients")}
    result = trainer("--no-from-scratch", *flags, name=name, **options)
    return torch.load(file), result


def watched(trainer, *flags, name, processes=2, before="", env=None, **options):
    """A run of a chapter. `seen` has the rows of each rank, in the order of steps."""
    path = trainer.folder / f"seen-{name}-"
    options |= {"before": patches("seen_rows") + before, "env": {"SEEN": str(path)} | (env or {})}
    result = trainer(*flags, name=name, processes=processes, **options)
    saved = [path.with_name(path.name + str(rank)) for rank in range(processes)]
    result.seen = [torch.load(file) for file in saved if file.exists()]
    return result
