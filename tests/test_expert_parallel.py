"""Chapter 12 trains what chapter 1 trains, with the experts of each layer on different ranks."""

import json
import re

import pytest
import torch
from helpers.assertions import assert_all_skip_update_3, assert_one_sentence, told, worst
from helpers.models import MIXTURES, write_model, write_weights
from helpers.runner import CHAPTER_1, CHAPTER_3, CHAPTER_12, load, patches
from helpers.trainer import Trainer, gradients_of, resume
from safetensors.torch import load_file, save_file

CHAPTER = CHAPTER_12


# -- The same training -----------------------------------------------------------------------------

# Ranks, and flags. Without --expert-parallel, all ranks are one group.
WHOLE = ["-b", 2, "--gradient-accumulation-steps", 4]  # the same micro-batches on one device
HALF = ["-b", 2, "--gradient-accumulation-steps", 2]


@pytest.fixture(scope="module")
def shared(tmp_path_factory, mixtral, dataset):
    """A trainer whose runs several tests use."""
    return Trainer(tmp_path_factory.mktemp("shared"), mixtral, dataset).of(CHAPTER)


STEPS = ["--max-steps", 5, "--lr", 1e-3, "--eval-freq", 0, "--max-grad-norm", 0]


@pytest.mark.rest
def test_clipping_over_both_meshes(shared):
    """All gradients get the same factor, which follows from the norm of all of them."""
    plain = {"name": "plain", "script": CHAPTER_1, "processes": 0}
    expected, _ = gradients_of(shared, *STEPS, *WHOLE, **plain)
    norm = sum(g.double().square().sum().item() for g in expected.values()) ** 0.5
    assert norm > 0.2
    split = ["-b", 2, "--expert-parallel", 2]
    flags = [*STEPS, *split, "--max-grad-norm", 0.1]
    found, run = gradients_of(shared, *flags, name="clipped", processes=4)
    assert run.column("grad_norm")[0] == pytest.approx(norm, rel=3e-5)
    error, name = worst({n: g * (0.1 / norm) for n, g in expected.items()}, found)
    assert error < 3e-5, name


@pytest.mark.rest
def test_ranks_without_tokens(trainer, train, tmp_path):
    """The router always chooses the experts of the first two ranks. The others wait, and go on."""
    folder = write_weights(tmp_path / "gpt_oss", "gpt_oss", MIXTURES)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith("router.bias"):
            tensor[:2] = 100
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    flags = ["-m", folder, *STEPS]
    expected, single = gradients_of(trainer, *flags, *WHOLE, name="single")
    found, run = gradients_of(train, *flags, "-b", 2, name="run", processes=4)
    assert not found["model.layers.0.mlp.experts.down_proj"][2:].any()
    assert found["model.layers.0.mlp.experts.down_proj"][:2].any()
    error, name = worst(expected, found)
    assert error < 1e-5, name
    assert run.column("loss") == pytest.approx(single.column("loss"), rel=1e-5)
    # Half of the experts, and half of the ranks, have all tokens.
    assert run.column("load/expert") == [2] * 5
    assert run.column("load/rank") == [2] * 5


# torchrun's variable for the devices of a node, which are a group by default
TWO_PER_NODE = "import os; os.environ['LOCAL_WORLD_SIZE'] = '2'\n"


@pytest.fixture(scope="module")
def watched(shared):
    """Three steps on two nodes with two ranks each: two groups of the experts."""
    flags = ["--max-steps", 3, "--eval-freq", 0, "-b", 2, "--no-from-scratch"]
    before = TWO_PER_NODE + patches("order_of_experts")
    return shared(*flags, name="watched", processes=4, before=before)


@pytest.mark.rest
def test_the_next_layer_is_gathered_before_the_wait(watched):
    """The root, layer 0, its experts, layer 1, its experts; only then the sizes of layer 0."""
    forward = ["gather"] * 5 + ["sizes", "sizes"]
    assert [order[:7] for order in told(watched, "order ")] == [forward] * 4


@pytest.mark.rest
def test_load_metrics(watched):
    """Those of each step alone, computed again from what the routers have chosen."""
    of_ranks = [json.loads("".join(words)) for words in told(watched, "chosen ")]
    for step in range(3):
        begin = step * 3  # two layers and the mark of a step
        experts, ranks = [], []
        for layer in range(2):
            tokens = torch.zeros(4, 4)  # of each rank, for each expert
            for rank in range(4):
                tokens[rank] = torch.tensor(of_ranks[rank][begin + layer]).bincount(minlength=4)
            of_experts = tokens.sum(0)
            # Ranks 0 and 1 are a group: rank 0 has the first half of the experts
            groups = torch.stack([tokens[:2].sum(0), tokens[2:].sum(0)])
            of_rank = groups.view(2, 2, 2).sum(2).flatten()
            experts.append((of_experts.max() / of_experts.mean()).item())
            ranks.append((of_rank.max() / of_rank.mean()).item())
        assert watched.records[step]["load/expert"] == pytest.approx(max(experts))
        assert watched.records[step]["load/rank"] == pytest.approx(max(ranks))


@pytest.mark.rest
def test_an_overflow_in_the_experts_of_one_rank(shared):
    """All ranks of all groups skip this step."""
    flags = ["--max-steps", 5, "--eval-freq", 0, "-b", 2, "--expert-parallel", 2]
    options = {"name": "overflow", "processes": 4, "status": 1}
    options |= {"before": patches("infinite_gradient"), "env": {"OF_MESH": "2"}}
    assert_all_skip_update_3(shared(*flags, **options))


# -- Checkpoints -----------------------------------------------------------------------------------


@pytest.mark.rest
def test_resume_on_other_groups_and_in_chapter_3(shared):
    """Two groups of two save. One group of two or four goes on, and chapter 3; and chapter 12
    goes on after chapter 3."""
    flags = ["--no-from-scratch", "--max-steps", 4, "--eval-freq", 4]
    flags += ["--ckpt-freq", 2, "--lr", 1e-3]
    two_groups = ["-b", 2, "--expert-parallel", 2]
    origin = shared(*flags, *two_groups, name="two-groups", processes=4)
    one_group = ["-b", 2, "--expert-parallel", 4]
    resume(origin, shared, 2, *flags, *one_group, name="one-of-4", near=4, processes=4)
    resume(origin, shared, 2, *flags, *HALF, name="one-of-2", near=4)
    chapter_3 = {"name": "chapter-3", "script": CHAPTER_3}
    resumed = resume(origin, shared, 2, *flags, *HALF, near=4, **chapter_3)
    resume(resumed, shared, 2, *flags, *two_groups, name="back", near=4, processes=4)


# -- What each rank holds, what is refused, and the demo -------------------------------------------


@pytest.mark.parametrize(("shape", "dimension"), [((4, 6, 9), 0), ((2, 6, 9), 1), ((2, 5, 7), 0)])
def test_even_shards(shape, dimension):
    """Three or four ranks of a column: none of them has nothing, if a dimension divides."""
    ranks = 4 if shape[0] == 4 else 3
    assert load(CHAPTER_12).even_shards(torch.Size(shape), ranks).dim == dimension


def test_refused_in_one_sentence(shared, model):
    """A dense model, and fp16. A group that does not divide the experts: test_bad_input.py"""
    flags = ["-m", model, "--max-steps", 1, "--expert-parallel", 3]
    result = shared(*flags, name="dense", processes=3, status=None)
    sentence = "--expert-parallel 3 must divide the ranks and experts of the model"
    assert_one_sentence(result.run.ranks[0].output, sentence)
    result = shared("--dtype", "fp16", name="fp16", processes=1, status=2)
    assert_one_sentence(result.run.ranks[0].output, "would miss infinite gradients of experts")


@pytest.mark.parametrize(("ranks", "group"), [(1, 1), (3, 1), (4, 4), (6, 2), (16, 8)])
def test_the_demo_on_any_number_of_ranks(monkeypatch, ranks, group):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    assert load(CHAPTER_12).DEMO["expert_parallel"] == group


@pytest.mark.rest
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_the_shares_of_the_router_keep_their_precision(trainer, tmp_path, family):
    """In bf16, the experts get the types that they get in chapter 3."""
    folder = write_model(tmp_path / "model", model_type=family, **MIXTURES[family])
    flags = ["-m", folder, "--max-steps", 1, "--eval-freq", 0, "--dtype", "bf16", "-b", 2]
    types = []
    for script in (CHAPTER_3, CHAPTER_12):
        options = {"script": script, "processes": 1, "before": patches("types_of_shares")}
        run = trainer(*flags, name=script.parent.name, **options)
        types.append(re.findall("^types (.*)", run.output, re.MULTILINE))
    assert types[0] == types[1]
    assert types[0]
