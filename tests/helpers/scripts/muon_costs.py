"""The costs of an update in chapter 18, on the ranks of a job: four ways to update tiny-llama.

It prints the bytes that rank 0 sends, its collectives, and the millions of its multiplications.
"""

import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[2]))
from helpers.runner import CHAPTER_18, REPOSITORY, load

CPU = torch.device("cpu")
LR = 1e-3
NOT_SENT = ("wait_tensor", "_wrap_tensor_autograd")


class Count(TorchDispatchMode):
    """Collectives, the bytes that this rank sends in them, and multiplications of matrices."""

    def __init__(self):
        super().__init__()
        self.numbers = defaultdict(int)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor: comes again, as this rank's part of it
        name, ranks = op._opname, dist.get_world_size()
        if op.namespace in ("c10d", "_c10d_functional") and name not in NOT_SENT:
            self.numbers["collectives"] += 1
            sent = {
                "alltoall_base_": 1 / ranks,
                "all_reduce": 2 / ranks,
                "all_to_all_single": 1 / ranks,
            }
            sent |= {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1 / ranks}
            tensor = args[1] if name == "alltoall_base_" else args[0]
            self.numbers["bytes"] += round(sent[name] * (ranks - 1) * tensor.nbytes)
        if name in ("mm", "addmm"):
            first, second = args[-2:]
            self.numbers["multiplications"] += first.numel() * second.shape[1]
        return op(*args, **kwargs or {})


def sharded_model(chapter, args):
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(REPOSITORY / "models" / "tiny-llama")
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    chapter.shard_model(model, args, CPU)
    chapter.compute_buffers(model, CPU)
    chapter.load_model = lambda args, checkpoint: whole
    chapter.send_weights(args, model)
    return model


class Everywhere(torch.optim.Optimizer):
    """What chapter 18 does not do: each rank gathers each matrix, and repeats all of the work."""

    def __init__(self, chapter, parameters):
        super().__init__(parameters, {"lr": LR})
        self.orthogonalize, self.momentum = chapter.orthogonalize, chapter.MOMENTUM

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
            momentum.lerp_(p.grad, 1 - self.momentum)
            whole = self.orthogonalize(p.grad.lerp(momentum, self.momentum).full_tensor())
            rows = dist.tensor.distribute_tensor(
                whole, p.device_mesh, p.placements, src_data_rank=None
            )
            p.add_(rows, alpha=-LR * 0.2 * max(p.shape) ** 0.5)


chapter = load(CHAPTER_18)
chapter.join_process_group()
args = {"dtype": "fp32", "cpu_offload": False, "reshard_after_forward": True, "lr": LR}
args = SimpleNamespace(**args, adam_beta2=0.999, weight_decay=0.0)
options = {"lr": LR, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
OPTIMIZERS = {
    "chapter 18": lambda params, group: chapter.Muon([{"params": []}, group], args, CPU),
    "each rank does all": lambda params, _: Everywhere(chapter, params),
    "torch.optim.Muon on DTensors": lambda params, _: torch.optim.Muon(params, **options),
    "AdamW": lambda params, _: torch.optim.AdamW(params, lr=LR, fused=True),
}
for name, make in OPTIMIZERS.items():
    group = chapter.parameter_groups(sharded_model(chapter, args), args)[-1]
    optimizer = make(group["params"], group)
    for p in group["params"]:
        p.grad = torch.zeros_like(p)
        p.grad.to_local().normal_()
    # torch.optim.Muon computes in bf16, which is slow on CPUs: here in fp32, as the others do.
    with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone), Count() as count:
        optimizer.step()
    n = count.numbers
    millions = round(n["multiplications"] / 1e6)
    if dist.get_rank() == 0:
        print("update", f"{n['bytes']:,}", n["collectives"], millions, name, flush=True)
dist.destroy_process_group()
