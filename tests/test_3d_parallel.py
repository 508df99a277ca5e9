"""Chapter 13 trains what chapter 1 trains, on grids of stages, pipelines and groups."""

import json

import pytest
import torch
from conftest import (
    assert_one_sentence,
    assert_opens,
    assert_same_losses,
    exact,
    take_over,
    write_model,
)
from runner import CHAPTER_3, CHAPTER_6, CHAPTER_7, CHAPTER_13
from test_fsdp import OFF, tensors_of, told, whole_state
from test_tensor_parallel import FAMILIES, SIZE, write_weights

GRID = {"script": CHAPTER_13}

# -- Checkpoints -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """Of four layers, because two stages per rank need four stages."""
    folder = tmp_path_factory.mktemp("models") / "tied"
    return write_weights(folder, "llama", num_hidden_layers=4, pad_token_id=None)


def test_one_pipeline_of_groups(trainer, tied):
    """Losses, norms and held-out loss are those of chapter 1, and a resume repeats every bit."""
    flags = ["-m", tied, "--no-from-scratch", "--max-steps", 4, "--eval-freq", 2, "--ckpt-freq", 2]
    single = trainer(*flags, "-b", 8, name="single")
    grid = ["-b", 4, "--pipeline-parallel", 2, "--tensor-parallel", 2]
    run = trainer(*flags, *grid, name="grid", processes=4, **GRID)
    assert_same_losses(single, run, 4, **OFF)
    assert_opens(run, reference=single)
    take_over(run, trainer, "resumed", 2)
    resumed = trainer(*flags, *grid, name="resumed", processes=4, **GRID)
    assert "Continuing from" in resumed.output
    assert exact(resumed.records) == exact(run.records)
    a, b = (whole_state(x.folder / "step-00000004") for x in (run, resumed))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


# Chapters that continue one run, one after the other: processes, flags, the last step
ZBV = ["--schedule", "zbv"]
CHAIN = [
    (CHAPTER_13, 4, ["-b", 4, "--pipeline-parallel", 2, "--tensor-parallel", 2], 1),
    (CHAPTER_6, 2, ["-b", 8, "--tensor-parallel", 2], 2),
    (CHAPTER_13, 4, ["-b", 2, "--pipeline-parallel", 2, "--tensor-parallel", 2, *ZBV], 3),
    (CHAPTER_7, 2, ["-b", 4, "--pipeline-parallel", 2], 4),
    (CHAPTER_13, 4, ["-b", 4, "--pipeline-parallel", 1, "--tensor-parallel", 2], 5),
    (CHAPTER_3, 2, ["-b", 4], 6),
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


# -- Who has what ----------------------------------------------------------------------------------

# Each rank tells at its end which samples and seeds it used, and how many numbers AdamW updates.
WATCH = """
import hashlib
import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

def wrap(owner, name):
    original = getattr(owner, name)
    def step(self, x, **options):
        samples.extend(hashlib.sha256(row.numpy()).hexdigest()[:16] for row in x)
        seeds.append(torch.initial_seed())
        return original(self, x, **options)
    setattr(owner, name, step)

samples, seeds, held = [], [], []
wrap(schedules.PipelineScheduleSingle, "step")

def step(self, *args, **options):
    held.append(sum(p.to_local().numel() for g in self.param_groups for p in g["params"]))
    return original_step(self, *args, **options)

original_step = torch.optim.AdamW.step
torch.optim.AdamW.step = step

def tell():
    print("\\nsamples", *samples)
    print("seeds", *seeds)
    print("held", held[-1])
    destroy()

destroy = dist.destroy_process_group
dist.destroy_process_group = tell
"""


@pytest.mark.rest
def test_who_has_what(trainer, tmp_path):
    """On 2 x 2 x 2 ranks: the samples of each pipeline, and an eighth of the model per rank."""
    config = FAMILIES["llama"] | {"num_hidden_layers": 4, "tie_word_embeddings": False}
    config |= {"attention_bias": False, "mlp_bias": False, "intermediate_size": 64}
    folder = write_model(tmp_path / "m", model_type="llama", **config)
    flags = ["-m", folder, "-b", 2, "--max-steps", 2, "--eval-freq", 0]
    flags += ["--pipeline-parallel", 2, "--tensor-parallel", 2]
    run = trainer(*flags, processes=8, before=WATCH, **GRID)
    # Ranks 0, 1, 4 and 5 are one pipeline; 2, 3, 6 and 7 are the other
    samples = told(run, "samples ")
    one, other = samples[0], samples[2]
    assert samples == [one, one, other, other] * 2
    assert not {*one} & {*other}
    assert len({*one}) == 2 * 2 * 2  # steps, micro-batches, samples
    # Tensor-parallel ranks drop the same activations, and all others drop other ones.
    seeds = told(run, "seeds ")
    assert seeds[0::2] == seeds[1::2]
    assert len({seed for rank in seeds[0::2] for seed in rank}) == sum(map(len, seeds[0::2]))
    sizes = {name: x.numel() for name, x in tensors_of(run.folder / "final").items()}
    stages = [0, 0]
    for name, size in sizes.items():
        is_second = name.startswith(("model.layers.2", "model.layers.3", "lm_head", "model.norm"))
        # Norms are whole in a group
        stages[is_second] += size // 2 if "norm" in name else size // 4
    assert told(run, "held ") == [[str(stages[rank // 4])] for rank in range(8)]


SMALL = {"model_type": "llama"} | SIZE | {"num_hidden_layers": 4, "tie_word_embeddings": True}
GROUP = ["--pipeline-parallel", 1, "--tensor-parallel", 2]
# Ranks, flags, and a part of the sentence
REFUSED = {
    "kv heads": (3, ["--tensor-parallel", 3], "must divide the 2 kv heads"),
    "ranks": (3, GROUP, "times --tensor-parallel must divide the number of ranks, 3"),
    "layers": (2, ["--tensor-parallel", 1, "--layers-per-stage", 4], "2 stages cannot share 4"),
}


@pytest.mark.rest
@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_sentence(trainer, tmp_path, case):
    processes, flags, part = REFUSED[case]
    flags = ["-m", write_model(tmp_path / "m", **SMALL), *flags, "--max-steps", 1]
    result = trainer(*flags, processes=processes, status=1, **GRID)
    assert_one_sentence(result.run.ranks[0].output, part)


@pytest.mark.rest
def test_default_layout(trainer, tied):
    """The groups are the nodes, and all of them are one pipeline."""
    node = "import os; os.environ['LOCAL_WORLD_SIZE'] = '{}'"
    flags = ["-m", tied, "--max-steps", 1, "--eval-freq", 0]
    for ranks, layout in ((1, (4, 1)), (2, (2, 2))):
        options = {"processes": 4, "before": node.format(ranks)} | GRID
        run = trainer(*flags, name=f"layout-{ranks}", **options)
        flags_of_run = json.loads((run.folder / "parameters.json").read_text())
        assert (flags_of_run["pipeline_parallel"], flags_of_run["tensor_parallel"]) == layout
