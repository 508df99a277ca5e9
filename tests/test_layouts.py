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
from runner import CHAPTERS_BY_NUMBER, REPOSITORY, load
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
)

SHAPE = {"num_hidden_layers": 8, "max_position_embeddings": 8192, "tie_word_embeddings": False}
DENSE = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336} | SHAPE
DENSE |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
MIXTURE = DENSE | {"model_type": "mixtral", "num_local_experts": 8, "vocab_size": 32000}
# Neither the vocabulary nor the hidden size can be divided by 16.
ODD = DENSE | {"hidden_size": 2184, "intermediate_size": 5000, "vocab_size": 50257}
ODD |= {"num_attention_heads": 24, "num_key_value_heads": 24, "head_dim": 96}
MODELS = {"dense": DENSE, "mixture": MIXTURE, "odd": ODD}


def build(number: str, model: str, ranks: int, rank: int, flags: list):
    """The parameters of a rank of a chapter."""
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
    chapter.say = lambda message: None
    chapter.init_weights = lambda model, draw: None
    config = AutoConfig.for_model(**MODELS[model])
    if number in ("07", "13"):
        cut_layers(chapter, config, args)

    def to_empty(module, device):
        """Leaves the parameters on the meta device. The buffers, which are small, get memory."""
        for part in module.modules():
            for name, buffer in part.named_buffers(recurse=False):
                part.register_buffer(name, torch.zeros(buffer.shape, dtype=buffer.dtype))
        return module

    if dist.is_initialized():  # by the estimator, in another test
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        with (
            mock.patch.object(torch.nn.Module, "to_empty", to_empty),
            mock.patch.dict(AttentionInterface._global_mapping),  # chapter 11 changes both
            mock.patch.dict(AttentionMaskInterface._global_mapping),
        ):
            built = chapter.build_model(args, config, torch.device("cpu"), None)
        whole = built[0] if isinstance(built, tuple) else built  # pipelines also return stages
        return dict(whole.named_parameters())
    finally:
        dist.destroy_process_group()


def cut_layers(chapter, config, args) -> None:
    """As many layers in each stage, because these tests compare the ranks of one stage."""
    count = args.pipeline_parallel * args.stages_per_rank
    args.layers_per_stage = [config.num_hidden_layers // count] * count


def local(weights) -> int:
    parts = [w.to_local() if isinstance(w, DTensor) else w for w in weights.values()]
    return sum(part.numel() for part in parts)


def whole(weights) -> int:
    return sum(weight.numel() for weight in weights.values())


# The chapter, its flags, and how many copies of the weights that a rank has parts of there are
LAYOUTS = {
    "FSDP": ("03", [], lambda ranks: 1),
    "HSDP": ("05", ["--shard-size", 16], lambda ranks: ranks // 16),
    "tensor": ("06", ["--tensor-parallel", 8], lambda ranks: 1),
    "pipeline": ("07", ["--pipeline-parallel", 4], lambda ranks: 4),
    "context": ("11", ["--context-parallel", 8], lambda ranks: 1),
    "experts on 8": ("12", ["--expert-parallel", 8], lambda ranks: 1),
    "experts on 4": ("12", ["--expert-parallel", 4], lambda ranks: 1),
    "3D": ("13", ["--pipeline-parallel", 2, "--tensor-parallel", 8], lambda ranks: 2),
}
FITS = {
    "dense": set(LAYOUTS) - {"experts on 8", "experts on 4"},
    "mixture": {"FSDP", "HSDP", "context", "experts on 8", "experts on 4"},
    "odd": {"FSDP", "HSDP", "context", "pipeline"},
}
CASES = []
for ranks in (16, 64, 512):
    for model, layouts in FITS.items():
        marks = pytest.mark.rest if ranks == 512 or model == "odd" else ()
        CASES += [pytest.param(layout, model, ranks, marks=marks) for layout in sorted(layouts)]


@pytest.mark.parametrize(("layout", "model", "ranks"), CASES)
def test_no_rank_holds_much_more_than_its_share(layout, model, ranks):
    """Some hold less: 128,256 rows are 250.5 for each of 512 ranks, so the last have fewer."""
    number, flags, copies = LAYOUTS[layout]
    for rank in (0, ranks // 2, ranks - 1):
        weights = build(number, model, ranks, rank, flags)
        share = whole(weights) * copies(ranks) / ranks
        assert local(weights) <= 1.1 * share, rank


def test_a_wide_router_and_a_norm_stay_as_they_are():
    """Rows are cut wherever they are many enough, so only small first dimensions give way."""
    even_shards = load(CHAPTERS_BY_NUMBER["03"]).even_shards
    for shape, ranks, dimension in [
        ((4096, 4096), 64, 0),
        ((4096,), 64, 0),
        ((8, 28672, 4096), 64, 1),
        ((8, 4096), 64, 1),
        ((8, 28672, 4096), 8, 0),
        ((12, 100, 640), 64, 2),
        ((3,), 64, 0),  # there is no other dimension
        ((50257, 2184), 64, 0),
    ]:
        assert even_shards(shape, ranks).dim == dimension, shape


def test_shards_that_cannot_be_even_are_announced(capsys):
    chapter = load(CHAPTERS_BY_NUMBER["03"])
    said = []
    chapter.say = said.append
    for _ in range(2):  # once per shape
        assert chapter.even_shards((8, 27, 27), 64).dim == 0
    assert said == ["No dimension of (8, 27, 27) divides by 64 ranks, so shards differ in size"]


@lru_cache
def estimator():
    return load(REPOSITORY / "tools" / "estimate-memory.py")


@pytest.mark.parametrize("ranks", [16, 64])
@pytest.mark.parametrize("model", ["dense", "mixture"])
def test_the_estimator_counts_what_the_chapter_builds(model, ranks):
    weights = build("03", model, ranks, 0, [])
    shapes = [tuple(weight.shape) for weight in weights.values()]
    assert estimator().numel(shapes, ranks) == local(weights)
    with torch.device("meta"):
        dense = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[model]))
    assert whole(weights) == sum(parameter.numel() for parameter in dense.parameters())
    assert math.isclose(local(weights) * ranks, whole(weights), rel_tol=0.01)
