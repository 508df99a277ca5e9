"""Chapter 6 trains what chapter 1 trains, with every layer computed by a group of ranks."""

import re
import sys

import pytest
import torch
from conftest import AT_END, assert_same_losses, damaged, save_uneven_weights, write_model
from runner import CHAPTER_6, REPOSITORY, load
from test_equal import worst
from test_fsdp import OFF, told
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config

pytestmark = pytest.mark.rest

TP = {"script": CHAPTER_6}

SIZE = {"hidden_size": 36, "intermediate_size": 66, "num_hidden_layers": 2, "head_dim": 10}
SIZE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SIZE |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
BIASES = {"attention_bias": True, "mlp_bias": True}
# Shards differ in size: of 66 columns a rank has 33 in a group, which are 17 and 16 in two groups.
FAMILIES = {
    "llama": SIZE | BIASES | {"tie_word_embeddings": True},
    "qwen3": SIZE | {"tie_word_embeddings": False, "attention_bias": True},
}


def write_weights(folder, family: str, families=FAMILIES, **config):
    write_model(folder, model_type=family, **families[family] | config)
    return save_uneven_weights(folder)


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

def update(self, *args, **options):
    if not saved:
        (model,) = models
        gradients = {name: p.grad for name, p in model.named_parameters()}
        whole = {n: getattr(g, "full_tensor", lambda g=g: g)() for n, g in gradients.items()}
        saved.append(whole)
        if os.environ.get("RANK", "0") == "0":
            torch.save({n: g.clone() for n, g in whole.items()}, os.environ["GRADIENTS"])
    return original_update(self, *args, **options)

original_update = torch.optim.AdamW.step
torch.optim.AdamW.step = update
"""


def gradients_of(trainer, *flags, name, **options):
    """The gradients of the first step by name, and the run."""
    file = trainer.folder / f"gradients-{name}"
    options |= {"env": {"GRADIENTS": str(file)}, "before": GRADIENTS}
    result = trainer("--no-from-scratch", *flags, name=name, **options)
    return torch.load(file), result


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
    options = {"processes": 2, "script": script}
    found, run = gradients_of(trainer, *flags, name="neox", **options)
    error, name = worst(expected, found)
    print(f"gpt_neox: {error:.1e} ({name})")
    assert error < 1e-4, name
    assert_same_losses(single, run, 1, **OFF)


# Each rank tells at its end the shapes of its activations, and that the weights are still tied.
WATCH = """
import torch

shapes, models = set(), []

def to_empty(self, *, device, recurse=True):
    original_to_empty(self, device=device)
    models.append(self)
    for layer in self.model.layers:
        layer.register_forward_hook(lambda layer, inputs, y: shapes.add(tuple(y.shape)))
    self.lm_head.register_forward_hook(
        lambda head, inputs, y: shapes.add(tuple(y.to_local().shape)) and None
    )
    return self

original_to_empty = torch.nn.Module.to_empty
torch.nn.Module.to_empty = to_empty

def tell():
    assert models[0].lm_head.weight is models[0].model.embed_tokens.weight
    print("\\nroot", len(models[0]._get_fsdp_state()._fsdp_param_group.fsdp_params))
    print("shapes", *(f"{'x'.join(map(str, shape))}" for shape in sorted(shapes)))
"""
WATCH += AT_END


def test_activations_and_tied_weights(trainer, tmp_path):
    """The shares of weights, gradients and moments: test_layouts.py and test_estimate_memory.py"""
    folder = write_weights(tmp_path / "tied", "llama", num_hidden_layers=1)
    flags = ["-m", folder, "-b", 2, "--max-steps", 2, "--eval-freq", 0, "--tensor-parallel", 2]
    run = trainer(*flags, processes=4, before=WATCH, **TP)
    # FSDP gathers the tied weights once; the other tensor of the root is the last norm
    assert told(run, "root ") == [["2"]] * 4
    # Between layers a half of the tokens; a half of the vocabulary in the logits
    assert told(run, "shapes ") == [["2x16x36", "2x32x1024"]] * 4


# -- What would happen -----------------------------------------------------------------------------

# For test_first_difference.py: a script that does not tie them; both get the same first values
UNTIED = {"    model.tie_weights()\n": "    model.tie_weights = lambda **options: None\n"}


def test_a_parameter_that_the_plan_misses_is_named(trainer, tmp_path):
    script = damaged(CHAPTER_6, tmp_path, {"self_attn.[qk]_norm": "self_attn.[qk]norm"})
    folder = write_model(tmp_path / "m", model_type="qwen3", **FAMILIES["qwen3"])
    result = trainer("-m", folder, "--max-steps", 1, processes=1, script=script, status=None)
    assert result.status
    assert "error: not in the plan: ['model.layers.0.self_attn.q_norm" in result.output


# -- Wrong flags -----------------------------------------------------------------------------------


def said(script, check: str, ranks: int, flags: list, monkeypatch) -> str:
    """What one of so many ranks says before it ends; nothing, if flags and model are right."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, str(ranks))
    monkeypatch.setattr(sys, "argv", ["train-llm.py", *map(str, flags)])
    chapter = load(script)
    try:
        getattr(chapter, check)(chapter.parse_args())
    except SystemExit as end:
        return str(end)
    return ""


def assert_said(script, check: str, case: tuple, folder, monkeypatch) -> None:
    """A case has the number of ranks, the model, flags, and a part of the sentence, or nothing."""
    ranks, config, flags, part = case
    flags = ["-m", write_model(folder / "m", **config), "-s", 32, *flags]
    sentence = said(script, check, ranks, flags, monkeypatch)
    assert part in sentence
    assert bool(part) == bool(sentence)


LLAMA = SIZE | {"model_type": "llama"}
MISTRAL = SIZE | {"model_type": "mistral"}
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
