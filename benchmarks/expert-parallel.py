"""Chapter 12: the bytes that its collectives move, and the experts that a rank has at a time.

    python benchmarks/expert-parallel.py [--ranks 2]

Runs chapters 3 and 12 as they are, on CPU processes in fp32, with a small Mixtral, and watches one
training step. Collectives are counted by their kind. Their number and their bytes (the mean over
the ranks) are also computed from the shape of the model, and must agree. So must the losses.

traffic   An all-gather or a reduce-scatter of S bytes on n ranks sends S (n - 1) / n per rank, with
          NCCL. So does an all-to-all of S bytes, if a router spreads the tokens evenly.
memory    The weights of experts that a rank computes with in a layer, and the largest sum of all
          tensors of a rank while experts compute.
"""

import argparse
import json
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
EP = REPOSITORY / "12-expert-parallel" / "train-llm.py"
STEP = 2  # the first one has more to do
SAMPLES = 4  # of a rank in a step
LENGTH = 128

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 32}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 2048}
SHAPE |= {"num_local_experts": 8, "num_experts_per_tok": 2}
MIXTRAL = SHAPE | {"model_type": "mixtral", "tie_word_embeddings": True}
MIXTRAL |= {"bos_token_id": 0, "eos_token_id": 0, "architectures": ["MixtralForCausalLM"]}


# -- In the process of a chapter -------------------------------------------------------------------


def watch(chapter: str, flags: list[str]) -> None:
    """Runs the chapter; each rank prints what it has seen in one step."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    # In `c10d` those of FSDP and of the script, in `_c10d_functional` those with autograd
    kinds = {
        "c10d::_allgather_base_": "all-gather",
        "c10d::_reduce_scatter_base_": "reduce-scatter",
        "c10d::alltoall_base_": "all-to-all of sizes",
        "_c10d_functional::all_to_all_single": "all-to-all of tokens",
    }
    # The last three: DTensor adds up norms, and the script its own numbers.
    silent = {"wait_tensor", "_wrap_tensor_autograd", "barrier", "allgather_", "broadcast_"}
    silent |= {"allreduce_", "all_reduce", "all_gather_into_tensor"}
    seen, steps, storages, memory = [], [], {}, {"experts": {}, "peak": 0}

    def alive() -> int:
        found = [reference() for reference in storages.values()]
        return sum(storage.nbytes() for storage in found if storage is not None)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if DTensor in types:
                return NotImplemented  # it calls operations on its parts, which come back here
            result = op(*args, **kwargs or {})
            tensors = [x for x in tree_leaves((args, kwargs, result)) if torch.is_tensor(x)]
            name = op.name().partition(".")[0]
            if name in kinds:
                largest = max(t.numel() * t.element_size() for t in tensors)
                if kinds[name] == "all-to-all of tokens":
                    largest = args[0].numel() * args[0].element_size()  # what this rank sends
                seen.append((kinds[name], largest))
            elif len(steps) < STEP and "c10d" in name and name.partition("::")[2] not in silent:
                raise NotImplementedError(name)
            for tensor in tensors:
                if tensor.device.type == "cpu":
                    storage = tensor.untyped_storage()
                    storages[storage._cdata] = weakref.ref(storage)
            return result

    original_grouped_mm = torch.nn.functional.grouped_mm

    def grouped_mm(tokens, weight, **options):
        memory["experts"][str(tuple(weight.shape))] = weight.numel() * weight.element_size()
        memory["peak"] = max(memory["peak"], alive())
        return original_grouped_mm(tokens, weight, **options)

    original_step = torch.optim.AdamW.step

    def step(self, *args, **options):
        result = original_step(self, *args, **options)
        steps.append(list(seen))
        seen.clear()
        if len(steps) == STEP:
            counts = {}
            for kind, nbytes in steps[-1]:
                count, total = counts.get(kind, (0, 0))
                counts[kind] = (count + 1, total + nbytes)
            experts = sum(memory["experts"].values())
            found = {"counts": counts, "experts": experts, "peak": memory["peak"]}
            # The chapters silence `sys.stdout` on ranks above 0.
            print("\nseen " + json.dumps(found), file=sys.__stdout__, flush=True)
        return result

    torch.nn.functional.grouped_mm, torch.optim.AdamW.step = grouped_mm, step
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
    """What the ranks have seen, on average, and the losses."""
    name = f"run-{len([*folder.glob('run-*')])}"
    flags = [*flags, "-m", folder / "model", "--from-scratch", "-d", REPOSITORY / "0*" / "*.py"]
    flags += ["-s", LENGTH, "-b", SAMPLES, "--max-steps", STEP, "--eval-freq", 0]
    flags += ["--log-freq", 1, "--lr", 1e-3, "-e", name, "--save-dir", folder]
    output = launch(processes, "--watch", script, *flags)
    ranks = [json.loads(seen) for seen in re.findall("^seen (.*)$", output, re.MULTILINE)]
    assert len(ranks) == processes
    counts = {}
    for kind, (number, _) in ranks[0]["counts"].items():
        # A rank sends back as many results as it has got tokens, so only the mean is computed.
        nbytes = sum(rank["counts"][kind][1] for rank in ranks) / processes
        counts[kind] = [number, nbytes]
    experts = max(rank["experts"] for rank in ranks)
    peak = max(rank["peak"] for rank in ranks)
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").open()]
    found = {"counts": counts, "experts": experts, "peak": peak}
    return found, [record["loss"] for record in records]


def expert_bytes() -> int:
    """Of the weights of all experts of a layer, in fp32: three matrices per expert."""
    experts = SHAPE["num_local_experts"]
    return 4 * 3 * experts * SHAPE["hidden_size"] * SHAPE["intermediate_size"]


def expected_traffic(ranks: int, size: int, passes: int) -> list[tuple[str, int, int, int]]:
    """Kind, number and bytes of the collectives of a step, and how many ranks share each.

    Groups of `size` ranks share the experts; 1 is chapter 3. A layer computes its forward pass once
    or, with activation checkpointing, twice.
    """
    hidden, layers = SHAPE["hidden_size"], SHAPE["num_hidden_layers"]
    experts = SHAPE["num_local_experts"]
    heads = SHAPE["num_attention_heads"] + SHAPE["num_key_value_heads"]
    others = 4 * (2 * heads * SHAPE["head_dim"] * hidden + experts * hidden + 2 * hidden)
    root = 4 * (SHAPE["vocab_size"] * hidden + hidden)
    if size == 1:  # experts are in the unit of their layer
        layer = others + expert_bytes()
        return [
            ("all-gather", 2 * layers + 1, 2 * layers * layer + root, ranks),
            ("reduce-scatter", layers + 1, layers * layer + root, ranks),
        ]
    expected = [
        ("all-gather", 2 * layers + 1, 2 * layers * others + root, ranks),
        ("reduce-scatter", layers + 1, layers * others + root, ranks),
    ]
    part = expert_bytes() // size
    if ranks > size:
        expected.append(("all-gather", 2 * layers, 2 * layers * part, ranks // size))
        expected.append(("reduce-scatter", layers, layers * part, ranks // size))
    # To the experts and back, in each forward pass and in the backward pass
    copies = 4 * SHAPE["num_experts_per_tok"] * SAMPLES * LENGTH * hidden
    messages = (2 * passes + 2) * layers
    expected.append(("all-to-all of tokens", messages, messages * copies, size))
    sizes = passes * layers
    expected.append(("all-to-all of sizes", sizes, sizes * 8 * experts, size))
    return expected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, choices=[2, 4], default=4, help="[4]")
    ranks = parser.parse_args().ranks
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "model").mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / "model" / name).write_bytes(
                (REPOSITORY / "models" / "tiny-llama" / name).read_bytes()
            )
        (folder / "model" / "config.json").write_text(json.dumps(MIXTRAL))
        cases = {"chapter 3": (FSDP, 1, []), f"groups of {ranks}": (EP, ranks, [])}
        if ranks == 4:
            cases["groups of 2"] = (EP, 2, [])
        again = ["--activation-checkpointing"]
        cases[f"groups of {ranks}, checkpointing"] = (EP, ranks, again)
        memory, first = [], None
        print(f"| {ranks} ranks | collective | number | computed | MB | computed | MB per rank |")
        print("|---|---|---|---|---|---|---|")
        for method, (script, size, others) in cases.items():
            flags = ["--expert-parallel", size] if script == EP else []
            seen, losses = run(script, ranks, folder, *flags, *others)
            first = first or losses
            if any(abs(a - b) > 1e-5 * a for a, b in zip(first, losses, strict=True)):
                sys.exit(f"error: the losses differ: {first}, {losses}")
            expected, sent = {}, {}
            for kind, count, nbytes, members in expected_traffic(ranks, size, 1 + len(others)):
                counts, total = expected.get(kind, (0, 0))
                expected[kind] = [counts + count, total + nbytes]
                sent[kind] = sent.get(kind, 0) + nbytes * (members - 1) / members
            if seen["counts"] != expected:
                sys.exit(f"error: {method}: {seen['counts']}, computed {expected}")
            for kind, (count, nbytes) in seen["counts"].items():
                computed = (
                    f"{expected[kind][0]} | {nbytes / 1e6:.3f} | {expected[kind][1] / 1e6:.3f}"
                )
                print(f"| {method} | {kind} | {count} | {computed} | {sent[kind] / 1e6:.3f} |")
            print(f"| {method} | together | | | | | {sum(sent.values()) / 1e6:.3f} |", flush=True)
            if seen["experts"] != expert_bytes() // size:
                sys.exit(f"error: {method}: experts of {seen['experts']} bytes")
            memory.append((method, seen["experts"], seen["peak"]))
        print("\n| MB per rank | experts of a layer | largest sum of all tensors |\n|---|---|---|")
        for method, experts, peak in memory:
            print(f"| {method} | {experts / 1e6:.3f} | {peak / 1e6:.1f} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--watch"]:
        watch(sys.argv[2], sys.argv[3:])
    else:
        main()
