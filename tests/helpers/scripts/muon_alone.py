"""The optimizer of chapter 18 beside those of PyTorch, on equal gradients, on the ranks of a job.

`muon_alone.py CONFIG...` trains a random model of each config twice: sharded, with the chapter's
optimizer; and whole, on each rank, with torch.optim.Muon and torch.optim.AdamW. It prints the
largest difference of a weight that Muon has trained, and of the other weights.
"""

import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[2]))
from helpers.runner import CHAPTER_18, load
from helpers.torch_muon import AdamWAndMuon

STEPS = 5
LR, DECAY = 1e-2, 0.1


def compare(chapter, config, dtype: str, cpu_offload: bool) -> list[float]:
    args = {"dtype": dtype, "cpu_offload": cpu_offload, "reshard_after_forward": True}
    args |= {"lr": LR, "adam_beta2": 0.99, "weight_decay": DECAY}
    args, device = SimpleNamespace(**args), torch.device("cpu")
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    chapter.shard_model(model, args, device)
    chapter.compute_buffers(model, device)
    chapter.load_model = lambda args, checkpoint: whole
    chapter.send_weights(args, model)
    groups = chapter.parameter_groups(model, args)
    optimizer = chapter.Muon(groups, args, device)
    reference = AdamWAndMuon(whole, LR, args.adam_beta2, DECAY)
    for step in range(STEPS):
        lr = LR * (1 - step / STEPS)
        for group in [*optimizer.param_groups, *reference.param_groups]:
            group["lr"] = lr
        for p, sharded in zip(whole.parameters(), model.parameters(), strict=True):
            p.grad = torch.randn(p.shape)
            mesh, placements = sharded.device_mesh, sharded.placements
            sharded.grad = dist.tensor.distribute_tensor(p.grad.clone(), mesh, placements)
        optimizer.step()
        reference.step(in_fp32=dtype == "fp32")
        optimizer.zero_grad()
        reference.zero_grad()
    largest = [0.0, 0.0]
    for p, sharded in zip(whole.parameters(), model.parameters(), strict=True):
        kind = 0 if p in reference.muon.matrices else 1
        difference = (p - sharded.full_tensor()).abs().max().item()
        largest[kind] = max(largest[kind], difference)
    return largest


chapter = load(CHAPTER_18)
dist.init_process_group("gloo")
for file in sys.argv[1:]:
    config = AutoConfig.from_pretrained(file)
    for dtype in ("bf16", "fp32"):
        for cpu_offload in (False, True):
            largest = compare(chapter, deepcopy(config), dtype, cpu_offload)
            print("differences", *largest, file, dtype, cpu_offload, flush=True)
dist.destroy_process_group()
