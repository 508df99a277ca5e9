"""The optimizer of chapter 18 beside those of PyTorch, on equal gradients, on the ranks of a job.

`muon_alone.py CONFIG...` trains a random model of each config twice: sharded, with the chapter's
optimizer; and whole, on each rank, with torch.optim.Muon and torch.optim.AdamW. It prints the
largest difference of a weight that Muon has trained, and of the other weights.
"""

import sys
from copy import deepcopy
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from runner import CHAPTER_18, load
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

STEPS = 5
LR, DECAY = 1e-2, 0.1


class TorchMuon:
    """torch.optim.Muon for the matrices of the layers. Of experts, each one is a matrix."""

    def __init__(self, model, **options):
        layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        weights = {p: None for layer in layers for p in layer.parameters()}  # in their order
        self.weights = [p for p in weights if p.dim() > 1]
        self.matrices = {p: [*p.data] if p.dim() == 3 else [p.data] for p in self.weights}
        every = [matrix for matrices in self.matrices.values() for matrix in matrices]
        self.muon = torch.optim.Muon(every, adjust_lr_fn="match_rms_adamw", **options)

    def step(self, lr, in_fp32):
        for group in self.muon.param_groups:
            group["lr"] = lr
        for p, matrices in self.matrices.items():
            for matrix, grad in zip(matrices, p.grad.view(-1, *p.shape[-2:]), strict=True):
                matrix.grad = grad.clone()
            p.grad = None  # AdamW then skips this weight
        # torch.optim.Muon rounds to bf16 with this method.
        rounding = torch.Tensor.clone if in_fp32 else torch.Tensor.bfloat16
        with mock.patch.object(torch.Tensor, "bfloat16", rounding):
            self.muon.step()


def compare(chapter, config, dtype: str, cpu_offload: bool) -> list[float]:
    args = {"dtype": dtype, "cpu_offload": cpu_offload, "reshard_after_forward": True}
    args |= {"lr": LR, "adam_beta2": 0.99, "weight_decay": DECAY}
    args, device = SimpleNamespace(**args), torch.device("cpu")
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    chapter.shard_model(model, args, device)
    chapter.send_weights(whole, model, device)
    optimizer = chapter.Muon(chapter.parameter_groups(model, args), args, device)
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in whole.parameters() if p.dim() > 1], "weight_decay": DECAY},
            {"params": [p for p in whole.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=LR,
        betas=(0.9, 0.99),
        fused=True,
    )
    muon = TorchMuon(whole, lr=LR, weight_decay=DECAY)
    for step in range(STEPS):
        lr = LR * (1 - step / STEPS)
        for group in [*optimizer.param_groups, *adamw.param_groups]:
            group["lr"] = lr
        for p, sharded in zip(whole.parameters(), model.parameters(), strict=True):
            p.grad = torch.randn(p.shape)
            mesh, placements = sharded.device_mesh, sharded.placements
            sharded.grad = dist.tensor.distribute_tensor(p.grad.clone(), mesh, placements)
        optimizer.step()
        muon.step(lr, in_fp32=dtype == "fp32")
        adamw.step()
        optimizer.zero_grad()
        adamw.zero_grad()
    largest = [0.0, 0.0]
    for p, sharded in zip(whole.parameters(), model.parameters(), strict=True):
        kind = 0 if p in muon.matrices else 1
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
