"""What all peers share, so that each does the work of chapter 1: its samples in its order,
its initial weights, and a clock.

`benchmarks/run.py` starts every peer, with chapter 1's own flags and `--warmup`, on one device as a
script and on more with torchrun. A peer prints one JSON object.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path

os.environ["COMET_DISABLE_AUTO_LOGGING"] = "1"

import datasets
import numpy as np
import psutil
import torch
import transformers
from torch.utils.data import Dataset

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
from models import load_chapter, script_of

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Samples(Dataset):
    """Chapter 1's samples in chapter 1's order, as rows of `input_ids` and `labels`."""

    def __init__(self, tokens, order, size: int):
        self.tokens = tokens
        self.order = order
        self.size = size

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        sample = self.tokens.slice(self.order[number] * self.size, self.size)
        token_ids = torch.from_numpy(sample.to_numpy().astype("int64"))
        return {"input_ids": token_ids, "labels": token_ids}


class Clock:
    """Tokens per second of the median window of `window` steps after the warm-up, whole job."""

    def __init__(self, args, warmup: int, window: int = 5):
        samples = args.batch_size * WORLD_SIZE * args.gradient_accumulation_steps
        self.tokens_per_step = samples * args.seq_length
        self.warmup, self.window, self.steps, self.times = warmup, window, 0, []

    def step(self) -> None:
        """To be called after each optimizer step."""
        self.steps += 1
        if self.steps >= self.warmup and (self.steps - self.warmup) % self.window == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())

    def tokens_per_second(self) -> float:
        seconds = [b - a for a, b in zip(self.times, self.times[1:], strict=False)]
        return self.window * self.tokens_per_step / statistics.median(seconds)


def set_up(*own_flags: str):
    """The peer's own switches, chapter 1's flags, the dataset and the model with initial weights.

    `--batch-size` is that of a device, as in the chapters.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--warmup", type=int, required=True)
    for flag in own_flags:
        parser.add_argument(flag, action="store_true")
    own, chapter_flags = parser.parse_known_args()
    chapter_1 = load_chapter(1)
    sys.argv = [str(script_of(1)), *chapter_flags]
    args = chapter_1.parse_args()
    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(args.device)
    args.dtype = args.dtype or ("fp32" if device.type == "cpu" else "bf16")  # as in chapter 1
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model_name)
    tokens, _ = chapter_1.load_tokens(args, tokenizer)
    samples = len(tokens) // args.seq_length
    epochs = range(0, args.num_epochs, 2)  # sample_order() draws two of them
    order = np.concatenate([chapter_1.sample_order(args.seed, n, samples) for n in epochs])
    count = args.max_steps * args.batch_size * WORLD_SIZE * args.gradient_accumulation_steps
    dataset = Samples(tokens, order[:count], args.seq_length)
    model = chapter_1.load_model(args, checkpoint=None).to(device)
    return own, args, dataset, model, Clock(args, own.warmup)


def report(clock: Clock, losses: list[float]) -> None:
    """Rank 0 prints the result, and all leave; losses are means over the ranks and between logs."""
    assert losses, "no loss was logged"
    assert all(map(math.isfinite, losses)), losses
    peak = psutil.Process().memory_info().rss  # without a GPU: resident now, as the chapters log
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_reserved()
    result = {"tokens_per_second": clock.tokens_per_second(), "losses": losses}
    if RANK == 0:
        print(json.dumps(result | {"peak_gb": peak / 1e9}), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    # Without tearing down: a DDP wrapper that outlives its process group may block.
    os._exit(0)
