"""Measures start and end of chapters 21 and 3: CPU memory of each rank, and seconds.

    torchrun --standalone --nproc-per-node 4 benchmarks/sharded-loading.py
    torchrun --standalone --nproc-per-node 4 benchmarks/sharded-loading.py --chapter 03

The model is a Llama or a Mixtral with random weights in bf16. Memory is the peak of `RssAnon` in
/proc above its value before, which leaves out files that are mapped into memory. `shard_gb` are the
weights of a rank, and `unit_gb` is the largest layer, the embeddings or the head, all in fp32. Of
the times, `seconds` are those of the slowest rank.
"""

import argparse
import ctypes
import gc
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from threading import Event, Thread

import torch
import torch.distributed as dist
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

REPOSITORY = Path(__file__).resolve().parents[1]
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CPU = torch.device("cpu")


def load(number: str):
    (script,) = [
        *REPOSITORY.glob(f"{number}-*/train-llm.py"),
        *REPOSITORY.glob(f"more/{number}-*/train-llm.py"),
    ]
    spec = importlib.util.spec_from_file_location("chapter", script)
    chapter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chapter)
    chapter.say = lambda message: None
    return chapter


def anonymous_bytes() -> int:
    return 1024 * int(re.search(r"RssAnon:\s*(\d+)", Path("/proc/self/status").read_text())[1])


class Peak:
    """The most memory that a block takes, in bytes above what the process had, and its time."""

    def __enter__(self):
        gc.collect()
        dist.barrier()
        self.before = self.peak = anonymous_bytes()
        self.begin = time.perf_counter(), time.process_time()
        self.done = Event()
        self.thread = Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        while not self.done.wait(0.001):
            self.peak = max(self.peak, anonymous_bytes())

    def __exit__(self, *_) -> None:
        self.seconds = time.perf_counter() - self.begin[0], time.process_time() - self.begin[1]
        self.done.set()
        self.thread.join()
        self.taken = self.peak - self.before


def report(name: str, peak: Peak, shard: int, unit: int) -> None:
    values = [None] * RANKS
    dist.all_gather_object(values, (peak.taken / 1e9, *peak.seconds))
    memory, seconds, cpu_seconds = zip(*values, strict=True)
    line = {"what": name, "ranks": RANKS, "shard_gb": shard / 1e9, "unit_gb": unit / 1e9}
    line |= {"gb": [round(x, 4) for x in memory], "seconds": round(max(seconds), 2)}
    line |= {"cpu_seconds": [round(x, 2) for x in cpu_seconds]}
    if RANK == 0:
        print(json.dumps(line), flush=True)


def start(chapter, args):
    if hasattr(chapter, "whole_weights"):  # chapter 3
        outline = chapter.load_model(args, checkpoint=None) if RANK == 0 else None
    else:
        outline = chapter.load_model(args, CPU)
    return outline, chapter.build_model(args, CPU, outline)


def finish(chapter, outline, model, checkpoint: Path, final: Path) -> None:
    if hasattr(chapter, "whole_weights"):
        weights = chapter.whole_weights(model)
        if RANK == 0:
            outline.save_pretrained(final, state_dict=weights)
        return
    if RANK == 0:
        outline.save_pretrained(final, state_dict={})
    dist.barrier()
    chapter.save_layers(outline, checkpoint, final)


def measure(chapter, folder: Path, quiet: bool = False) -> None:
    for name, more in {"pretrained": [], "from scratch": ["--from-scratch"]}.items():
        sys.argv = ["train-llm.py", "-m", str(folder), "--dtype", "fp32", *more]
        args = chapter.parse_args()
        with Peak() as peak:
            outline, model = start(chapter, args)
        sizes = [x.numel() * x.element_size() for x in model.parameters()]
        units = [model.model.layers[0], model.get_input_embeddings()]
        unit = max(sum(4 * x.numel() for x in part.parameters()) for part in units)
        if not quiet:
            report(name, peak, sum(sizes) // RANKS, unit)
        if more:
            break
        content = {"model": chapter.dcp_state.get_model_state_dict(model)}
        chapter.dcp.save(content, checkpoint_id=folder / "checkpoint")
        with Peak() as peak:
            finish(chapter, outline, model, folder / "checkpoint", folder / "final")
        if not quiet:
            report("final/", peak, 0, unit)
        del outline, model, content


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
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chapter", default="21", choices=["03", "21"])
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=64000)
    parser.add_argument("--experts", type=int, default=0, help="of each layer: a Mixtral")
    parser.add_argument("--tied", action="store_true", help="the head is the embeddings")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    ctypes.CDLL(None).mallopt(-3, 100_000)  # M_MMAP_THRESHOLD: freed tensors leave the process
    chapter = load(args.chapter)
    dist.init_process_group("gloo")
    folders = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(folders)
    folder = Path(folders[0])
    try:
        write(folder / "small", args, 2, 64)
        measure(chapter, folder / "small", quiet=True)  # imports what is imported late
        write(folder / "model", args, args.layers, args.hidden)
        measure(chapter, folder / "model")
    finally:
        if RANK == 0:
            shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
