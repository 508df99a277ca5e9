"""Other optimizers under FSDP2: is the update that of one process, and what is the state?

    torchrun --standalone --nproc-per-node 2 benchmarks/optimizers.py

Each optimizer makes three steps on two large matrices: once alone, once sharded over the ranks. The
error is the largest difference of a weight, relative to the largest update. An optimizer whose
package is missing is skipped (`pip install torchao bitsandbytes`). It runs on CPUs.
"""

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS = 3


def adamw_8bit(parameters):
    from torchao.optim import AdamW8bit

    return AdamW8bit(parameters, lr=1e-2)


def bitsandbytes_8bit(parameters):
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(parameters, lr=1e-2)


def transformers_adafactor(parameters):
    return transformers.Adafactor(parameters, lr=1e-2, relative_step=False)


OPTIMIZERS = {
    "torch.optim.AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "torch.optim.SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "torch.optim.Muon": lambda p: torch.optim.Muon(p, lr=1e-2),
    "torch.optim.Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "transformers.Adafactor": transformers_adafactor,
    "torchao.optim.AdamW8bit": adamw_8bit,
    "bitsandbytes.optim.AdamW8bit": bitsandbytes_8bit,
}


def new_model():
    torch.manual_seed(0)
    layers = (torch.nn.Linear(256, 512, bias=False), torch.nn.Linear(512, 256, bias=False))
    return torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1])


def train(model, new_optimizer, inputs, targets, noise=0.0):
    """The optimizer after some steps. With noise, gradients are as after other rounding."""
    optimizer = new_optimizer([*model.parameters()])
    for _ in range(STEPS):
        (model(inputs) - targets).square().mean().backward()
        for parameter in model.parameters():
            if noise:
                parameter.grad *= 1 + noise * torch.randn_like(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def error(model, alone) -> float:
    """Of a model that all ranks hold together."""
    errors = []
    for weight, expected, first in zip(
        *(m.parameters() for m in (model, alone, new_model())), strict=True
    ):
        whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        errors.append((whole - expected).abs().max() / (expected - first).abs().max())
    return max(errors).item()


@torch.no_grad()
def report(name: str, inputs, targets) -> str:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    new_optimizer = OPTIMIZERS[name]
    try:
        with torch.enable_grad():
            alone, noisy, sharded = new_model(), new_model(), new_model()
            train(alone, new_optimizer, inputs, targets)
            train(noisy, new_optimizer, inputs, targets, noise=1e-7)
            fully_shard(sharded, mesh=init_device_mesh("cpu", (ranks,)))
            part = slice(rank * len(inputs) // ranks, (rank + 1) * len(inputs) // ranks)
            optimizer = train(sharded, new_optimizer, inputs[part], targets[part])
    except ImportError as missing:
        return f"| `{name}` | not installed: {missing.name} |  |  |"
    except RuntimeError as refused:
        return f"| `{name}` | raises: {str(refused).splitlines()[0][:90]} |  |  |"
    states = {k: type(v).__name__ for s in optimizer.state.values() for k, v in s.items()}
    described = ", ".join(f"{k}: {v}" for k, v in states.items())
    return f"| `{name}` | {error(sharded, alone):.0e} | {error(noisy, alone):.0e} | {described} |"


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    inputs, targets = torch.randn(1024, 256), torch.randn(1024, 256)
    print_it = dist.get_rank() == 0
    if print_it:
        print(f"{dist.get_world_size()} ranks, torch {torch.__version__}")
        print("| optimizer | error | error of rounding | state |\n|---|---|---|---|")
    for name in OPTIMIZERS:
        row = report(name, inputs, targets)
        if print_it:
            print(row, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
