"""Chapter 17 trains what PEFT trains in one process, and keeps no more than it has to."""

import json

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


@pytest.mark.parametrize("ranks", CASES)
def test_equal_to_plain_peft(tmp_path, dataset, ranks):
    (tmp_path / "text.jsonl").write_bytes(dataset.read_bytes())
    cases = {}
    for model, batch, more in CASES[ranks]:
        if not (tmp_path / model).exists():
            write_weights(tmp_path / model, model)
        name = "-".join(map(str, (model, batch, *more))).replace("/", "")
        flags = [*more, "--lr", LR, "--lr-scheduler", "constant"]
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
