"""Chapter 12 trains what chapter 1 trains, with the experts of each layer on different ranks."""

import json
import re

import pytest
import torch
from conftest import (
    Trainer,
    assert_one_sentence,
    assert_same_losses,
    damaged,
    exact,
    take_over,
    write_model,
)
from runner import CHAPTER_3, CHAPTER_12
from test_fsdp import OFF, SCALER, assert_same_folder, told
from test_tensor_parallel import worst, write_weights

EP = {"script": CHAPTER_12}

# Put before a script: rank 0 saves the whole gradients of the first step, just before the update.
GRADIENTS = """
import os
import torch

models, saved = [], []

def train(self, mode=True):
    if hasattr(self, "lm_head"):
        models[:] = [self]
    return original_train(self, mode)

original_train = torch.nn.Module.train
torch.nn.Module.train = train

def step(self, *args, **options):
    if not saved:
        (model,) = models
        gradients = {name: p.grad for name, p in model.named_parameters()}
        whole = {n: getattr(g, "full_tensor", lambda g=g: g)() for n, g in gradients.items()}
        saved.append(whole)
        if os.environ.get("RANK", "0") == "0":
            torch.save({n: g.clone() for n, g in whole.items()}, os.environ["GRADIENTS"])
    return original_step(self, *args, **options)

original_step = torch.optim.AdamW.step
torch.optim.AdamW.step = step
"""

SIZE = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 16}
SIZE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
SIZE |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "num_experts_per_tok": 2}
SMALL = SIZE | {"moe_intermediate_size": 24, "tie_word_embeddings": False}
FAMILIES = {
    "mixtral": SIZE | {"num_local_experts": 4, "tie_word_embeddings": True},
    # Of 6 experts, a group of two has 3 on each rank. Two such groups split the 3 unevenly.
    "qwen3_moe": SMALL | {"num_experts": 6, "mlp_only_layers": [0], "norm_topk_prob": True},
    "olmoe": SIZE | {"num_experts": 8, "tie_word_embeddings": False},
    "deepseek_v3": SMALL
    | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    | {"num_key_value_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8}
    | {"qk_nope_head_dim": 8, "v_head_dim": 16, "head_dim": 8},
    "gpt_oss": SIZE | {"num_local_experts": 4, "tie_word_embeddings": False},
    "qwen3_5_moe": {"vision_config": {"depth": 1, "hidden_size": 32}, "tie_word_embeddings": False}
    | {
        "text_config": SMALL
        | {"num_experts": 4, "vocab_size": 2048, "shared_expert_intermediate_size": 24}
        | {"layer_types": ["linear_attention", "full_attention"]}
        | {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
        | {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    },
}


def folder_of(parent, family: str):
    """A model's folder with weights, and with the nested config if the family has one."""
    folder = write_weights(parent / family, family, FAMILIES)
    if "text_config" in FAMILIES[family]:
        config = FAMILIES[family] | {"model_type": family, "architectures": ["Any"]}
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def gradients_of(trainer, *flags, name, before="", status=0, **options):
    """The gradients of the first step by name, and the run."""
    file = trainer.folder / f"gradients-{name}"
    options |= {"env": {"GRADIENTS": str(file)}, "before": before + GRADIENTS}
    result = trainer("--no-from-scratch", *flags, name=name, status=status, **options)
    return torch.load(file), result


# -- The same training -----------------------------------------------------------------------------

# Ranks, and flags. Without --expert-parallel, all ranks are one group.
WHOLE = ["-b", 2, "--gradient-accumulation-steps", 4]  # the same micro-batches on one device
HALF = ["-b", 2, "--gradient-accumulation-steps", 2]
ONE_STEP = ["--max-steps", 1, "--lr", 0, "--eval-freq", 1, "--max-grad-norm", 0]
CASES = {
    "mixtral": [
        (2, [*HALF, "--no-reshard-after-forward"]),
        (4, ["-b", 2, "--cpu-offload"]),
        (4, ["-b", 2, "--expert-parallel", 2, "--activation-checkpointing"]),
    ],
    "qwen3_moe": [(4, ["-b", 2, "--expert-parallel", 2])],
    "olmoe": [(2, [*HALF, "--activation-checkpointing"])],
    "deepseek_v3": [(4, ["-b", 2, "--expert-parallel", 2, "--activation-checkpointing"])],
    "gpt_oss": [(2, [*HALF, "--cpu-offload"])],
    "qwen3_5_moe": [(2, HALF)],
}


@pytest.mark.rest
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_each_family(trainer, tmp_path, family):
    """Of every parameter. And final/ is that of chapter 1, to the last bit."""
    flags = ["-m", folder_of(tmp_path, family), *ONE_STEP]
    expected, single = gradients_of(trainer, *flags, *WHOLE, name="single")
    for number, (processes, split) in enumerate(CASES[family]):
        options = {"name": f"run-{number}", "processes": processes} | EP
        found, run = gradients_of(trainer, *flags, *split, **options)
        error, name = worst(expected, found)
        print(f"{family}, {processes} ranks, {split[2:]}: {error:.1e} ({name})")
        assert error < 1e-5, name
        assert_same_losses(single, run, 1, **OFF)
        assert_same_folder(single.folder / "final", run.folder / "final")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("models"), "mixtral")


@pytest.fixture(scope="module")
def shared(tmp_path_factory, mixtral, dataset):
    """A trainer whose runs several tests use."""
    return Trainer(tmp_path_factory.mktemp("shared"), mixtral, dataset)


@pytest.fixture(scope="module")
def plain(shared):
    """One step of chapter 1: its gradients, and the run."""
    return gradients_of(shared, *ONE_STEP, *WHOLE, name="plain")


LAYOUTS = {"one copy": (2, HALF), "two copies": (4, ["-b", 2, "--expert-parallel", 2])}


@pytest.mark.rest
@pytest.mark.parametrize("layout", LAYOUTS)
def test_clipping_over_both_meshes(shared, plain, layout):
    """All gradients get the same factor, which follows from the norm of all of them."""
    expected, _ = plain
    norm = sum(g.double().square().sum().item() for g in expected.values()) ** 0.5
    assert norm > 0.2
    processes, split = LAYOUTS[layout]
    options = {"name": f"clipped-{processes}", "processes": processes} | EP
    found, run = gradients_of(shared, *ONE_STEP, *split, "--max-grad-norm", 0.1, **options)
    assert run.column("grad_norm") == pytest.approx([norm], rel=3e-5)
    error, name = worst({n: g * (0.1 / norm) for n, g in expected.items()}, found)
    print(f"{layout}: {error:.1e} ({name})")
    assert error < 3e-5, name


