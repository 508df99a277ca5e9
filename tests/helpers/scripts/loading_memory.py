"""The memory that start and end of chapter 21 take on the ranks of a job; or the start of 22.

The model is a Llama or a Mixtral with random weights in bf16. Memory is the peak of `RssAnon` in
/proc above its value before, which leaves out files that are mapped into memory. `shard_gb` are the
weights of a rank, and `unit_gb` is the largest layer, the embeddings or the head, all in fp32.
`read` is how many numbers a rank has read from the files, relative to those that it keeps. For
chapter 22, the files have each type.
"""

import argparse
import ctypes
import gc
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from threading import Event, Thread

import torch
import torch.distributed as dist
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig
from transformers.distributed.sharding_utils import DtensorShardOperation

sys.path.append(str(Path(__file__).resolve().parents[3] / "tools"))
from models import load_chapter

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CPU = torch.device("cpu")


def anonymous_bytes() -> int:
    return 1024 * int(re.search(r"RssAnon:\s*(\d+)", Path("/proc/self/status").read_text())[1])


class Peak:
    """The most memory that a block takes, in bytes above what the process had."""

    def __enter__(self):
        gc.collect()
        dist.barrier()
        self.before = self.peak = anonymous_bytes()
        self.done = Event()
        self.thread = Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        while not self.done.wait(0.001):
            self.peak = max(self.peak, anonymous_bytes())

    def __exit__(self, *_) -> None:
        self.done.set()
        self.thread.join()
        self.taken = self.peak - self.before


def count_reads() -> list[int]:
    """How many numbers Transformers reads for each tensor, from now on."""
    counts = []

    def read(*args, **options):
        rows = original(*args, **options)
        counts.append(0 if rows is None else rows.numel())  # None: the expert of another rank
        return rows

    original = DtensorShardOperation.shard_tensor
    DtensorShardOperation.shard_tensor = read
    return counts


def report(name: str, peak: Peak, shard: int, unit: int, read: float = 0) -> None:
    values = [None] * RANKS
    dist.all_gather_object(values, (peak.taken / 1e9, read))
    memory, reads = zip(*values, strict=True)
    line = {"what": name, "shard_gb": shard / 1e9, "unit_gb": unit / 1e9, "gb": memory}
    line["read"] = reads
    if RANK == 0:
        print(json.dumps(line), flush=True)


def measure(chapter, folder: Path, reads: list[int], quiet: bool = False) -> None:
    for name, more in {"pretrained": [], "from scratch": ["--from-scratch"]}.items():
        sys.argv = ["train-llm.py", "-m", str(folder), "--dtype", "fp32", *more]
        reads.clear()
        args = chapter.parse_args()
        with Peak() as peak:
            model = chapter.build_model(args, CPU, checkpoint=None)
        sizes = [x.numel() * x.element_size() for x in model.parameters()]
        units = [model.model.layers[0], model.get_input_embeddings()]
        unit = max(sum(4 * x.numel() for x in part.parameters()) for part in units)
        if not quiet:
            own = sum(x.to_local().numel() for x in model.parameters())
            report(name, peak, sum(sizes) // RANKS, unit, sum(reads) / own)
        if more:
            break
        content = {"model": chapter.dcp_state.get_model_state_dict(model)}
        chapter.dcp.save(content, checkpoint_id=folder / "checkpoint")
        with Peak() as peak:
            if RANK == 0:
                model.save_pretrained(folder / "final", state_dict={})
            dist.barrier()
            chapter.save_layers(model, folder / "checkpoint", folder / "final")
        if not quiet:
            report("final/", peak, 0, unit)
        del model, content


def measure_in_4_bits(chapter, folder: Path, reads: list[int], quiet: bool = False) -> None:
    for name, dtype in chapter.DTYPES.items():
        if RANK == 0:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
            weights = sum(x.numel() for x in model.parameters())
            model.save_pretrained(folder / name)
            del model
        dist.barrier()
        sys.argv = ["train-llm.py", "-m", str(folder / name), "--dtype", "bf16"]
        args = chapter.parse_args()
        args.packed = True
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # so that no memory of the run before is used again
        with Peak() as peak:
            model = chapter.build_model(args, CPU, checkpoint=None)
        shard = sum(x.to_local().nbytes for x in model.parameters())
        memory = [None] * RANKS
        dist.all_gather_object(memory, peak.taken / 1e9)
        if RANK == 0 and not quiet:
            line = {"what": name, "shard_gb": shard / 1e9, "16 bits gb": 2 * weights / 1e9}
            print(json.dumps(line | {"gb": memory}), flush=True)
        del model


def write(folder: Path, args, layers: int, hidden: int) -> None:
    if RANK == 0:
        sizes = {"intermediate_size": 3 * hidden}
        if args.experts:
            sizes = {"intermediate_size": hidden, "num_local_experts": args.experts}
        config = (MixtralConfig if args.experts else LlamaConfig)(
            vocab_size=args.vocabulary if hidden > 64 else 64,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 16,
            num_key_value_heads=hidden // 32,
            tie_word_embeddings=args.tied,
            **sizes,
        )
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=24000)
    parser.add_argument("--experts", type=int, default=0, help="of each layer: a Mixtral")
    parser.add_argument("--tied", action="store_true", help="the head is the embeddings")
    parser.add_argument("--in-4-bits", action="store_true", help="chapter 22")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    ctypes.CDLL(None).mallopt(-3, 100_000)  # M_MMAP_THRESHOLD: freed tensors leave the process
    chapter = load_chapter(22 if args.in_4_bits else 21)
    chapter.say = lambda message: None
    dist.init_process_group("gloo")
    reads = count_reads()
    folders = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(folders)
    folder = Path(folders[0])
    take = measure_in_4_bits if args.in_4_bits else measure
    try:
        write(folder / "small", args, 2, 64)
        take(chapter, folder / "small", reads, quiet=True)  # imports what is imported late
        write(folder / "model", args, 12 if args.in_4_bits else 3, 512)
        take(chapter, folder / "model", reads)
    finally:
        if RANK == 0:
            shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
