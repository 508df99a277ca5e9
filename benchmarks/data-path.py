"""The data paths by themselves: packing, batches, and the stream of chapter 4 against the cache.

    python benchmarks/data-path.py [--tokens 20000000] [--rounds 5] [--steps 100]

Packing: from a tokenised dataset on disk to one that gives samples of 2048 tokens. The usual way
is a batched `map` of a function over Python lists, as in the examples of Transformers. A batch: 8
samples of 2048 tokens as an int64 tensor; the usual way is `default_data_collator` on rows of that
packed dataset. Prints medians, alternating within each round, and checks that both give the same.

Streams: from the source of the standard library, in documents of 2,000 characters, to rows of
1,024 tokens. The cached path tokenizes into a file and packs, as chapters 1 to 3 do in their first
run. The stream reads, tokenizes, packs and shuffles, with each `--packing`. Nothing is trained.

Rows: ready rows of 1,024 tokens, read in shuffled order from the cache and from MDS shards. Then
`--steps` of the demo on two processes: chapter 3, chapter 4, and chapter 10 on MDS shards.
"""

import argparse
import importlib.util
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.compute

REPOSITORY = Path(__file__).resolve().parents[1]
SEQ_LENGTH, BATCH_SIZE = 2048, 8


def load_chapter(name: str):
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / name / "train-llm.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def group_texts(rows: dict) -> dict:
    """Joins the rows of a map batch and cuts them into samples; the last rest is dropped."""
    tokens = list(itertools.chain.from_iterable(rows["input_ids"]))
    end = len(tokens) // SEQ_LENGTH * SEQ_LENGTH
    samples = [tokens[i : i + SEQ_LENGTH] for i in range(0, end, SEQ_LENGTH)]
    return {"input_ids": samples, "labels": [list(sample) for sample in samples]}


def write_documents(folder: str) -> int:
    """The standard library in pieces of 2,000 characters, in 8 files; returns their number."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
    text = "".join(source.read_text(errors="replace") for source in sources)
    documents = [text[i : i + 2000] for i in range(0, len(text), 2000)]
    for number in range(8):
        lines = [json.dumps({"text": document}) + "\n" for document in documents[number::8]]
        Path(folder, f"{number}.jsonl").write_text("".join(lines))
    return len(documents)


class PassIsOver(Exception):
    """The stream begins its second pass."""


def rows_of_a_pass(streamed, tokenizer, documents, args) -> int:
    """Reads the windows of the first pass. Later passes never end."""

    def begin(number: int) -> None:
        if number > 0:
            raise PassIsOver

    documents.set_epoch = begin
    count = 0
    try:
        for rows, _ in streamed.read_windows(documents, tokenizer, streamed.START, args):
            count += len(rows)
    except PassIsOver:
        return count


def compare_streams(rounds: int) -> None:
    """Documents per second of the cached path, and of the stream with each packing."""
    import datasets
    from transformers import AutoTokenizer

    cached, streamed = load_chapter("01-single-gpu"), load_chapter("04-streaming")
    tokenizer = AutoTokenizer.from_pretrained(REPOSITORY / "models" / "tiny-llama")
    times = {name: [] for name in ("cached", "pack", "overflow", "trunc")}
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        count = write_documents(folder)
        pattern = f"{folder}/*.jsonl"
        whole = datasets.load_dataset("json", data_files=pattern, cache_dir=folder)["train"]
        datasets.disable_caching()
        for number in range(rounds):
            for name in [*times][:: 1 if number % 2 == 0 else -1]:
                args = SimpleNamespace(
                    packing=name, seq_length=1024, shuffle_window=1024, seed=0, text_column="text"
                )
                begin = time.perf_counter()
                if name == "cached":
                    tokens = cached.tokenize_split(whole, tokenizer, args.text_column)
                    rows[name] = len(tokens) // 1024
                else:
                    documents = streamed.load_documents(pattern, None)["train"]
                    rows[name] = rows_of_a_pass(streamed, tokenizer, documents, args)
                times[name].append(time.perf_counter() - begin)
        datasets.enable_caching()
    assert rows["pack"] == rows["cached"]
    print(f"\n{count:,} documents of 2,000 characters, rows of 1,024 tokens; {rounds} rounds\n")
    print("| | documents/s | rows | of the cached path |\n|---|---|---|---|")
    base = count / statistics.median(times["cached"])
    for name, seconds in times.items():
        speed = count / statistics.median(seconds)
        label = "tokenize into the cache" if name == "cached" else f"stream, `{name}`"
        print(f"| {label} | {speed:,.0f} | {rows[name]:,} | {speed / base:.2f} |")


def write_mds(output: str, *flags) -> None:
    tool = REPOSITORY / "tools" / "write-mds.py"
    command = [sys.executable, tool, "-o", output, *flags]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)


def compare_rows(rounds: int) -> None:
    """Rows per second: a slice of the cached tokens, and a sample of an MDS shard."""
    import datasets
    from transformers import AutoTokenizer

    cached, sharded = load_chapter("01-single-gpu"), load_chapter("10-mds-shards")
    times = {"cached": [], "mds": []}
    with tempfile.TemporaryDirectory() as folder:
        write_documents(folder)
        pattern = f"{folder}/*.jsonl"
        model = REPOSITORY / "models" / "tiny-llama"
        write_mds(f"{folder}/mds", "-d", pattern, "-m", model, "-s", 1024, "--processes", 1)
        whole = datasets.load_dataset("json", data_files=pattern, cache_dir=folder)["train"]
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokens = cached.tokenize_split(whole, tokenizer, "text")
        count = len(tokens) // 1024
        os.environ["LOCAL_WORLD_SIZE"] = "1"
        args = {"dataset_name": f"{folder}/mds", "seq_length": 1024, "cache_limit": "1gb"}
        mds = sharded.MdsRows(SimpleNamespace(**args), tokenizer)
        assert sum(mds.sizes) == count
        for number in range(rounds):
            for name in [*times][:: 1 if number % 2 == 0 else -1]:
                args = SimpleNamespace(num_epochs=1, seed=number, shuffle_window=1024)
                begin = time.perf_counter()
                if name == "cached":
                    order = cached.sample_order(args, count)
                    rows = [tokens.slice(i * 1024, 1024).to_numpy() for i in order]
                else:
                    order = sharded.sample_order(args, mds.sizes)
                    rows = [mds.read(n) for n in order]
                times[name].append((time.perf_counter() - begin) / len(rows))
    print(f"\nready rows of 1,024 tokens, {count:,} of them; {rounds} rounds\n")
    print("| | rows/s |\n|---|---|")
    print(f"| cache of chapters 1 to 3 | {1 / statistics.median(times['cached']):,.0f} |")
    print(f"| MDS shards | {1 / statistics.median(times['mds']):,.0f} |")


def compare_training(steps: int) -> None:
    """The time that a step of the demo waits for its rows, on two processes."""
    print(f"\n{steps} steps of the demo on 2 processes; medians without the first record\n")
    print("| | `time/data_ms` | `time/total_ms` | share |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        write_mds(f"{folder}/mds", "--demo", "--processes", 1)
        runs = {
            "chapter 3, cache": ["03-fsdp"],
            "chapter 4, text": ["04-streaming"],
            "chapter 10, MDS": ["10-mds-shards", "-d", f"{folder}/mds"],
        }
        for number, (label, (chapter, *flags)) in enumerate(runs.items()):
            command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            command += [f"{REPOSITORY}/{chapter}/train-llm.py", "--demo", "-e", str(number)]
            command += ["--save-dir", folder, "--max-steps", str(steps), "--eval-freq", "0"]
            subprocess.run([sys.executable, *command, *flags], check=True, capture_output=True)
            records = [
                json.loads(line) for line in Path(folder, str(number), "metrics.jsonl").open()
            ]
            data, total = (
                statistics.median(record[f"time/{name}_ms"] for record in records[1:])
                for name in ("data", "total")
            )
            print(f"| {label} | {data:.2f} | {total:.0f} | {data / total:.2%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    chapter = load_chapter("01-single-gpu")
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
                    tokens = pyarrow.compute.list_flatten(tokenized.data.column("input_ids"))
                else:
                    cache = f"{folder}/cache-{number}.arrow"
                    grouped = tokenized.map(group_texts, batched=True, cache_file_name=cache)
                times[name].append(time.perf_counter() - begin)
        assert grouped[0]["input_ids"] == tokens.slice(0, SEQ_LENGTH).to_pylist()

        # All samples once through each path, so that neither profits from a warmer page cache.
        device = torch.device("cpu")
        args.seq_length = SEQ_LENGTH
        order = chance.permutation(min(len(tokens) // SEQ_LENGTH, len(grouped)))
        batches = [order[i : i + BATCH_SIZE].tolist() for i in range(0, len(order) - 7, BATCH_SIZE)]
        for indices in batches:
            begin = time.perf_counter()
            ours = chapter.read_batch(tokens, indices, args, device)
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
    compare_streams(args.rounds)
    compare_rows(args.rounds)
    if args.steps:
        compare_training(args.steps)


if __name__ == "__main__":
    main()
