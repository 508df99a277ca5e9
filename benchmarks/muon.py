"""Chapter 18: how evenly owners share the work, what mistakes cost, and what an update costs.

    python benchmarks/muon.py                                      # computed, and random matrices
    torchrun --standalone --nproc-per-node 2 benchmarks/muon.py    # updates of tiny-llama in fp32

The first command prints the work and the bytes of the busiest rank, relative to the mean, on ranks
that do not exist, and how wrong an update is if a matrix is not whole. The second command counts
the bytes, collectives and multiplications of four ways to update the same weights on these ranks.
"""

import argparse
import os
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.append(str(REPOSITORY / "tools"))
from models import load_chapter, load_config  # noqa: E402

LR = 1e-3
NOT_SENT = ("wait_tensor", "_wrap_tensor_autograd")


# -- Owners on ranks that do not exist -------------------------------------------------------------


def matrices_of(name: str) -> list:
    """The matrices of the layers, without memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(name))
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    return [p for layer in layers for p in layer.parameters() if p.dim() == 2]


def imbalance(by_owner: list, size_of) -> float:
    """The size of the busiest owner, divided by the mean."""
    sizes = [sum(map(size_of, owned)) for owned in by_owner]
    return max(sizes) / (sum(sizes) / len(sizes))


def in_turn(matrices, ranks: int) -> list:
    """What chapter 18 does not do: the owners take turns, in the order of the model."""
    return [matrices[rank::ranks] for rank in range(ranks)]


def print_owners(chapter, names: list[str], all_ranks: list[int]) -> None:
    header = (
        "model | matrices | ranks | work | bytes | work, owners in turn | ranks without a matrix"
    )
    print(f"| {header} |")
    print("|---|---|---|---|---|---|---|")
    for name in names:
        matrices = matrices_of(name)
        for ranks in all_ranks:
            owners = chapter.choose_owners(matrices, ranks)
            ratios = [imbalance(owners, chapter.work_of), imbalance(owners, torch.numel)]
            ratios.append(imbalance(in_turn(matrices, ranks), chapter.work_of))
            numbers = " | ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"| {name} | {len(matrices)} | {ranks} | {numbers} | {owners.count([])} |")


# -- Mistakes --------------------------------------------------------------------------------------


def wrong(found, right) -> str:
    return f"{((found - right).norm() / right.norm()).item():.0%}"


def print_mistakes(chapter) -> None:
    torch.manual_seed(0)
    print("\n| a random matrix | a rank uses its own rows alone: ranks | the update is wrong by |")
    print("|---|---|---|")
    for shape in ((384, 128), (128, 128)):
        matrix = torch.randn(shape)
        right = chapter.orthogonalize(matrix)
        for ranks in (2, 8):
            parts = [chapter.orthogonalize(rows) for rows in matrix.chunk(ranks)]
            print(f"| {shape} | {ranks} | {wrong(torch.cat(parts), right)} |")
    experts = torch.randn(8, 128, 64)
    right = torch.stack([chapter.orthogonalize(expert) for expert in experts])
    stacked = chapter.orthogonalize(experts.flatten(0, 1)).view(experts.shape)
    print(f"\n8 random experts (128, 64) as one matrix: wrong by {wrong(stacked, right)}")


# -- The costs of an update ------------------------------------------------------------------------


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
    config = load_config(str(REPOSITORY / "models" / "tiny-llama"))
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    chapter.shard_model(model, args, torch.device("cpu"))
    chapter.send_weights(whole, model, torch.device("cpu"))
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


def print_costs(chapter, repeats: int) -> None:
    chapter.join_process_group()
    args = {"dtype": "fp32", "cpu_offload": False, "reshard_after_forward": True, "lr": LR}
    args = SimpleNamespace(**args, adam_beta2=0.999, weight_decay=0.0)
    optimizers = {}
    for name in ("chapter 18", "each rank does all", "torch.optim.Muon on DTensors", "AdamW"):
        model = sharded_model(chapter, args)
        groups = chapter.parameter_groups(model, args)
        params = groups[-1]["params"]
        if name == "chapter 18":
            only_muon = [{"params": []}, groups[-1]]
            optimizer = chapter.Muon(only_muon, args, torch.device("cpu"))
        elif name == "each rank does all":
            optimizer = Everywhere(chapter, params)
        elif name == "AdamW":
            optimizer = torch.optim.AdamW(params, lr=LR, fused=True)
        else:
            options = {"lr": LR, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
            optimizer = torch.optim.Muon(params, **options)
        optimizers[name] = optimizer, params, [], Count()
    # torch.optim.Muon computes in bf16, which is slow on CPUs: here in fp32, as the others do.
    with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
        for repeat in range(repeats + 1):  # the first one is not timed, but counted
            for optimizer, params, times, count in optimizers.values():
                torch.manual_seed(repeat)
                for p in params:
                    p.grad = torch.zeros_like(p)
                    p.grad.to_local().normal_()
                dist.barrier()
                begin = time.perf_counter()
                if repeat == 0:
                    with count:
                        optimizer.step()
                else:
                    optimizer.step()
                    times.append(1e3 * (time.perf_counter() - begin))
    if dist.get_rank() == 0:
        ranks = f"{dist.get_world_size()} ranks, torch {torch.__version__}, rank 0 of each update"
        print(f"{ranks}; medians of {repeats} updates (quartiles), in turn\n")
        print("| optimizer | bytes sent | collectives | millions of multiplications | ms |")
        print("|---|---|---|---|---|")
        for name, (_, _, times, count) in optimizers.items():
            low, middle, high = statistics.quantiles(times, n=4)
            n = count.numbers
            cells = f"{n['bytes']:,} | {n['collectives']} | {n['multiplications'] / 1e6:.0f}"
            print(f"| {name} | {cells} | {middle:.0f} ({low:.0f}, {high:.0f}) |")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = ["meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B"]
    add("-m", "--model-names", nargs="+", default=names, help="configs of tools/models.json")
    add("--ranks", nargs="+", type=int, default=[8, 64, 512], help="[8 64 512]")
    add("--repeats", type=int, default=15, help="timed updates [15]")
    args = parser.parse_args()
    chapter = load_chapter(18)
    if "WORLD_SIZE" in os.environ:
        print_costs(chapter, args.repeats)
    else:
        print_owners(chapter, args.model_names, args.ranks)
        print_mistakes(chapter)


if __name__ == "__main__":
    main()
