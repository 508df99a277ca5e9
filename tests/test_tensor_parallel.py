"""Chapter 6 trains what chapter 1 trains, with every layer computed by a group of ranks."""

import re

import pytest
import torch
from helpers.assertions import OFF, assert_said, assert_same_losses, told, worst
from helpers.chapters import damaged
from helpers.models import (
    UNEVEN_MODELS,
    UNEVEN_SIZE,
    write_model,
    write_weights,
)
from helpers.runner import CHAPTER_6, REPOSITORY, patches
from helpers.trainer import gradients_of
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config

pytestmark = pytest.mark.rest

CHAPTER = CHAPTER_6


# -- The same training -----------------------------------------------------------------------------


NEOX = {"hidden_size": 40, "intermediate_size": 66, "num_hidden_layers": 2}
NEOX |= {"num_attention_heads": 4, "max_position_embeddings": 64, "eos_token_id": 0}
NEOX |= {"use_parallel_residual": False, "tie_word_embeddings": True}


def test_the_family_that_the_page_adds(trainer, tmp_path):
    """The plan of docs/other-models.md, in a copy of this chapter."""
    page = (REPOSITORY / "docs" / "other-models.md").read_text()
    (plan,) = re.findall(r"```python\n(NEOX = .*?)```", page, re.DOTALL)
    kv_heads = 'getattr(config, "num_key_value_heads", config.num_attention_heads)'
    assert f"`{kv_heads}`" in page
    changes = {
        "config.num_key_value_heads": kv_heads,
        "\n\ndef build_model(": f"\n{plan}\n\ndef build_model(",
    }
    script = damaged(CHAPTER_6, tmp_path, changes)
    folder = write_weights(tmp_path / "neox", "gpt_neox", {"gpt_neox": NEOX})
    flags = ["-m", folder, "-b", 4, "--max-steps", 1, "--eval-freq", 1]
    expected, single = gradients_of(trainer, *flags, name="single")
    found, run = gradients_of(trainer.of(script), *flags, name="neox")
    error, name = worst(expected, found)
    print(f"gpt_neox: {error:.1e} ({name})")
    assert error < 1e-4, name
    assert_same_losses(single, run, 1, **OFF)


def test_activations_and_tied_weights(train, tmp_path):
    """The shares of weights, gradients and moments: test_layouts.py and test_estimate_memory.py"""
    folder = write_weights(tmp_path / "tied", "llama", UNEVEN_MODELS, num_hidden_layers=1)
    flags = ["-m", folder, "-b", 2, "--max-steps", 2, "--eval-freq", 0, "--tensor-parallel", 2]
    run = train(*flags, processes=4, before=patches("shapes_and_ties"))
    # FSDP gathers the tied weights once; the other tensor of the root is the last norm
    assert told(run, "root ") == [["2"]] * 4
    # Between layers a half of the tokens; a half of the vocabulary in the logits
    assert told(run, "shapes ") == [["2x16x36", "2x32x1024"]] * 4


# -- What would happen -----------------------------------------------------------------------------


def test_a_parameter_that_the_plan_misses_is_named(trainer, tmp_path):
    script = damaged(CHAPTER_6, tmp_path, {"self_attn.[qk]_norm": "self_attn.[qk]norm"})
    folder = write_model(tmp_path / "m", model_type="qwen3", **UNEVEN_MODELS["qwen3"])
    result = trainer("-m", folder, "--max-steps", 1, processes=1, script=script, status=None)
    assert result.status
    assert "error: not in the plan: ['model.layers.0.self_attn.q_norm" in result.output


# -- Wrong flags -----------------------------------------------------------------------------------


LLAMA = UNEVEN_SIZE | {"model_type": "llama"}
MISTRAL = UNEVEN_SIZE | {"model_type": "mistral"}
CHECKED = {
    "all is well": (2, LLAMA, [], ""),
    "kv heads": (4, LLAMA, [], "error: --tensor-parallel must divide the 2 kv heads"),
    "a window": (2, MISTRAL | {"sliding_window": 31}, [], "above the sliding window, 31"),
    "a short sample": (2, MISTRAL | {"sliding_window": 32}, [], ""),
    "a family": (1, {"model_type": "opt"}, [], "error: opt is none of llama"),
}


def test_the_llama_of_gpt2s_size():
    config = AutoConfig.from_pretrained(REPOSITORY / "models" / "llama-124m")
    with torch.device("meta"):
        models = [AutoModelForCausalLM.from_config(each) for each in (config, GPT2Config())]
    llama, gpt2 = (model.num_parameters() for model in models)
    assert llama == pytest.approx(gpt2, rel=0.01)


@pytest.mark.parametrize("case", CHECKED)
def test_what_is_refused(tmp_path, monkeypatch, case):
    assert_said(CHAPTER_6, "check_plan", CHECKED[case], tmp_path, monkeypatch)
