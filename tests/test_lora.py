"""Chapter 17 trains what PEFT trains in one process, and keeps no more than A and B need."""

import json
import re

import peft
import pytest
import torch
from conftest import assert_one_sentence, exact, take_over
from runner import CHAPTER_17, load
from safetensors.torch import load_file
from test_chat import BATCH, SIZE, assert_equal, flags_for, plain_loop
from test_equal import AGAIN, MODELS, OFFLOAD, WHOLE, Folder, described, run, worst, write_weights
from test_fsdp import whole_state
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.rest

PREFIX = "base_model.model."  # of all names in PEFT's own models
PATTERN = ["--lora-targets", ".*(q|v)_proj"]
# By the ranks: the model, the samples of a rank at a time, and other flags
CASES = {
    1: [("llama untied", 12, [])],
    2: [("llama", 3, [OFFLOAD]), ("mixtral", 6, [AGAIN])],
    3: [("gpt2", 4, []), ("llama", 2, PATTERN)],
    4: [("llama untied", 3, [WHOLE]), ("llama", 3, ["--compile", AGAIN])],
}


def with_adapters(model, targets="all-linear"):
    """As PEFT's documentation has it."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


@pytest.fixture(scope="module")
def lora():
    return load(CHAPTER_17)


@pytest.mark.parametrize("ranks", CASES)
def test_equal_to_plain_peft(lora, tmp_path, conversations, ranks):
    cases, plain = [], {}
    for model, batch, more in CASES[ranks]:
        folder = tmp_path / model
        if not folder.exists():
            write_weights(folder, model)
        flags = [*flags_for(folder, conversations), "-s", SIZE, "--lr", 1e-3, *more]
        flags += ["--gradient-accumulation-steps", BATCH // ranks // batch]
        name = f"{model}-{batch}"
        cases.append(described(tmp_path, name, "17", model, batch, flags))
        options = {"targets": PATTERN[1]} if more == PATTERN else {}
        adapt = lambda model, options=options: with_adapters(model, **options)
        plain[name] = plain_loop(lora, folder, conversations, adapt=adapt)
    run(tmp_path, "job", cases, ranks)
    for name, expected in plain.items():
        found = Folder(tmp_path / name)
        assert_equal(expected, found)
        for step in (1, 2):
            gradients = expected.gradients[step - 1]
            gradients = {n.removeprefix(PREFIX): x for n, x in gradients.items()}
            error, parameter = worst(gradients, found.gradients(step))
            print(name, step, error, parameter)
            assert error < 1e-4, (name, step, parameter, error)


# In each step: the bytes of gathered and reduced tensors, the bytes of AdamW's moments on this rank,
# and the types of frozen weights and of A and B
WATCH = """
import torch
import torch.distributed as dist

models, sent = [], []

def counted(name):
    original = getattr(dist, name)
    def call(*args, **options):
        tensors = [x for x in [*args, *options.values()] if isinstance(x, torch.Tensor)]
        sent.append(max(x.nbytes for x in tensors))
        return original(*args, **options)
    setattr(dist, name, call)

counted("all_gather_single")
counted("reduce_scatter_single")

def to_empty(self, **options):
    models[:] = [original_to_empty(self, **options)]
    return self

def step(self, *args, **options):
    result = original_step(self, *args, **options)
    moments = sum(x.to_local().nbytes for s in self.state.values() for x in s.values() if x.dim())
    types = {(".lora_" in n, str(p.dtype)) for n, p in models[0].named_parameters()}
    print("\\nstep", sum(sent), moments, *[name for _, name in sorted(types)])
    sent.clear()
    return result

original_to_empty = torch.nn.Module.to_empty
torch.nn.Module.to_empty = to_empty
original_step = torch.optim.AdamW.step
torch.optim.AdamW.step = step
"""


def assert_opens(folder, base, text) -> None:
    """PEFT, Transformers and the merged copy of the README compute the same logits."""
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    without = model(ids).logits
    expected = peft.PeftModel.from_pretrained(model, folder)(ids).logits
    assert (expected - without).abs().max() > 1e-3
    assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(ids).logits, expected)
    [code] = re.findall("```python\n(import torch.*?)```", README.read_text(), re.DOTALL)
    code = code.replace("outputs/mine/final", str(folder)).replace("outputs/mine/merged", "merged")
    exec(code)


def test_types_moments_bytes_resume_and_final(trainer, tmp_path, conversations):
    base = write_weights(tmp_path / "llama", "llama")
    flags = [*flags_for(base, conversations), "-s", SIZE, "--lr", 1e-3, "--dtype", "bf16"]
    flags += ["-b", 2, "--gradient-accumulation-steps", 3, "--max-steps", 6, "--eval-freq", 3]
    flags += ["--ckpt-freq", 3, "--keep-checkpoints", 9]
    options = {"script": CHAPTER_17, "processes": 2, "before": WATCH}
    run = trainer(*flags, name="run", **options)
    adapters = load_file(run.folder / "final" / "adapter_model.safetensors")
    a = sum(x.numel() for x in adapters.values())
    weights = load_file(base / "model.safetensors")
    root = sum(x.numel() for n, x in weights.items() if ".layers." not in n)
    layers = sum(x.numel() for x in weights.values()) - root
    print(a, root, layers, run.output[-600:])
    # Layers are gathered twice in bf16, and the root, with the tied embeddings, once.
    expected = 3 * (4 * layers + 8 * a + 2 * root)
    for rank in run.run.ranks:
        steps = [line.split()[1:] for line in re.findall("^step .*$", rank.output, re.MULTILINE)]
        steps = [line for line in steps if "torch.float32" in line]
        print(steps, expected)

    take_over(run, trainer, "resumed", 3)
    resumed = trainer(*flags, name="resumed", **options)
    assert exact(resumed.records) == exact(run.records)
    again = load_file(resumed.folder / "final" / "adapter_model.safetensors")
    assert all(torch.equal(adapters[n], again[n]) for n in adapters)
    assert 0
