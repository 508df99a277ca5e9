"""Chapter 6: the bytes that its collectives move, and the memory of its activations.

    python benchmarks/tensor-parallel.py traffic     # beside FSDP alone, on 4 processes
    python benchmarks/tensor-parallel.py memory      # with and without the split of the tokens

Both run chapters as they are, on CPU processes, with a small Llama, and watch one training step.

traffic   Each collective by its kind, of FSDP (whole tensors are weights or gradients) and of TP
          (activations). Bytes per rank: an all-gather of S bytes on n ranks moves S (n - 1) / n, a
          reduce-scatter as much with NCCL, and twice as much with gloo, like an all-reduce. The
          number and the bytes are also computed, from the shape of the model, and must agree.
memory    Bytes of the tensors that a rank holds after the forward pass and not before it, so those
          kept for the backward pass. Without the split, the script edits the plan: all ranks of a
          group then have all tokens between the layers. The losses must agree.
"""

import argparse
import json
import math
import os
import re
import runpy
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
FSDP = REPOSITORY / "03-fsdp" / "train-llm.py"
TP = REPOSITORY / "06-tensor-parallel" / "train-llm.py"
STEP = 2  # the first one has more to do
KEPT = [[], ["--activation-checkpointing"]]  # flags of the rows of `memory`

SHAPE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "head_dim": 32}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 2048}
LLAMA = SHAPE | {"model_type": "llama", "tie_word_embeddings": True}
LLAMA |= {"bos_token_id": 0, "eos_token_id": 0, "architectures": ["LlamaForCausalLM"]}

# All ranks of a group have all tokens: norms, embeddings and sums are not split.
WITHOUT_SPLIT = {
    "TOKENS = Shard(1)": "TOKENS = Replicate()",
    "PLAN = {\n": """
class OfAllTokens(tp.SequenceParallel):
    def __init__(self):
        super().__init__()
        self.sequence_sharding = (Replicate(),)

PLAN = {
""",
    '_layernorm": tp.SequenceParallel()': '_layernorm": OfAllTokens()',
    '"model.norm": tp.SequenceParallel()': '"model.norm": OfAllTokens()',
}


# -- In the process of a chapter -------------------------------------------------------------------


def watch(chapter: str, flags: list[str]) -> None:
    """Runs the chapter; rank 0 prints what it has seen in one step."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    # In `c10d` those of FSDP and of the script, in `_c10d_functional` those of DTensor
    kinds = {
        "c10d::_allgather_base_": "all-gather",
        "c10d::_reduce_scatter_base_": "reduce-scatter",
        "c10d::allreduce_": "all-reduce",
        "_c10d_functional::all_gather_into_tensor": "all-gather",
        "_c10d_functional::reduce_scatter_tensor": "reduce-scatter",
        "_c10d_functional::all_reduce": "all-reduce",
    }
    silent = {"wait_tensor", "_wrap_tensor_autograd", "barrier", "allgather_", "broadcast_"}
    seen, steps, storages, sizes = [], [], {}, {}

    def size(tensors) -> int:
        return max(t.numel() * t.element_size() for t in tensors)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if DTensor in types:
                return NotImplemented  # it calls operations on its parts, which come back here
            result = op(*args, **kwargs or {})
            tensors = [x for x in tree_leaves((args, kwargs, result)) if torch.is_tensor(x)]
            name = op.name().partition(".")[0]
            if name in kinds:
                owner = "TP" if name.startswith("_") else "FSDP"
                seen.append((owner, kinds[name], size(tensors)))
            elif len(steps) < STEP and "c10d" in name and name.partition("::")[2] not in silent:
                raise NotImplementedError(name)
            for tensor in tensors:
                if tensor.device.type == "cpu":
                    storage = tensor.untyped_storage()
                    storages[storage._cdata] = weakref.ref(storage)
            return result

    def alive() -> int:
        found = [reference() for reference in storages.values()]
        return sum(storage.nbytes() for storage in found if storage is not None)

    original_train, original_step = torch.nn.Module.train, torch.optim.AdamW.step

    def train(self, mode=True):
        if hasattr(self, "lm_head") and "forward" not in self.__dict__:
            forward = self.forward

            def watched(*args, **options):
                before = alive()
                result = forward(*args, **options)
                sizes["kept"] = alive() - before
                return result

            self.forward = watched
        return original_train(self, mode)

    def step(self, *args, **options):
        result = original_step(self, *args, **options)
        steps.append(list(seen))
        seen.clear()
        if len(steps) == STEP and os.environ["RANK"] == "0":
            counts = {}
            for owner, kind, nbytes in steps[-1]:
                count, total = counts.get(f"{owner} {kind}", (0, 0))
                counts[f"{owner} {kind}"] = (count + 1, total + nbytes)
            # The chapters silence `sys.stdout` on ranks above 0.
            print("\nseen " + json.dumps(counts | sizes), file=sys.__stdout__, flush=True)
        return result

    torch.nn.Module.train, torch.optim.AdamW.step = train, step
    sys.argv = [chapter, *flags]
    with Watch():
        runpy.run_path(chapter, run_name="__main__")


# -- The tables ------------------------------------------------------------------------------------


def launch(processes: int, *arguments) -> str:
    """Runs this file in processes; returns what they print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*map(str, [*command, "--nproc-per-node", processes, __file__, *arguments])]
    env = os.environ | {"COMET_AUTO_LOG_DISABLE": "true", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        sys.exit(f"error: {' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def run(script: Path, processes: int, folder: Path, *flags) -> tuple[dict, list[float]]:
    """What rank 0 has seen, and the losses."""
    name = f"run-{len([*folder.glob('run-*')])}"
    flags = [*flags, "-m", folder / "model", "--from-scratch", "-d", REPOSITORY / "0*" / "*.py"]
    flags += ["-s", 128, "--max-steps", STEP, "--eval-freq", 0, "--log-freq", 1, "--lr", 1e-3]
    flags += ["-e", name, "--save-dir", folder]
    output = launch(processes, "--watch", script, *flags)
    (seen,) = re.findall("^seen (.*)$", output, re.MULTILINE)
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").open()]
    return json.loads(seen), [record["loss"] for record in records]


def check_losses(losses: dict) -> None:
    first, *others = losses.values()
    for other in others:
        if any(abs(a - b) > 1e-5 * a for a, b in zip(first, other, strict=True)):
            sys.exit(f"error: the losses differ: {losses}")


def expected_traffic(groups: int, size: int, samples: int) -> dict[str, tuple[int, int]]:
    """Number and bytes of the collectives of activations and of weights, in one step in fp32."""
    hidden, layers = SHAPE["hidden_size"], SHAPE["num_hidden_layers"]
    heads = SHAPE["num_attention_heads"] + SHAPE["num_key_value_heads"]
    matrices = 2 * heads * SHAPE["head_dim"] * hidden + 3 * SHAPE["intermediate_size"] * hidden
    layer = 4 * (matrices // size + 2 * hidden)  # norms are whole on each rank of a group
    embeddings = 4 * SHAPE["vocab_size"] * hidden
    root = embeddings // size + 4 * hidden
    activations = 4 * samples // groups * 128 * hidden
    expected = {
        "FSDP all-gather": (2 * layers + 1, 2 * layers * layer + root),
        "FSDP reduce-scatter": (layers + 1, layers * layer + root),
    }
    if size > 1:
        # A layer: 2 before and 2 after, each with its counterpart in the backward pass. Then the
        # head, and the embeddings.
        expected["TP all-gather"] = (4 * layers + 2, (4 * layers + 2) * activations)
        expected["TP reduce-scatter"] = (4 * layers + 2, (4 * layers + 2) * activations)
    return expected


def traffic(folder: Path, ranks: int) -> None:
    samples = 8
    # The script, its groups, the ranks of a group
    cases = {f"FSDP, {ranks} ranks": (FSDP, ranks, 1), f"TP, one group of {ranks}": (TP, 1, ranks)}
    if ranks == 4:
        cases["both, 2 groups of 2"] = (TP, 2, 2)
    losses = {}
    print("| method | collective | number | computed | MB, whole tensors | computed |", end="")
    print(" MB per rank, NCCL | gloo |\n|---|---|---|---|---|---|---|---|")
    for method, (script, groups, size) in cases.items():
        flags = ["--tensor-parallel", size] if script == TP else []
        seen, losses[method] = run(script, ranks, folder, "-b", samples // groups, *flags)
        expected = expected_traffic(groups, size, samples)
        totals = [0, 0]
        for name, found in seen.items():
            if name == "kept":
                continue
            owner, kind = name.split(" ")
            members = groups if owner == "FSDP" else size
            share = (members - 1) / members * found[1] / 1e6
            nccl = share * (2 if kind == "all-reduce" else 1)
            gloo = share * (1 if kind == "all-gather" else 2)
            totals = [totals[0] + nccl, totals[1] + gloo]
            count, nbytes = expected.get(name, ("", math.nan))
            computed = f"{nbytes / 1e6:.3f}" if nbytes == nbytes else ""
            cells = [method, name, found[0], count, f"{found[1] / 1e6:.3f}", computed]
            print("|", *(f"{cell} |" for cell in cells), f"{nccl:.3f} | {gloo:.3f} |", flush=True)
        print(f"| {method} | together | | | | | {totals[0]:.3f} | {totals[1]:.3f} |", flush=True)
        for name, computed in expected.items():
            if (name.startswith("TP") or groups > 1) and seen.get(name) != [*computed]:
                sys.exit(f"error: {method}, {name}: {seen.get(name)}, computed {computed}")
    check_losses(losses)


def memory(folder: Path, ranks: int) -> None:
    text = TP.read_text()
    for line, instead in WITHOUT_SPLIT.items():
        if text.count(line) != 1:
            sys.exit(f"error: the plan has no line {line!r}")
        text = text.replace(line, instead)
    edited = folder / "06-tensor-parallel" / "train-llm.py"
    edited.parent.mkdir()
    edited.write_text(text)
    print("| activations kept, MB per rank | whole layers (chapter 3) |", end="")
    print(" split layers, all tokens | split layers, split tokens |\n|---|---|---|---|")
    for size in (2, 4)[: ranks // 2]:
        for flags in KEPT:
            cells, losses = [], {}
            scripts = {"whole": FSDP, "edited": edited, "chapter 6": TP}
            for name, script in scripts.items():
                processes = 1 if script == FSDP else size
                seen, losses[name] = run(script, processes, folder, "-b", 8, *flags)
                cells.append(f"{seen['kept'] / 1e6:.2f}")
            check_losses(losses)
            print(f"| N = {size} {' '.join(flags)} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["traffic", "memory"])
    parser.add_argument("--ranks", type=int, choices=[2, 4], default=4, help="at most [4]")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "model").mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / "model" / name).write_bytes(
                (REPOSITORY / "models" / "tiny-llama" / name).read_bytes()
            )
        (folder / "model" / "config.json").write_text(json.dumps(LLAMA))
        {"traffic": traffic, "memory": memory}[args.what](folder, args.ranks)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--watch"]:
        watch(sys.argv[2], sys.argv[3:])
    else:
        main()
