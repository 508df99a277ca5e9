"""Chapter 13 trains what chapter 1 trains, on blocks of stages, pipelines and groups."""

import json
import os

import pytest
import torch
from conftest import assert_same_losses
from filelock import FileLock
from runner import CHAPTER_1, CHAPTER_13, Job, Run, free_port
from test_fsdp import OFF, tensors_of
from test_pipeline_parallel import (
    CHECKPOINTING,
    COMPILE,
    LOOPED,
    MANY,
    SOURCES,
    Folder,
    gradients,
)
from test_tensor_parallel import FAMILIES as TP_FAMILIES
from test_tensor_parallel import worst
from test_tensor_parallel import write_weights as write_tp_weights

BLOCK = {"script": CHAPTER_13}

# Four layers, because two stages per rank need four stages
FAMILIES = {
    name: config | {"num_hidden_layers": 4, "pad_token_id": None}
    for name, config in TP_FAMILIES.items()
}
FAMILIES["smollm3"]["no_rope_layers"] = [1, 0, 1, 0]
BATCH = 16  # samples per step
UNEVEN = ["--layers-per-stage", "1,3", "--reshard-after-forward"]
# Ranks, groups of a pipeline, ranks of a group, schedule, source, other flags
CASES = [
    (8, 2, 2, "1f1b", "tied, pretrained", []),
    (8, 2, 2, "interleaved", "untied, from scratch", CHECKPOINTING),
    (4, 2, 2, "gpipe", "tied, from scratch", []),
    (4, 2, 2, "1f1b", "untied, pretrained", UNEVEN),
    (4, 2, 2, "1f1b", "tied, pretrained", ["--gradient-accumulation-steps", 8]),
    (4, 2, 2, "interleaved", "tied, pretrained", CHECKPOINTING),
    (4, 2, 2, "zbv", "tied, from scratch", []),
    (4, 2, 2, "zbv", "untied, pretrained", ["--cpu-offload"]),
    (4, 1, 2, "1f1b", "tied, pretrained", []),
    (4, 2, 1, "1f1b", "untied, from scratch", []),
    (4, 2, 2, "1f1b", "tied, pretrained", COMPILE),
    (4, 2, 2, "interleaved", "untied, pretrained", [*COMPILE, *CHECKPOINTING]),
]
CASES += [(4, 2, 2, "1f1b", family, []) for family in FAMILIES]


def name_of(case) -> str:
    return "-".join(str(part) for part in (*case[:5], *case[5])).replace(", ", "-")


def steps_of(case) -> int:
    """Compiled ones and families take fewer."""
    return 20 if case[4] in SOURCES and "--compile" not in case[5] else 4


def single_of(case) -> str:
    """The name of the same in chapter 1."""
    return f"{case[4]}, {steps_of(case)} steps"


def write_weights(folder, source: str):
    if source in SOURCES:
        return write_tp_weights(folder, "llama", FAMILIES, **SOURCES[source][0])
    return write_tp_weights(folder, source, FAMILIES)


def split_of(case) -> list:
    """The flags of chapter 13."""
    ranks, stages, size, schedule, _, more = case
    count = stages * (1 + (schedule in LOOPED))
    if more[:1] == ["--gradient-accumulation-steps"]:
        count = more[1]
    flags = ["-b", BATCH // count // (ranks // stages // size), "--schedule", schedule, *more]
    return [*flags, "--pipeline-parallel", stages, "--tensor-parallel", size]


class Runner:
    """Runs chapters many times in the same processes: imports take longer than these trainings."""

    def __init__(self, folder, dataset):
        self.folder = folder
        self.script = folder / "many.py"
        self.script.write_text(MANY.replace("SAVED = (1, 2, 30)", "SAVED = (1, 2, 20)"))
        self.flags = ["--save-dir", folder, "-d", dataset, "-s", 32, "--lr", 1e-4, "--log-freq", 1]

    def case(self, name, chapter, *flags):
        (self.folder / name).mkdir(exist_ok=True)
        flags = [str(flag) for flag in ("-e", name, *self.flags, *flags)]
        env = {"MASTER_PORT": str(free_port()), "COMET_AUTO_LOG_DISABLE": "true"}
        case = {"name": name, "script": str(chapter), "folder": str(self.folder / name)}
        return case | {"env": env, "flags": flags}

    def start(self, name, cases, processes=0):
        file = self.folder / f"{name}.json"
        file.write_text(json.dumps(cases))
        output = self.folder / f"{name}.txt"
        if processes:
            return Job(self.script, [file], output, processes)
        return Run(self.script, [file], output)


@pytest.fixture(scope="session")
def runs(tmp_path_factory, dataset):
    """All of CASES, and chapter 1 for each source: their folders by name.

    Workers of pytest-xdist share them: the first one makes them, the others wait.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "blocks"
    with FileLock(f"{folder}.lock"):
        if not (folder / "complete").exists():
            folder.mkdir()
            make_runs(Runner(folder, dataset))
            (folder / "complete").touch()
    return folder


def make_runs(runner):
    sources = {case[4] for case in CASES}
    models = {s: write_weights(runner.folder / f"model-{s}", s) for s in sources}

    def described(name, chapter, case, more):
        origin = SOURCES.get(case[4], (None, ["--no-from-scratch"]))[1]
        steps = steps_of(case)
        own = ["-m", models[case[4]], *origin, "--max-steps", steps, "--eval-freq", steps // 2]
        return runner.case(name, chapter, *own, "--ckpt-freq", 99, *more)

    alone = {single_of(case): case for case in CASES}
    single = [described(name, CHAPTER_1, case, ["-b", BATCH]) for name, case in alone.items()]
    job = runner.start("single", single)
    assert job.wait(500) == 0, job.output[-5000:]
    for processes in (4, 8):
        cases = [case for case in CASES if case[0] == processes]
        cases = [described(name_of(case), CHAPTER_13, case, split_of(case)) for case in cases]
        job = runner.start(f"on-{processes}", cases, processes)
        assert job.wait(500) == 0, job.output[-5000:]


@pytest.mark.rest
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_trains_what_chapter_1_trains(runs, case):
    """Losses, norms, held-out losses, every gradient, and the model in the end."""
    steps = steps_of(case)
    single, run = (Folder(runs / name) for name in (single_of(case), name_of(case)))
    assert_same_losses(single, run, steps, **OFF)
    assert len(run.column("eval/loss")) == 2
    for step in (1, 2, 20) if steps == 20 else (1, 2):
        expected, found = gradients(single.folder, step), gradients(run.folder, step)
        print(f"step {step}: {worst(expected, found)}")
        assert worst(expected, found)[0] < 1e-4, step
    a, b = (tensors_of(x.folder / "final") for x in (single, run))
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=1e-4)
