"""Chapter 6 trains what chapter 1 trains, with every layer computed by a group of ranks."""

import re
import sys
from argparse import ArgumentError

import pytest
import torch
from conftest import assert_same_losses, damaged, write_model
from runner import CHAPTER_6, REPOSITORY, load
from safetensors.torch import load_file
from test_fsdp import OFF, SCALER, told
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = pytest.mark.rest

TP = {"script": CHAPTER_6}

# Put before a script: rank 0 saves the whole gradients of the first step, before they are clipped.
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

def clip(parameters, max_norm):
    if not saved:
        (model,) = models
        gradients = {name: p.grad for name, p in model.named_parameters()}
        whole = {n: getattr(g, "full_tensor", lambda g=g: g)() for n, g in gradients.items()}
        saved.append(whole)
        if os.environ.get("RANK", "0") == "0":
            torch.save({n: g.clone() for n, g in whole.items()}, os.environ["GRADIENTS"])
    return original_clip(parameters, max_norm)

original_clip = torch.nn.utils.clip_grad_norm_
torch.nn.utils.clip_grad_norm_ = clip
"""

SIZE = {"hidden_size": 36, "intermediate_size": 66, "num_hidden_layers": 2, "head_dim": 10}
SIZE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SIZE |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
BIASES = {"attention_bias": True, "mlp_bias": True}
# Shards differ in size: of 66 columns a rank has 33 in a group, which are 17 and 16 in two groups.
FAMILIES = {
    "llama": SIZE | BIASES | {"tie_word_embeddings": True},
    "mistral": SIZE | {"tie_word_embeddings": False, "sliding_window": 32},
    "qwen2": SIZE | {"tie_word_embeddings": True, "hidden_size": 40},
    "qwen3": SIZE | {"tie_word_embeddings": False, "attention_bias": True},
    # Without positions, the gradient of a bias of k would be zero.
    "smollm3": SIZE | {"tie_word_embeddings": True, "mlp_bias": True, "no_rope_layers": [1, 0]},
}


def write_weights(folder, family: str, families=FAMILIES, **config):
    """A model's folder with weights, in which no norm is one and no bias is zero."""
    write_model(folder, model_type=family, **families[family] | config)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
            elif parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def gradients(trainer):
    """Runs one step; returns the gradients by name, and the run."""

    def run(*flags, name, **options):
        file = trainer.folder / f"gradients-{name}"
        flags = ["--no-from-scratch", "--max-steps", 1, "--eval-freq", 1, *flags]
        before = options.pop("before", "") + GRADIENTS
        options |= {"env": {"GRADIENTS": str(file)}, "before": before}
        result = trainer(*flags, name=name, **options)
        assert file.exists(), result.output
        return torch.load(file), result

    return run


def worst(expected: dict, found: dict) -> tuple[float, str]:
    """The largest relative error of the gradient of a parameter, and its name."""
    assert expected.keys() == found.keys()
    assert all(g.norm() > 0 for g in expected.values())
    errors = {n: ((found[n] - g).norm() / g.norm()).item() for n, g in expected.items()}
    return max((error, name) for name, error in errors.items())


# -- The same training -----------------------------------------------------------------------------


NEOX = {"hidden_size": 40, "intermediate_size": 66, "num_hidden_layers": 2}
NEOX |= {"num_attention_heads": 4, "max_position_embeddings": 64, "eos_token_id": 0}
NEOX |= {"use_parallel_residual": False, "tie_word_embeddings": True}


def test_the_family_that_the_page_adds(gradients, tmp_path):
    """The plan of docs/other-models.md, in a copy of this chapter; and with a wrong name in it."""
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
    expected, single = gradients("-m", folder, "-b", 4, name="single")
    options = {"processes": 2, "script": script}
    found, run = gradients("-m", folder, "-b", 4, name="neox", **options)
    error, name = worst(expected, found)
    print(f"gpt_neox: {error:.1e} ({name})")
    assert error < 1e-4, name
    assert_same_losses(single, run, 1, **OFF)


def test_gradients_of_compiled_layers(gradients, tmp_path):
    """With and without checkpointing. The second run finds what the first has cached."""
    folder = write_weights(tmp_path / "llama", "llama")
    expected, single = gradients("-m", folder, "-b", 4, name="single")
    cache = f"import os; os.environ['TORCHINDUCTOR_CACHE_DIR'] = {str(tmp_path)!r}\n"
    cases = (["--eval-freq", 0], ["--activation-checkpointing"])  # evaluating compiles again: once
    for number, flags in enumerate(cases):
        options = {"name": f"run-{number}", "processes": 2, "before": cache} | TP
        found, run = gradients("-m", folder, "-b", 4, "--compile", *flags, **options)
        error, name = worst(expected, found)
        print(f"{' '.join(map(str, flags))}: {error:.1e} ({name})")
        assert error < 1e-4, (flags, name)
        assert run.column("loss") == pytest.approx(single.column("loss"), rel=1e-5)
    assert_same_losses(single, run, 1, **OFF)


# Each rank tells at its end what it holds, and the shapes of its activations.
WATCH = """
import torch
import torch.distributed as dist

shapes, held, models = set(), {}, []

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

def step(self, *args, **options):
    result = original_step(self, *args, **options)
    for name, parameter in models[0].named_parameters():
        state = self.state[parameter]
        tensors = [parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]]
        assert len({tensor.to_local().numel() for tensor in tensors}) == 1
        held[name] = tensors[0].to_local().numel()
    return result

original_step = torch.optim.AdamW.step
torch.optim.AdamW.step = step

def tell():
    assert models[0].lm_head.weight is models[0].model.embed_tokens.weight
    group = models[0]._get_fsdp_state()._fsdp_param_group
    print("\\nroot", len(group.fsdp_params))
    print("shapes", *(f"{'x'.join(map(str, shape))}" for shape in sorted(shapes)))
    print("held", *(f"{name}={size}" for name, size in held.items()))
    destroy()

destroy = dist.destroy_process_group
dist.destroy_process_group = tell
"""


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return write_weights(tmp_path_factory.mktemp("models") / "tied", "llama", num_hidden_layers=1)


def test_each_rank_holds_its_part_of_everything(trainer, tied):
    flags = ["-m", tied, "-b", 2, "--max-steps", 2, "--eval-freq", 0, "--tensor-parallel", 2]
    run = trainer(*flags, processes=4, before=WATCH, **TP)
    # FSDP gathers the tied weights once; the other tensor of the root is the last norm
    assert told(run, "root ") == [["2"]] * 4
    # Between layers a half of the tokens; a half of the vocabulary in the logits
    assert told(run, "shapes ") == [["2x16x36", "2x32x1024"]] * 4
    sizes = {n: x.numel() for n, x in load_file(run.folder / "final" / "model.safetensors").items()}
    held = [dict(pair.split("=") for pair in rank) for rank in told(run, "held ")]
    for name, size in sizes.items():
        parts = [int(rank[name]) for rank in held]
        # Norms, and biases of sums, are whole in each group
        whole = "norm" in name or re.search(r"(o|down)_proj.bias", name)
        assert sum(parts) == size * (2 if whole else 1), name
        assert max(parts) <= -(-size // (2 if whole else 4)) + 36, name


def test_compute_precision(trainer, tied):
    """In bf16 nearly the same losses; with a scaler, all ranks skip a step that one must skip."""
    flags = ["-m", tied, "--no-from-scratch", "--max-steps", 3, "--eval-freq", 3]
    single = trainer(*flags, "--dtype", "bf16", name="single")
    run = trainer(*flags, "--dtype", "bf16", name="bf16", processes=2, **TP)
    assert run.column("loss") == pytest.approx(single.column("loss"), rel=2e-3)
    assert run.column("eval/loss") == pytest.approx(single.column("eval/loss"), rel=2e-3)
    flags = ["--max-steps", 3, "--eval-freq", 0, "--max-grad-norm", 0, "--tensor-parallel", 2]
    options = {"processes": 4, "before": SCALER, "status": None, **TP}
    scaled = trainer(*flags, name="scaled", **options)
    for rank in scaled.run.ranks:
        scales = re.findall(r"^scale (\d) (.*)$", rank.output, re.MULTILINE)
        assert scales == [("1", "65536.0"), ("2", "65536.0"), ("3", "32768.0")], scaled.output


# -- What would happen -----------------------------------------------------------------------------

# As in a script that does not tie them; both get the same first values
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
    except (SystemExit, ArgumentError) as end:
        return str(end)
    return ""


LLAMA = SIZE | {"model_type": "llama"}
MISTRAL = SIZE | {"model_type": "mistral"}
# Ranks, the model, flags, and a part of the sentence
CHECKED = {
    "all is well": (2, LLAMA, [], ""),
    "ranks": (3, LLAMA, ["--tensor-parallel", 2], "must divide the number of ranks, 3"),
    "kv heads": (4, LLAMA, [], "error: --tensor-parallel must divide the 2 kv heads"),
    "a window": (2, MISTRAL | {"sliding_window": 31}, [], "above the sliding window, 31"),
    "a short sample": (2, MISTRAL | {"sliding_window": 32}, [], ""),
    "a family": (1, {"model_type": "gpt2"}, [], "error: gpt2 is none of llama"),
}


@pytest.mark.parametrize("case", CHECKED)
def test_what_is_refused(tmp_path, monkeypatch, case):
    ranks, config, flags, part = CHECKED[case]
    flags = ["-m", write_model(tmp_path / "m", **config), "-s", 32, *flags]
    sentence = said(CHAPTER_6, "check_plan", ranks, flags, monkeypatch)
    assert part in sentence
    assert bool(part) == bool(sentence)
