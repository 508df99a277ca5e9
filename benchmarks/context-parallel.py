"""Chapter 11: the bytes of both exchanges, the memory of activations, and the cost of attention.

    python benchmarks/context-parallel.py traffic       # beside FSDP, on 2 and 4 processes
    python benchmarks/context-parallel.py memory        # beside chapters 3 and 6
    python benchmarks/context-parallel.py attention     # in one process

The first two run chapters as they are, on CPU processes, with a small Llama and one sample per
group, and watch the second training step of rank 0.

traffic     Number and bytes of the collectives of attention, and the bytes that a rank sends to
            other ranks. The same numbers are computed, and must be equal.
memory      Bytes of the tensors that exist after the forward pass and not before. So they are kept
            for the backward pass. On CPUs, `--exchange tokens` also keeps masks, which the kernels
            for GPUs do not need. A column of their own has the bytes of these masks.
attention   Seconds of the attention function in a decoder layer, forward and backward, and of the
            whole layer.

The losses of all runs of a table row must agree.
"""

import argparse
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
FSDP = REPOSITORY / "03-fsdp" / "train-llm.py"
TP = REPOSITORY / "06-tensor-parallel" / "train-llm.py"
CP = REPOSITORY / "11-context-parallel" / "train-llm.py"
STEP = 2  # the first step has more to do
FLAGS = [[], ["--activation-checkpointing"]]  # of the rows of `memory`

SHAPE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "head_dim": 32}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 2048}
LLAMA = SHAPE | {"model_type": "llama", "tie_word_embeddings": True}
LLAMA |= {"bos_token_id": 0, "eos_token_id": 0, "architectures": ["LlamaForCausalLM"]}
LLAMA |= {"max_position_embeddings": 131_072}

# DTensor and chapter 11 use these functions. FSDP uses functions with other names.
KINDS = {
    "_c10d_functional::all_to_all_single": "all-to-all",
    "_c10d_functional::all_gather_into_tensor": "all-gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce-scatter",
}


# -- In the process of a chapter -------------------------------------------------------------------


def watch(chapter: str, flags: list[str]) -> None:
    """Runs the chapter. Rank 0 prints the numbers of one step."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    storages, masks, counts, kept, steps = {}, set(), {}, {}, []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if DTensor in types:
                return NotImplemented  # its operations on parts come back here
            kwargs = kwargs or {}
            result = op(*args, **kwargs)
            tensors = [x for x in tree_leaves((args, kwargs, result)) if torch.is_tensor(x)]
            name = op.name().partition(".")[0]
            if name in KINDS:
                number, size = counts.get(KINDS[name], (0, 0))
                size += max(tensor.nbytes for tensor in tensors)  # of the whole tensor
                counts[KINDS[name]] = (number + 1, size)
            if "scaled_dot_product" in name and kwargs.get("attn_mask") is not None:
                masks.add(kwargs["attn_mask"].untyped_storage()._cdata)
            for tensor in tensors:
                if tensor.device.type == "cpu":
                    storage = tensor.untyped_storage()
                    storages[storage._cdata] = weakref.ref(storage)
            return result

    def held(which=storages) -> int:
        found = [storages[key]() for key in which]
        return sum(storage.nbytes() for storage in found if storage is not None)

    train, step = torch.nn.Module.train, torch.optim.AdamW.step

    def watched_train(self, mode=True):
        if hasattr(self, "lm_head") and "forward" not in self.__dict__:
            forward = self.forward

            def watched(*args, **options):
                masks.clear()
                before = held()
                result = forward(*args, **options)
                kept.update(kept=held() - before, masks=held(masks))
                return result

            self.forward = watched
            Watch().__enter__()  # not before: the mode prevents the construction of mask objects
        return train(self, mode)

    def watched_step(self, *args, **options):
        result = step(self, *args, **options)
        steps.append(dict(counts))
        counts.clear()
        if len(steps) == STEP and os.environ["RANK"] == "0":
            print("\nseen " + json.dumps({"collectives": steps[-1]} | kept), flush=True)
        return result

    torch.nn.Module.train, torch.optim.AdamW.step = watched_train, watched_step
    sys.argv = [chapter, *flags]
    runpy.run_path(chapter, run_name="__main__")


# -- The tables ------------------------------------------------------------------------------------


def launch(processes: int, *arguments) -> str:
    """Runs this file in processes; returns their output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*map(str, [*command, "--nproc-per-node", processes, __file__, *arguments])]
    env = os.environ | {"COMET_AUTO_LOG_DISABLE": "true", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        sys.exit(f"error: {' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def run(script: Path, processes: int, length: int, folder: Path, *flags) -> dict:
    """The numbers of rank 0, and the losses."""
    name = f"run-{len([*folder.glob('run-*')])}"
    flags = [*flags, "-m", folder / "model", "--from-scratch", "-d", REPOSITORY / "0*" / "*.py"]
    flags += ["-s", length, "-b", 1, "--max-steps", STEP, "--eval-freq", 0, "--log-freq", 1]
    flags += ["-e", name, "--save-dir", folder]
    output = launch(processes, "--watch", script, *flags)
    (seen,) = re.findall("^seen (.*)$", output, re.MULTILINE)
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").open()]
    return json.loads(seen) | {"losses": [record["loss"] for record in records]}


def check_losses(runs: list[dict]) -> None:
    first, *others = (found["losses"] for found in runs)
    for other in others:
        if any(abs(a - b) > 1e-5 * a for a, b in zip(first, other, strict=True)):
            sys.exit(f"error: the losses differ: {first}, {other}")


def expected_traffic(exchange: str, n: int, tokens: int, checkpointing: bool) -> dict:
    """Number and bytes of the whole tensors of the collectives of attention, in one step in fp32.

    `tokens`: those of all samples of a group, in all micro-batches of a step, here one."""
    layers = SHAPE["num_hidden_layers"]
    queries = SHAPE["num_attention_heads"] * SHAPE["head_dim"]  # numbers per token
    keys = SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
    forwards = 2 if checkpointing else 1
    if exchange == "heads":
        # The queries, keys, values and the output of the tokens of a rank, forward and backward
        bytes_of_layer = 4 * tokens // n * 2 * (queries + keys)
        return {
            "all-to-all": (4 * layers * (forwards + 1), layers * bytes_of_layer * (forwards + 1))
        }
    bytes_of_layer = 4 * tokens * 2 * keys  # keys and values of all tokens
    return {
        "all-gather": (layers * forwards, layers * bytes_of_layer * forwards),
        "reduce-scatter": (layers, layers * bytes_of_layer),
    }


def traffic(folder: Path, args) -> None:
    titles = ["ranks", "N", "exchange", "flags", "collective", "number", "computed"]
    titles += ["MB, whole tensors", "computed", "MB sent by a rank"]
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    length = args.lengths[0]
    for ranks in args.ranks:
        for n in (2, 4)[: ranks // 2]:
            for exchange in ("heads", "tokens"):
                for flags in FLAGS:
                    options = ["--context-parallel", n, "--exchange", exchange, *flags]
                    seen = run(CP, ranks, length, folder, *options)["collectives"]
                    expected = expected_traffic(exchange, n, length, bool(flags))
                    if seen != {kind: [*counts] for kind, counts in expected.items()}:
                        sys.exit(f"error: {options}: {seen}, computed {expected}")
                    for kind, (number, size) in seen.items():
                        cells = [ranks, n, exchange, " ".join(flags), kind, number]
                        computed_number, computed_size = expected[kind]
                        cells += [
                            computed_number,
                            f"{size / 1e6:.3f}",
                            f"{computed_size / 1e6:.3f}",
                        ]
                        cells.append(f"{(n - 1) / n * size / 1e6:.3f}")
                        print("|", *(f"{cell} |" for cell in cells), flush=True)


def memory(folder: Path, args) -> None:
    titles = ["activations kept, MB per rank", "one process, chapter 3", "chapter 6"]
    titles += ["exchange heads", "exchange tokens, without masks", "masks"]
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    for length in args.lengths:
        for flags in FLAGS:
            whole = run(FSDP, 1, length, folder, *flags)
            for n in args.ranks:
                runs = [whole, run(TP, n, length, folder, *flags)]
                for exchange in ("heads", "tokens"):
                    runs.append(run(CP, n, length, folder, "--exchange", exchange, *flags))
                check_losses(runs)
                kept = [(found["kept"] - found["masks"]) / 1e6 for found in runs]
                kept.append(runs[-1]["masks"] / 1e6)
                cells = " | ".join(f"{x:.2f}" for x in kept)
                name = f"{length:,} tokens, N = {n} {' '.join(flags)}".rstrip()
                print(f"| {name} | {cells} |", flush=True)


def attention(folder: Path, args) -> None:
    """Attention computes 2 S d operations per token and layer, forward, with S tokens and heads of
    d numbers together, and the matrices compute 2 per weight."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    config = AutoConfig.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_config(config).model
    layer = model.layers[0]
    weights = sum(weight.numel() for weight in layer.parameters() if weight.dim() == 2)
    width = config.num_attention_heads * config.head_dim
    print(f"As many operations in attention as in the matrices: at {weights // width:,} tokens\n")
    print("| tokens | layer, s | attention function, s | share | share of operations |")
    print("|---|---|---|---|---|")

    def best(function) -> float:
        times = []
        for _ in range(args.rounds):
            begin = time.perf_counter()
            function().sum().backward()
            times.append(time.perf_counter() - begin)
        return min(times)

    for length in args.lengths:
        x = torch.randn(1, length, config.hidden_size, requires_grad=True)
        positions = torch.arange(length)[None]
        rotation = model.rotary_emb(x, positions)
        options = {"position_ids": positions, "position_embeddings": rotation}
        heads = [config.num_attention_heads, *[config.num_key_value_heads] * 2]
        qkv = [torch.randn(1, n, length, config.head_dim, requires_grad=True) for n in heads]
        sdpa = torch.nn.functional.scaled_dot_product_attention
        whole = best(lambda: layer(x, **options))  # noqa: B023
        alone = best(lambda: sdpa(*qkv, is_causal=True, enable_gqa=True))  # noqa: B023
        share = length * width / (length * width + weights)
        print(f"| {length:,} | {whole:.3f} | {alone:.3f} | {alone / whole:.2f} | {share:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["traffic", "memory", "attention"])
    parser.add_argument("--ranks", type=int, nargs="+", choices=[2, 4], default=[2, 4])
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of a sample")
    parser.add_argument("--rounds", type=int, default=5, help="of attention; the fastest counts")
    args = parser.parse_args()
    defaults = {
        "traffic": [1024],
        "memory": [1024, 8192],
        "attention": [512, 1024, 2048, 4096, 8192],
    }
    args.lengths = args.lengths or defaults[args.what]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "model").mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / "model" / name).write_bytes(
                (REPOSITORY / "models" / "tiny-llama" / name).read_bytes()
            )
        (folder / "model" / "config.json").write_text(json.dumps(LLAMA))
        {"traffic": traffic, "memory": memory, "attention": attention}[args.what](folder, args)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--watch"]:
        watch(sys.argv[2], sys.argv[3:])
    else:
        main()
