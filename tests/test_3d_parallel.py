"""Chapter 13 trains what chapter 1 trains, on grids of stages, pipelines and groups."""

import sys

import pytest
import torch
from helpers.assertions import told, whole_state
from helpers.runner import CHAPTER_3, CHAPTER_6, CHAPTER_7, CHAPTER_13, load, patches

# Chapters that continue one run, one after the other: processes, flags, the last step
ZBV = ["--schedule", "zbv"]
CHAIN = [
    (CHAPTER_13, 4, ["-b", 4, "--pipeline-parallel", 2, "--tensor-parallel", 2], 1),
    (CHAPTER_6, 2, ["-b", 8, "--tensor-parallel", 2], 2),
    (CHAPTER_13, 4, ["-b", 2, "--pipeline-parallel", 2, "--tensor-parallel", 2, *ZBV], 3),
    (CHAPTER_7, 2, ["-b", 4, "--pipeline-parallel", 2], 4),
    (CHAPTER_3, 2, ["-b", 4], 5),
    (CHAPTER_13, 8, ["-b", 2, "--pipeline-parallel", 2, "--tensor-parallel", 2], 7),
]


@pytest.mark.rest
def test_a_run_goes_on_in_other_layouts_and_chapters(trainer, tied):
    """Losses within 1e-6 of a run in chapter 1, and the same AdamW state as in chapter 3."""
    flags = ["-m", tied, "--no-from-scratch", "--eval-freq", 7, "--ckpt-freq", 1, "--lr", 1e-3]
    flags += ["--lr-scheduler", "constant"]  # does not depend on the number of steps
    single = trainer(*flags, "-b", 8, "--max-steps", 7, name="single")
    sharded = {"processes": 1, "script": CHAPTER_3}
    sharded = trainer(*flags, "-b", 8, "--max-steps", 7, name="sharded", **sharded)
    for chapter, processes, split, last in CHAIN:
        options = {"processes": processes, "script": chapter, "name": "chain"}
        options["before"] = patches("seeds_of_stages") if processes == 8 else ""
        run = trainer(*flags, *split, "--max-steps", last, **options)
        assert ("Continuing from" in run.output) == (last > 1)
    losses = single.column("loss")
    print([a / b - 1 for a, b in zip(run.column("loss"), losses, strict=True)])
    assert run.column("loss") == pytest.approx(losses, rel=1e-6)
    assert run.column("eval/loss")[-1] == pytest.approx(single.column("eval/loss")[-1], rel=1e-6)
    a, b = (whole_state(x.folder / "step-00000007") for x in (sharded, run))
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=1e-4)
    # Tensor-parallel ranks drop the same activations, and all others drop other ones.
    seeds = told(run, "seeds ")
    assert seeds[0::2] == seeds[1::2]
    assert len({seed for rank in seeds[0::2] for seed in rank}) == sum(map(len, seeds[0::2])) == 8


def test_default_layout(monkeypatch):
    """The groups are the nodes, and all of them are one pipeline."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(sys, "argv", ["train-llm.py"])
    for ranks, layout in ((1, (4, 1)), (2, (2, 2))):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        args = load(CHAPTER_13).parse_args()
        assert (args.pipeline_parallel, args.tensor_parallel) == layout
