"""The data path of chapter 1 by itself: packing against `group_texts`, a batch against a collator.

    python benchmarks/data-path.py [--tokens 20000000] [--rounds 5]

Packing: from a tokenised dataset on disk to one that gives samples of 2048 tokens. The usual way
is a batched `map` of a function over Python lists, as in the examples of Transformers. A batch: 8
samples of 2048 tokens as an int64 tensor; the usual way is `default_data_collator` on rows of that
packed dataset. Prints medians, alternating within each round, and checks that both give the same.
"""

import argparse
import importlib.util
import itertools
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

CHAPTER_1 = Path(__file__).resolve().parents[1] / "01-single-gpu" / "train-llm.py"
SEQ_LENGTH, BATCH_SIZE = 2048, 8


def load_chapter():
    spec = importlib.util.spec_from_file_location("chapter_1", CHAPTER_1)
    module = importlib.util.module_from_spec(spec)
    sys.modules["chapter_1"] = module
    spec.loader.exec_module(module)
    return module


def group_texts(rows: dict) -> dict:
    """Joins the rows of a map batch and cuts them into samples; the last rest is dropped."""
    tokens = list(itertools.chain.from_iterable(rows["input_ids"]))
    end = len(tokens) // SEQ_LENGTH * SEQ_LENGTH
    samples = [tokens[i : i + SEQ_LENGTH] for i in range(0, end, SEQ_LENGTH)]
    return {"input_ids": samples, "labels": [list(sample) for sample in samples]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    chapter = load_chapter()
    import datasets
    import torch
    from transformers import default_data_collator

    datasets.disable_progress_bars()
    chance = np.random.default_rng(0)
    lengths = chance.integers(100, 1000, args.tokens // 550)
    features = datasets.Features(input_ids=datasets.List(datasets.Value("int32")))
    with tempfile.TemporaryDirectory() as folder:
        rows = ({"input_ids": chance.integers(0, 32000, n, dtype=np.int32)} for n in lengths)
        made = datasets.Dataset.from_list(list(rows), features=features)
        made.save_to_disk(folder)
        tokenized = datasets.load_from_disk(folder)
        count = int(lengths.sum())
        times = {"pack": [], "group_texts": [], "batch": [], "collator": []}
        for number in range(args.rounds):
            for name in ["pack", "group_texts"][:: 1 if number % 2 == 0 else -1]:
                begin = time.perf_counter()
                if name == "pack":
                    samples = chapter.PackedSamples(tokenized, SEQ_LENGTH)
                else:
                    cache = f"{folder}/cache-{number}.arrow"
                    grouped = tokenized.map(group_texts, batched=True, cache_file_name=cache)
                times[name].append(time.perf_counter() - begin)
        assert grouped[0]["input_ids"] == samples[0].tolist()

        # All samples once through each path, so that neither profits from a warmer page cache.
        device = torch.device("cpu")
        order = chance.permutation(min(len(samples), len(grouped)))
        batches = [order[i : i + BATCH_SIZE].tolist() for i in range(0, len(order) - 7, BATCH_SIZE)]
        for indices in batches:
            begin = time.perf_counter()
            ours = chapter.read_batch(samples, indices, device)
            middle = time.perf_counter()
            usual = default_data_collator([grouped[i] for i in indices])["input_ids"]
            times["batch"].append(middle - begin)
            times["collator"].append(time.perf_counter() - middle)
        assert ours.shape == usual.shape == (BATCH_SIZE, SEQ_LENGTH)
        assert ours.dtype == usual.dtype == torch.int64

    print(f"{platform.machine()} CPU; datasets {datasets.__version__}, torch {torch.__version__}")
    print(f"{count:,} tokens in {len(lengths):,} documents; {args.rounds} rounds\n")
    print("| | chapter 1 | the usual way | ratio |\n|---|---|---|---|")
    pack, group = (count / statistics.median(times[name]) for name in ("pack", "group_texts"))
    print(f"| packing, tokens/s | {pack:,.0f} | {group:,.0f} | {pack / group:,.0f} |")
    # Packing as views defers the copy to the reading of the batch: count both.
    batch, collator = (1e3 * statistics.median(times[name]) for name in ("batch", "collator"))
    tokens = BATCH_SIZE * SEQ_LENGTH
    both = 1 / (1 / pack + batch / 1e3 / tokens), 1 / (1 / group + collator / 1e3 / tokens)
    print(f"| a batch of 8 x 2048, ms | {batch:.3f} | {collator:.3f} | {collator / batch:,.0f} |")
    print(f"| both, tokens/s | {both[0]:,.0f} | {both[1]:,.0f} | {both[0] / both[1]:,.0f} |")


if __name__ == "__main__":
    main()
