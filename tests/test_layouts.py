"""Layouts at scale: the chapters build models on one of 16, 64 or 512 ranks that do not exist.

A fake process group answers at once. Parameters stay on the meta device, so sizes cost nothing.
"""

import math
import os
import sys
from functools import lru_cache
from unittest import mock

import pytest
import torch
from helpers.runner import CHAPTERS_BY_NUMBER, REPOSITORY, load
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig

SHAPE = {"num_hidden_layers": 8, "max_position_embeddings": 8192, "tie_word_embeddings": False}
DENSE = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336} | SHAPE
DENSE |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
MIXTURE = DENSE | {"model_type": "mixtral", "num_local_experts": 8, "vocab_size": 32000}
# Neither the vocabulary nor the hidden size can be divided by 16.
ODD = DENSE | {"hidden_size": 2184, "intermediate_size": 5000, "vocab_size": 50257}
ODD |= {"num_attention_heads": 24, "num_key_value_heads": 24, "head_dim": 96}
MODELS = {"dense": DENSE, "mixture": MIXTURE, "odd": ODD}


def build(number: str, model: str, ranks: int, rank: int, flags: list, layers_per_stage=None):
    """The parameters of a rank of a chapter. By default, a pipeline has the stages of chapter 7."""
    local = {"LOCAL_RANK": rank % 8, "LOCAL_WORLD_SIZE": 8}
    env = {"RANK": rank, "WORLD_SIZE": ranks} | local
    command = ["train-llm.py", "--from-scratch", "--dtype", "bf16", "-s", 1024, *flags]
    with (
        mock.patch.dict(os.environ, {name: str(value) for name, value in env.items()}),
        mock.patch.object(sys, "argv", [str(part) for part in command]),
    ):
        chapter = load(CHAPTERS_BY_NUMBER[number])
        args = chapter.parse_args()
    args.compile = False
    if layers_per_stage and number in ("07", "13"):
        args.layers_per_stage = ",".join(map(str, layers_per_stage))
    chapter.say = lambda message: None
    chapter.compute_buffers = lambda *args: None
    chapter.send_weights = lambda *args: None
    config = AutoConfig.for_model(**MODELS[model])

    def to_empty(module, device):
        """Leaves the parameters on the meta device. The buffers, which are small, get memory."""
        for part in module.modules():
            for name, buffer in part.named_buffers(recurse=False):
                part.register_buffer(name, torch.zeros(buffer.shape, dtype=buffer.dtype))
        return module

    if dist.is_initialized():  # of another rank
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    with (
        mock.patch.object(torch.nn.Module, "to_empty", to_empty),
        mock.patch.object(chapter.AutoConfig, "from_pretrained", return_value=config),
        mock.patch.dict(AttentionInterface._global_mapping),  # chapter 11 changes both
        mock.patch.dict(AttentionMaskInterface._global_mapping),
    ):
        if number in ("07", "13"):
            args.layers_per_stage = chapter.split_layers(args)
        built = chapter.build_model(args, torch.device("cpu"), checkpoint=None)
    if isinstance(built, tuple):  # a pipeline: its model forgets the layers without memory
        _, stages, _ = built
        built = torch.nn.ModuleList(stage.submod for stage in stages)
    weights = dict(built.named_parameters())
    assert weights
    return weights


@pytest.fixture(autouse=True)
def no_process_group():
    """After a test. A mesh needs the group in which it was made."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def local(weights) -> int:
    parts = [w.to_local() if isinstance(w, DTensor) else w for w in weights.values()]
    return sum(part.numel() for part in parts)


def whole(weights) -> int:
    return sum(weight.numel() for weight in weights.values())


def ranks_of_other_sizes(weights) -> set[int]:
    """All ranks have the shapes of one of these ranks.

    Shards of FSDP are equal up to the first one that is smaller; all behind it are empty.
    """
    found = set()
    for weight in weights.values():
        mesh = weight.device_mesh
        found |= {mesh.mesh.flatten()[0].item(), mesh.mesh.flatten()[-1].item()}
        for axis, placement in enumerate(weight.placements):
            if placement.is_replicate():
                continue
            size = weight.shape[placement.dim]
            for other, inner in enumerate(weight.placements):  # of tensor or expert parallelism
                if other > axis and inner.is_shard(placement.dim):
                    size //= mesh.size(other)
            first_smaller = size // math.ceil(size / mesh.size(axis))
            for coordinate in {first_smaller, first_smaller + 1} & {*range(mesh.size(axis))}:
                place = [0] * mesh.ndim
                place[axis] = coordinate
                found.add(mesh.mesh[tuple(place)].item())
    return found


# The chapter, its flags, how many ranks split a weight, how many stages a pipeline has, and the
# name of this layout in the estimator
GRID = ["--pipeline-parallel", 2, "--tensor-parallel", 8]
LAYOUTS = {
    "FSDP": ("03", [], lambda ranks: ranks, 1, "FSDP"),
    "HSDP": ("05", ["--shard-size", 16], lambda ranks: 16, 1, "HSDP"),
    "tensor": ("06", ["--tensor-parallel", 8], lambda ranks: ranks, 1, "tensor parallel"),
    "pipeline": ("07", ["--pipeline-parallel", 4], lambda ranks: ranks // 4, 4, "pipeline"),
    "context": ("11", ["--context-parallel", 8], lambda ranks: ranks, 1, "context parallel"),
    "experts": ("12", ["--expert-parallel", 4], lambda ranks: ranks, 1, "expert parallel"),
    "3D": ("13", GRID, lambda ranks: ranks // 2, 2, "pipeline × tensor"),
}
FITS = {
    "dense": set(LAYOUTS) - {"experts"},
    "mixture": {"experts"},  # in the others, few ranks hold the experts
    "odd": set(LAYOUTS) - {"experts", "tensor", "3D"},
}
# The share of the emptiest rank, where it is not within 5 % of the even one. The first shards round
# up, so the last ranks may have none. Of 512 ranks, 437 share 2,184 rows.
# Memory has to suffice for the fullest rank, and no rank is much fuller than the even share.
EMPTIEST = {("FSDP", "odd"): 0.0, ("context", "odd"): 0.0, ("pipeline", "odd"): 0.285}
CASES = []
for model, ranks in {"dense": 64, "mixture": 64, "odd": 512}.items():
    marks = pytest.mark.rest if model == "odd" else ()
    CASES += [pytest.param(layout, model, ranks, marks=marks) for layout in sorted(FITS[model])]


@pytest.mark.parametrize(("layout", "model", "ranks"), CASES)
def test_each_rank_holds_its_share(layout, model, ranks):
    """Of its stage of a pipeline. No rank holds 10 % more, and few ranks hold less."""
    number, flags, split, stages, _ = LAYOUTS[layout]
    count = split(ranks)
    sizes = [8 // stages] * stages  # equal stages
    fullness = {}
    for first in range(0, ranks, ranks // stages):  # the first rank of each stage
        weights = build(number, model, ranks, first, flags, sizes)
        for name, weight in weights.items():
            # The smaller ones, such as the router of 8 experts, are cut by rows in any case.
            divides = weight.numel() > 1e6 and any(size % count == 0 for size in weight.shape)
            assert not divides or weight.to_local().numel() <= 1.1 * weight.numel() / count, name
        fullness[first] = local(weights) * count / whole(weights)
        for rank in ranks_of_other_sizes(weights) - {first}:
            held = local(build(number, model, ranks, rank, flags, sizes))
            fullness[rank] = held * count / whole(weights)
    assert max(fullness.values()) <= 1.1, fullness
    least = EMPTIEST.get((layout, model), 1)
    assert min(fullness.values()) == pytest.approx(least, abs=0.05), fullness


@lru_cache
def estimator():
    return load(REPOSITORY / "tools" / "estimate-memory.py")


@pytest.mark.parametrize(("layout", "model", "ranks"), CASES)
def test_the_estimator_counts_what_the_chapter_builds(layout, model, ranks):
    """Bytes of weights and moments of the fullest rank, without a trace of its activations."""
    number, flags, _, stages, method = LAYOUTS[layout]
    firsts = range(0, ranks, ranks // stages)
    built = [build(number, model, ranks, rank, flags) for rank in firsts]
    fullest = max(map(local, built))
    tool = estimator()
    config = AutoConfig.for_model(**MODELS[model])
    args = tool.parse_args([str(flag) for flag in ("--no-compile", "-b", 1, *flags)])
    dist.destroy_process_group()  # the estimator makes its own
    with mock.patch.object(tool.Traces, "__call__", return_value={}):
        states, _ = tool.step(tool.Traces(config, args), tool.METHODS[method], ranks, 1)
    assert states["weights"] == 4 * fullest
    tensors = max(len(weights) for weights in built)
    assert 8 * fullest < states["moments"] <= 8 * fullest + 4 * tensors
