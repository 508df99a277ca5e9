"""Turns a checkpoint into another format or a Transformers folder. Not of chapters 9, 14, 17, 22.

    python tools/convert-checkpoint.py outputs/a/step-00000500 outputs/b/step-00000500 --to full
    python tools/convert-checkpoint.py outputs/a/step-00000500 outputs/b/step-00000500 \
        --to local --ranks 16 --shard-size 8
    python tools/convert-checkpoint.py outputs/a/step-00000500 model --to transformers

| format | of chapters | files |
|---|---|---|
| shard | 3 to 7, 10 to 13, 15, 16 | one file for each of --ranks, and an index |
| full | 5, 10 | one file with all tensors, and an index |
| local | 5, 10, 15 | a folder of the run for each of --ranks, with the same step in each |
| single | 1, 2 and 8 | a Transformers folder and training_state.pt |
| transformers | none | a Transformers folder: nothing to resume from |

A *local* checkpoint is named like the others: `outputs/a/step-00000500` stands for the folders
`outputs/a/rank-*/step-00000500`. Collect those of all nodes first. Chapters 1, 2, 3 and 5 read the
same samples, so each of them can go on with a run of the others. Chapters 4 and 10 read other rows,
and refuse such a run. Chapter 15 has weights and moments of each replica, which chapters 1 and 2
cannot read.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import warnings
from itertools import chain
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import transformers
from generate import refuse_parts
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_map_only
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from models import positive

FORMATS = ["shard", "full", "local", "single", "transformers"]
# What the writers of the formats make by themselves; all other files are copied
OWN_FILES = [".metadata", "*.distcp", "training_state.pt"]
OWN_FILES += ["*.safetensors", "*.safetensors.index.json"]
# What chapters 1 and 2 know of a run
STATE = ("step", "samples", "epoch", "comet_key")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Converts checkpoints.")
    add = parser.add_argument
    add("source", type=Path, help="a step-* folder")
    add("destination", type=Path, help="a new folder")
    add("--to", choices=FORMATS, required=True)
    add("--ranks", type=positive(int), default=1, help="which read it, or files [%(default)s]")
    add("--shard-size", type=positive(int), help="as in chapter 5; by default, all ranks")
    args = parser.parse_args()
    args.shard_size = args.shard_size or args.ranks
    if args.ranks % args.shard_size:
        parser.error("--shard-size has to divide --ranks")
    if args.to == "local" and not args.destination.name.startswith("step-"):
        parser.error("a local checkpoint needs the name of a step: .../step-00000500")
    return args


# -- Reading: always the whole state, with the names of the parameters -----------------------------


def local_folders(checkpoint: Path) -> list[Path]:
    folders = checkpoint.parent.glob(f"rank-*/{checkpoint.name}")
    return sorted(folders, key=lambda folder: int(folder.parent.name.removeprefix("rank-")))


def read(checkpoint: Path) -> dict:
    """{"model": ..., "optimizer": ..., "scaler": ...} with whole tensors."""
    if (checkpoint / ".metadata").exists():
        return read_dcp(checkpoint)
    if (checkpoint / "training_state.pt").exists():
        return read_single(checkpoint)
    if folders := local_folders(checkpoint):
        return read_local(folders)
    sys.exit(f"error: {checkpoint} is no checkpoint of these chapters: all but 9, 14, 17 and 22")


def read_dcp(checkpoint: Path) -> dict:
    with tempfile.TemporaryDirectory(dir=checkpoint.parent) as folder:
        file = os.path.join(folder, "whole.pt")
        dcp_to_torch_save(checkpoint, file)
        return torch.load(file, weights_only=False)


def read_local(folders: list[Path]) -> dict:
    numbers = [int(folder.parent.name.removeprefix("rank-")) for folder in folders]
    incomplete = f"error: collect {folders[0].name} of all ranks: only {numbers} are here"
    if numbers != [*range(len(folders))]:
        sys.exit(incomplete)
    parts = [read_dcp(folder) for folder in folders]
    shapes = {name: x.shape for name, x in empty_model(folders[0]).state_dict().items()}
    try:
        return joined(parts, shapes)
    except LookupError:
        sys.exit(incomplete)


def joined(values: list, shapes: dict, parameter: str = ""):
    """The whole of these values, one of each rank. Below a parameter's name are its moments."""
    if isinstance(values[0], dict):
        whole = {}
        for name in dict.fromkeys(chain(*values)):  # chapter 15: replicas have names of their own
            own = name if name in shapes else parameter
            whole[name] = joined([value[name] for value in values if name in value], shapes, own)
        return whole
    if isinstance(values[0], torch.Tensor) and values[0].dim() > 0:
        return join_shards(values, parameter, shapes[parameter])
    return values[0]


def join_shards(shards: list[torch.Tensor], name: str, shape: torch.Size) -> torch.Tensor:
    """The tensor of this shape. The first ranks hold the first copy of the model."""
    taken = []
    rows = 0
    while rows < shape[0]:
        if len(taken) == len(shards):
            raise LookupError
        taken.append(shards[len(taken)])
        rows += len(taken[-1])
    whole = torch.cat(taken)
    if whole.shape != shape:
        sys.exit(f"error: shards of {name} make {tuple(whole.shape)}, not {tuple(shape)}")
    return whole


def read_single(checkpoint: Path) -> dict:
    state = torch.load(checkpoint / "training_state.pt", weights_only=True)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    names = parameter_names(model)
    optimizer = state["optimizer"]
    for group in optimizer["param_groups"]:
        group["params"] = [names[number] for number in group["params"]]
    optimizer["state"] = {names[number]: moments for number, moments in optimizer["state"].items()}
    return state | {"model": model.state_dict()}


def empty_model(checkpoint: Path):
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(checkpoint)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def parameter_names(model) -> list[str]:
    """In the order of the chapters' optimizer: matrices, then biases and norms."""
    parameters = [*model.named_parameters()]
    return [name for matrix in (True, False) for name, p in parameters if (p.dim() > 1) == matrix]


# -- Writing ---------------------------------------------------------------------------------------


def write_dcp(state: dict, folder: Path, files: int = 1) -> None:
    writer = dcp.FileSystemWriter(folder, thread_count=files)
    dcp.save(state, storage_writer=writer, no_dist=True)


def shard(state: dict, number: int, count: int) -> dict:
    """The shards of one rank, cut by rows as FSDP cuts them."""

    def part(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0:  # AdamW's count of steps
            return tensor
        parts = torch.chunk(tensor, count)
        part = parts[number] if number < len(parts) else tensor[:0]
        return part.clone(memory_format=torch.contiguous_format)

    return tree_map_only(torch.Tensor, part, state)


def write_transformers(state: dict, folder: Path, source: Path) -> None:
    model = empty_model(source)
    weights = {n: x for n, x in state["model"].items() if n not in model.all_tied_weights_keys}
    model.save_pretrained(folder, state_dict=weights)


def write_by_layers(folder: Path, source: Path) -> None:
    """A Transformers folder from a sharded checkpoint, with a file and the memory of one layer.

    The names in files are those of Transformers, which may split or join tensors of a layer. Tied
    weights stand there once. Tensors outside of the layers, such as embeddings, come one by one.
    """
    model = empty_model(source)
    model.save_pretrained(folder, state_dict={})  # config and generation settings, no weights
    pieces: dict[str, dict] = {}
    for name, tensor in model.state_dict().items():
        if name not in model.all_tied_weights_keys:
            layer = re.match(r".*?\.\d+\.", name)
            pieces.setdefault(layer[0] if layer else name, {})[name] = tensor
    file_of = {}
    for number, piece in enumerate(pieces.values(), 1):
        weights = {name: torch.empty_like(tensor, device="cpu") for name, tensor in piece.items()}
        dcp.load({"model": weights}, checkpoint_id=source, no_dist=True)
        weights = revert_weight_conversion(model, weights)
        file = f"model-{number:05}-of-{len(pieces):05}.safetensors"
        contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
        save_file(contiguous, folder / file, metadata={"format": "pt"})
        file_of |= dict.fromkeys(weights, file)
    index = {"metadata": {}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def write_single(state: dict, folder: Path, source: Path) -> None:
    write_transformers(state, folder, source)
    numbers = {name: n for n, name in enumerate(parameter_names(empty_model(source)))}
    optimizer = state["optimizer"]
    groups = [
        group | {"params": [numbers[name] for name in group["params"]]}
        for group in optimizer["param_groups"]
    ]
    moments = {numbers[name]: moments for name, moments in optimizer["state"].items()}
    training_state = {
        "optimizer": {"state": dict(sorted(moments.items())), "param_groups": groups},
        # torch.distributed.checkpoint leaves out what is empty
        "scaler": state.get("scaler", {}),
    }
    torch.save(training_state, folder / "training_state.pt")


def copy_other_files(source: Path, folder: Path, to: str) -> None:
    """Config, tokenizer, the place of the run and its metrics."""
    for file in source.iterdir():
        if file.is_file() and not any(file.match(pattern) for pattern in OWN_FILES):
            shutil.copy(file, folder)
    file = folder / "state.json"
    if to == "transformers":
        for name in ("state.json", "parameters.json", "metrics.jsonl"):
            (folder / name).unlink(missing_ok=True)
    elif to == "single":
        state = json.loads(file.read_text())
        file.write_text(json.dumps({name: state[name] for name in STATE}, indent=2))


def convert(source: Path, folder: Path, state: dict, args: argparse.Namespace, rank: int) -> None:
    """Writes under another name, and renames what is complete."""
    temporary = folder.with_name(f"{folder.name}.incomplete")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    if not state:
        write_by_layers(temporary, source)
    elif args.to == "transformers":
        write_transformers(state, temporary, source)
    elif args.to == "single":
        write_single(state, temporary, source)
    elif args.to == "local":
        write_dcp(shard(state, rank % args.shard_size, args.shard_size), temporary)
    else:
        write_dcp(state, temporary, args.ranks if args.to == "shard" else 1)
    copy_other_files(source, temporary, args.to)
    temporary.rename(folder)


def main() -> None:
    args = parse_args()
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    transformers.logging.disable_progress_bar()
    if args.destination.exists() or local_folders(args.destination):
        sys.exit(f"error: {args.destination} exists, in this or in another format")
    source = args.source
    if not source.exists():
        source = next(iter(local_folders(source)), source)
    refuse_parts(source)
    by_layers = args.to == "transformers" and (args.source / ".metadata").exists()
    state = {} if by_layers else read(args.source)
    if args.to == "single" and "optimizer" not in state:
        reason = "its state is one of replicas, of chapter 15"
        sys.exit(f"error: {args.source} cannot become `single`: {reason}")
    folders = [args.destination]
    if args.to == "local":
        run, step = args.destination.parent, args.destination.name
        folders = [run / f"rank-{rank}" / step for rank in range(args.ranks)]
    for rank, folder in enumerate(folders):
        convert(source, folder, state, args, rank)
    print(f"wrote {args.destination} ({args.to})")


if __name__ == "__main__":
    main()
