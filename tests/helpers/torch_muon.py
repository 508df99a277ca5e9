"""torch.optim.Muon beside AdamW in one process: what chapter 18 has to compute on any ranks."""

from unittest import mock

import torch
from transformers.modeling_layers import GradientCheckpointingLayer


class TorchMuon:
    """torch.optim.Muon for the matrices of the layers. Of experts, each one is a matrix."""

    def __init__(self, model, lr: float, weight_decay: float):
        layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        weights = {p: None for layer in layers for p in layer.parameters()}  # in their order
        weights = [p for p in weights if p.dim() > 1]
        self.matrices = {p: [*p.data] if p.dim() == 3 else [p.data] for p in weights}
        every = [matrix for matrices in self.matrices.values() for matrix in matrices]
        options = {"lr": lr, "weight_decay": weight_decay, "adjust_lr_fn": "match_rms_adamw"}
        self.muon = torch.optim.Muon(every, **options)

    @torch.no_grad()
    def step(self, lr: float, in_fp32: bool) -> None:
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


class AdamWAndMuon(torch.optim.AdamW):
    """In place of the AdamW of chapter 1 or of a short script."""

    def __init__(self, model, lr: float, beta2: float = 0.999, weight_decay: float = 0.0):
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": weight_decay}]
        groups.append({"params": vectors, "weight_decay": 0.0})
        super().__init__(groups, lr=lr, betas=(0.9, beta2), fused=True)
        self.muon = TorchMuon(model, lr, weight_decay)

    def step(self, closure=None, in_fp32=True):
        self.muon.step(self.param_groups[0]["lr"], in_fp32)
        super().step()
