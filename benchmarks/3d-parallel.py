"""Chapter 13: which dimension sends what, in one training step.

    python benchmarks/3d-parallel.py                     # 2 stages, 2 pipelines, groups of 2
    python benchmarks/3d-parallel.py --layout 2 1 2      # one pipeline, on 4 processes

It runs the chapter as it is, on CPU processes, with a small Llama in fp32, and watches the second
step. For the first and the last rank, it prints the number and the bytes of each kind of collective
or message. Bytes of a collective are those of the whole tensor. Both are also computed from the
shape of the model, and must agree.
"""

import argparse
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
CHAPTER = REPOSITORY / "13-3d-parallel" / "train-llm.py"
STEP = 2  # the first one has more to do
TOKENS = 128  # of a sample
BYTES = 4  # of a number

SHAPE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "head_dim": 32}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 2048}
LLAMA = SHAPE | {"model_type": "llama", "tie_word_embeddings": True}
LLAMA |= {"bos_token_id": 0, "eos_token_id": 0, "architectures": ["LlamaForCausalLM"]}

# `c10d` has the calls of FSDP, of the pipeline and of the script. `_c10d_functional` has those of
# DTensor, so of tensor parallelism.
KINDS = {
    "c10d::_allgather_base_": "data: all-gather of weights",
    "c10d::_reduce_scatter_base_": "data: reduce-scatter of gradients",
    "_c10d_functional::all_gather_into_tensor": "tensor: all-gather",
    "_c10d_functional::reduce_scatter_tensor": "tensor: reduce-scatter",
    "c10d::send": "pipeline: send",
    "c10d::recv_": "pipeline: receive",
    "c10d::broadcast_": "tied head: broadcast of weights",
    "c10d::reduce_": "tied head: reduce of gradients",
}


# -- In the process of a chapter -------------------------------------------------------------------


def watch(chapter: str, flags: list[str]) -> None:
    """Runs the chapter; each rank prints what it has seen in one step."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    seen = []
    steps = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if DTensor in types:
                return NotImplemented  # it calls operations on its parts, which come back here
            result = op(*args, **kwargs or {})
            name = op.name().partition(".")[0]
            if name in KINDS:
                tensors = [x for x in tree_leaves((args, kwargs, result)) if torch.is_tensor(x)]
                seen.append((KINDS[name], max(x.numel() * x.element_size() for x in tensors)))
            return result

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
            # The chapters silence `sys.stdout` on ranks above 0.
            print(
                f"\nseen by {os.environ['RANK']}: {json.dumps(counts)}",
                file=sys.__stdout__,
                flush=True,
            )
        return result

    torch.optim.AdamW.step = step
    sys.argv = [chapter, *flags]
    with Watch():
        runpy.run_path(chapter, run_name="__main__")


# -- The table -------------------------------------------------------------------------------------


def launch(processes: int, *arguments) -> str:
    """Runs this file in processes; returns what they print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*map(str, [*command, "--nproc-per-node", processes, __file__, *arguments])]
    env = os.environ | {"COMET_AUTO_LOG_DISABLE": "true", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        sys.exit(f"error: {' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def expected(layout: list[int], micro_batches: int, samples: int, is_last: bool) -> dict:
    """Number and bytes of each kind, of a rank of the first or of the last stage."""
    stages, pipelines, size = layout
    hidden = SHAPE["hidden_size"]
    layers = SHAPE["num_hidden_layers"] // stages
    heads = SHAPE["num_attention_heads"] + SHAPE["num_key_value_heads"]
    matrices = 2 * heads * SHAPE["head_dim"] * hidden + 3 * SHAPE["intermediate_size"] * hidden
    layer = BYTES * (matrices // size + 2 * hidden)  # norms are whole on each rank of a group
    embeddings = BYTES * SHAPE["vocab_size"] * hidden // size
    stage = layers * layer + embeddings
    if is_last:
        stage += BYTES * hidden  # the last norm
    activations = BYTES * samples * TOKENS * hidden
    found = {}
    if size > 1:
        # Each layer has 4 per micro-batch, forward and backward. The embeddings or the head have 1.
        count = micro_batches * (4 * layers + 1)
        found["tensor: all-gather"] = (count, count * activations)
        found["tensor: reduce-scatter"] = (count, count * activations)
    if pipelines > 1:
        # The layers, and the root with the embeddings or the head
        found["data: all-gather of weights"] = (layers + 1, stage)
        found["data: reduce-scatter of gradients"] = (layers + 1, stage)
    if stages > 1:
        messages = (micro_batches, micro_batches * activations // size)
        found["pipeline: send"] = messages
        found["pipeline: receive"] = messages
        found["tied head: broadcast of weights"] = (1, embeddings // pipelines)
        found["tied head: reduce of gradients"] = (1, embeddings // pipelines)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = ("STAGES", "PIPELINES", "GROUP")
    parser.add_argument("--layout", type=int, nargs=3, default=[2, 2, 2], metavar=names)
    args = parser.parse_args()
    stages, pipelines, size = args.layout
    if stages not in (1, 2):
        parser.error("--layout must have one or two stages")
    samples, micro_batches = 2, 2
    processes = stages * pipelines * size
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "model").mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / "model" / name).write_bytes(
                (REPOSITORY / "models" / "tiny-llama" / name).read_bytes()
            )
        (folder / "model" / "config.json").write_text(json.dumps(LLAMA))
        flags = ["-m", folder / "model", "--from-scratch", "-d", REPOSITORY / "0*" / "*.py"]
        flags += ["-s", TOKENS, "-b", samples, "--gradient-accumulation-steps", micro_batches]
        flags += ["--pipeline-parallel", stages, "--tensor-parallel", size]
        flags += ["--max-steps", STEP, "--eval-freq", 0]
        output = launch(processes, "--watch", CHAPTER, *flags)
    print("| rank | what | number | computed | MB | computed |\n|---|---|---|---|---|---|")
    for rank in (0, processes - 1):
        (seen,) = re.findall(f"^seen by {rank}: (.*)$", output, re.MULTILINE)
        seen = json.loads(seen)
        computed = expected(args.layout, micro_batches, samples, is_last=rank > 0)
        for kind in KINDS.values():
            count, nbytes = seen.get(kind, (0, 0))
            computed_count, computed_bytes = computed.get(kind, (0, 0))
            cells = [rank, kind, count, computed_count, f"{nbytes / 1e6:.3f}"]
            cells.append(f"{computed_bytes / 1e6:.3f}")
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
            # FSDP on one rank calls its collectives, too, and sends nothing.
            if kind in computed and (count, nbytes) != (computed_count, computed_bytes):
                sys.exit("error: the last row is not what the shape of the model gives")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--watch"]:
        watch(sys.argv[2], sys.argv[3:])
    else:
        main()
