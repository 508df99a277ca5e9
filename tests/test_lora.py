"""Chapter 17 trains what PEFT trains in one process, and keeps no more than it has to."""

import json
import random

import peft
import pytest
import torch
from conftest import assert_same_losses, exact, take_over
from runner import CHAPTER_17, REPOSITORY
from safetensors.torch import load_file
from test_equal import AGAIN, OFFLOAD, STEPS, WHOLE, Folder, described, run, worst, write_weights
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.rest

LR = 1e-3
# By the number of ranks: the model, the samples of a rank at a time, and other flags
CASES = {
    1: [("llama untied", 12, [])],
    2: [("llama", 4, [OFFLOAD]), ("mixtral", 12, [])],
    3: [("gpt2", 8, [AGAIN]), ("llama", 4, ["--lora-targets", ".*(q|v)_proj"])],
    4: [("llama untied", 3, [WHOLE]), ("llama", 6, ["--compile", AGAIN])],
}


def plain_peft(folder, model: str, case, targets: str):
    """Losses, and the gradients of the first steps, from the inputs of all ranks."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(folder / model, dtype=torch.float32)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules=targets)
    model = peft.get_peft_model(base, config)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.01)
    losses, gradients = [], []
    for step in range(1, STEPS + 1):
        inputs = [x for file in sorted(case.glob(f"inputs-{step}-*")) for x in torch.load(file)]
        labels = [x["labels"][:, 1:] for x in inputs]
        count = sum((x != -100).sum() for x in labels)
        total = 0.0
        for x, y in zip(inputs, labels, strict=True):
            positions = {n: x[n] for n in ("position_ids",) if n in x}
            logits = model(x["input_ids"], use_cache=False, **positions).logits[:, :-1]
            options = {"ignore_index": -100, "reduction": "sum"}
            loss = torch.nn.functional.cross_entropy(logits.mT, y, **options) / count
            loss.backward()
            total += loss.item()
        losses.append(total)
        names = {n.removeprefix("base_model.model."): p for n, p in model.named_parameters()}
        gradients.append({n: p.grad.clone() for n, p in names.items() if p.grad is not None})
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, model


TEMPLATE = REPOSITORY / "tiny-chat" / "template.jinja"


@pytest.fixture(scope="session")
def conversations(texts) -> str:
    """Of one to three turns, with prompts and answers of 1 to 60 words."""
    chance = random.Random(1)
    lines = []
    for _ in range(300):
        roles = ["user", "assistant"] * chance.randint(1, 3)
        messages = [{"role": role, "content": chance.choice(texts)[:60]} for role in roles]
        lines.append(json.dumps({"messages": messages}))
    return "\n".join(lines)


@pytest.mark.parametrize("ranks", CASES)
def test_equal_to_plain_peft(tmp_path, conversations, ranks):
    (tmp_path / "text.jsonl").write_text(conversations)
    cases = {}
    for model, batch, more in CASES[ranks]:
        if not (tmp_path / model).exists():
            write_weights(tmp_path / model, model)
        name = "-".join(map(str, (model, batch, *more))).replace("/", "")
        flags = [*more, "--lr", LR, "--lr-scheduler", "constant", "-s", 64]
        flags += ["--chat-template", TEMPLATE]
        flags += ["--gradient-accumulation-steps", 24 // ranks // batch]
        cases[name] = described(tmp_path, name, "17", model, batch, flags), model, more
    run(tmp_path, "job", [case for case, *_ in cases.values()], ranks)
    for name, (_, model, more) in cases.items():
        case = Folder(tmp_path / name)
        targets = more[1] if "--lora-targets" in more else "all-linear"
        losses, gradients, reference = plain_peft(tmp_path, model, tmp_path / name, targets)
        print(name, case.column("loss"), losses)
        assert case.column("loss") == pytest.approx(losses, rel=1e-5)
        for step in (1, 2):
            error, tensor = worst(gradients[step - 1], case.gradients(step))
            print(name, step, error, tensor)
            assert error < 1e-4, (name, step, tensor, error)


# In each step: the bytes of gathered and reduced tensors, and what is kept of which weights.
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
    names = {n for n, p in models[0].named_parameters() if p in self.state}
    moments = sum(x.to_local().nbytes for s in self.state.values() for x in s.values() if x.dim())
    frozen = {str(p.dtype) for n, p in models[0].named_parameters() if ".lora_" not in n}
    trained = {str(p.dtype) for n, p in models[0].named_parameters() if ".lora_" in n}
    print("\\nstep", sum(sent), all(".lora_" in n for n in names), moments, *frozen, *trained)
    sent.clear()
    return result

original_to_empty = torch.nn.Module.to_empty
torch.nn.Module.to_empty = to_empty
original_step = torch.optim.AdamW.step
torch.optim.AdamW.step = step
"""


def test_bf16_resume_and_final(trainer, tmp_path, conversations):
    data = tmp_path / "chat.jsonl"
    data.write_text(conversations)
    base = write_weights(tmp_path / "llama", "llama")
    flags = ["-m", base, "--no-from-scratch", "-d", data, "--chat-template", TEMPLATE, "-s", 64]
    flags += ["--dtype", "bf16", "-b", 2, "--gradient-accumulation-steps", 2, "--max-steps", 6]
    flags += ["--eval-freq", 0, "--ckpt-freq", 3, "--keep-checkpoints", 9, "--lr", LR]
    options = {"script": CHAPTER_17, "processes": 2, "before": WATCH}
    run = trainer(*flags, name="run", **options)
    print(run.output[-3000:])
    take_over(run, trainer, "resumed", 3)
    resumed = trainer(*flags, name="resumed", **options)
    assert exact(resumed.records) == exact(run.records)
    a, b = (load_file(x.folder / "final" / "adapter_model.safetensors") for x in (run, resumed))
    assert all(torch.equal(a[n], b[n]) for n in a)
    import os
    os.system(f"ls -la {run.folder}/final {run.folder}/step-00000003; cat {run.folder}/final/adapter_config.json")
    assert 0
