"""Trainings of one process, without ranks and micro-batches, over the rows of a chapter."""

from itertools import pairwise
from types import SimpleNamespace

import peft
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, get_scheduler

BATCH, SIZE = 12, 64  # samples per step, for 1 to 4 ranks


def flags_for(folder, rows) -> list:
    return ["-m", folder, "--no-from-scratch", "-d", rows, "-s", SIZE]


def samples_of(rows, split: str) -> list[dict]:
    """The columns of each row, as tensors."""
    found = pq.read_table(sorted(rows.glob(f"{split}-*"))).to_pylist()
    return [{name: torch.tensor(column) for name, column in row.items()} for row in found]


def plain_loop(chat, folder, rows, adapt=lambda model: model, steps=2) -> SimpleNamespace:
    """Losses, norms, held-out losses and gradients of one process, a conversation at a time."""
    train_set, eval_set = (samples_of(rows, split) for split in ("train", "validation"))
    order = chat.sample_order(0, 0, len(train_set))
    model = adapt(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    by_decay = [[p for p in model.parameters() if (p.dim() > 1) == matrix] for matrix in (1, 0)]
    groups = [{"params": p, "weight_decay": d} for p, d in zip(by_decay, (0.01, 0), strict=True)]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = get_scheduler("cosine", optimizer, 0, steps)

    def losses_of(samples):
        """The sum over the answers of each conversation, and their number of tokens."""
        for sample in samples:
            begins = [0, SIZE]  # with --no-packing
            if "position_ids" in sample:
                begins = [*(sample["position_ids"] == 0).nonzero().flatten(), SIZE]
            for begin, end in pairwise(begins):
                ids, labels = (sample[name][begin:end] for name in ("input_ids", "labels"))
                count = (labels >= 0).sum().item()
                if count:
                    logits = model(ids[None]).logits[0, :-1]
                    entropy = torch.nn.functional.cross_entropy
                    yield entropy(logits, labels[1:], reduction="sum"), count

    result = SimpleNamespace(loss=[], norm=[], held_out=[], gradients=[])
    for step in range(steps):
        samples = [train_set[int(i)] for i in order[step * BATCH : (step + 1) * BATCH]]
        sums, counts = zip(*losses_of(samples), strict=True)
        loss = sum(sums) / sum(counts)
        loss.backward()
        named = [(n, p) for n, p in model.named_parameters() if p.grad is not None]
        gradients = {n.removeprefix("base_model.model."): p.grad.clone() for n, p in named}
        result.gradients.append(gradients)  # without the prefix of PEFT
        result.loss.append(loss.item())
        result.norm.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if (step + 1) % (steps // 2) == 0:
            with torch.no_grad():
                sums, counts = zip(*losses_of(eval_set), strict=True)
            result.held_out.append(sum(sums).item() / sum(counts))
    result.weights = own_weights(model)
    return result


def own_weights(model) -> dict:
    """By their names in `final/`: those of the adapters, if it has some."""
    if isinstance(model, peft.PeftModel):
        return peft.get_peft_model_state_dict(model)
    return {name: p.detach() for name, p in model.named_parameters()}


def plain_loop_over_rows(folder, steps: list[torch.Tensor], eval_set=None) -> SimpleNamespace:
    """As `plain_loop`, over rows of text. It takes all rows of a step at once."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    groups = [
        [p for p in model.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False)
    ]
    groups = [{"params": p, "weight_decay": d} for p, d in zip(groups, (0.01, 0.0), strict=True)]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = get_scheduler("cosine", optimizer, 0, len(steps))

    def loss_of(labels):
        mask = (labels >= 0).long()
        logits = model(input_ids=labels * mask, attention_mask=mask).logits
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )

    result = SimpleNamespace(loss=[], norm=[], held_out=[], gradients=[])
    for labels in steps:
        loss = loss_of(labels)
        loss.backward()
        result.gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        result.norm.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        result.loss.append(loss.item())
        if eval_set is not None:
            with torch.no_grad():
                result.held_out.append(loss_of(eval_set).item())
    result.weights = own_weights(model)
    return result


def plain_losses(folder, steps: list[torch.Tensor]) -> list[float]:
    return plain_loop_over_rows(folder, steps).loss


def reference_rows(documents: list[list[int]], packing: str, length: int) -> list[list[int]]:
    """Token by token, by the definitions."""
    rows, row = [], []
    for document in documents:
        for number, token in enumerate(document):
            if packing != "trunc" or number < length:
                row.append(token)
            if len(row) == length:
                rows.append(row)
                row = []
        if packing != "pack" and row:
            while len(row) < length:
                row.append(-100)
            rows.append(row)
            row = []
    return rows


def with_adapters(model, targets="all-linear"):
    """As PEFT's documentation has it."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)
