"""Rows of tokens for chapter 10, in shards of MDS. tools/prepare-data.py --mds writes them.

`rows.json` beside `index.json` has the facts that a training checks. The rows are those of chapter
4, in the order of the prepared documents, on any number of workers. They are written in parts. A
part gets its name when it is complete, with the place in the documents after it, so the same
command goes on after the last complete part.
"""

import json
import logging
import multiprocessing
import os
import shutil
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash
from pyarrow import parquet
from tqdm import tqdm

from models import load_chapter, sync

PROBE = "Probe of 1 tokenizer: naïve?"  # other tokenizers make other tokens of it
BATCH = 32  # documents that a process tokenizes at a time


def write_mds(args) -> None:
    """Adds shards with the rows of the documents to train on, in their order."""
    import transformers

    try:
        from streaming.base.util import merge_index
    except ImportError:
        sys.exit("error: a package is not installed: see more/10-mds-shards/README.md")
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)  # that folders exist, and where a temporary one is
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model_name)
    if tokenizer.eos_token_id is None:
        sys.exit(f"error: the tokenizer of {args.model_name} has no end-of-text token")
    probe = [*tokenizer(PROBE)["input_ids"], tokenizer.eos_token_id]
    facts = {"seq_length": args.seq_length, "packing": args.packing, "tokenizer_probe": probe}
    facts |= {"tokenizer": args.model_name, "compression": args.compression}
    parts = sorted(args.output.glob("part-*"))
    place = {"facts": facts, "documents": 0, "rest": []}
    if parts:
        place = json.loads((parts[-1] / "place.json").read_text())
        print(f"Continuing after {len(parts)} parts, {place['documents']:,} documents")
    if place["facts"] != facts:
        sys.exit(f"error: {args.output} has rows of other flags: choose another -o")
    index = args.output / "index.json"
    if index.exists():
        print(f"The rows in {args.output} are complete")
        return
    chapter = load_chapter(4)
    rows, rest = [], place["rest"]
    pool = processes(args.workers, load_tokenizer, args.model_name)
    with pool, tqdm(unit=" documents", unit_scale=True, disable=None) as bar:
        texts = texts_of(args.output, place["documents"])
        for documents in in_order(pool, tokenize, texts, args.workers):
            for ids in filter(None, documents):
                more, rest = chapter.to_rows(ids, rest, args)
                rows += more
            place["documents"] += len(documents)
            bar.update(len(documents))
            if len(rows) >= args.part_rows:
                parts.append(write_part(len(parts), rows, place | {"rest": rest}, args))
                rows = []
    if rows:
        parts.append(write_part(len(parts), rows, place | {"rest": rest}, args))
    if not parts:
        sys.exit("error: there is not a single row: lower -s")
    # In a folder of its own, so that the index appears at once and whole.
    temporary = args.output / "incomplete"
    merge_index([str(part / "index.json") for part in parts], str(temporary))
    shards = json.loads((temporary / "index.json").read_text())["shards"]
    places = [json.loads((part / "place.json").read_text()) for part in parts]
    count = sum(shard["samples"] for shard in shards)
    facts |= {"rows": count, "largest_token": max(place["largest_token"] for place in places)}
    # For people: chapter 10 puts the same hash into its checkpoints, as `tokens_hash`.
    facts |= {"index_hash": xxhash.xxh3_64_hexdigest((temporary / "index.json").read_bytes())}
    (args.output / "rows.json").write_text(json.dumps(facts, indent=2))
    (temporary / "index.json").rename(index)
    shutil.rmtree(temporary)
    print(f"{count:,} rows of {args.seq_length} tokens in {args.output}")


def texts_of(folder: Path, first: int) -> Iterator[list[str]]:
    """The documents to train on, from this one on."""
    for file in sorted(folder.glob("train-*.parquet")):
        with parquet.ParquetFile(file) as table:
            first -= table.metadata.num_rows
            if first < 0:
                skip = first + table.metadata.num_rows
                for batch in table.iter_batches(BATCH, columns=["text"]):
                    if skip < batch.num_rows:
                        yield batch.column(0).slice(max(0, skip)).to_pylist()
                    skip -= batch.num_rows
                first = 0


def processes(workers: int, begin: Callable, *values) -> Executor:
    """So many processes, each of which first calls `begin`. One is a thread of this process."""
    if workers == 1:
        return ThreadPoolExecutor(1, initializer=begin, initargs=values)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread in each process
    options = {"initializer": begin_process, "initargs": [begin, *values]}
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), **options)


def begin_process(begin: Callable, *values) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the tool, and it ends its processes
    begin(*values)


def load_tokenizer(name: str) -> None:
    import transformers

    global tokenizer
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)


def tokenize(texts: list[str]) -> list[list[int]]:
    """The token ids of each row, in a process that has a tokenizer."""
    rows = (tokens_of_text(text, tokenizer) for text in texts)
    return [[token for ids in documents for token in ids] for documents in rows]


def tokens_of_text(text: str, tokenizer) -> list[list[int]]:
    """The token ids of each document in a text, as chapter 1 makes them."""
    parts = [part for part in text.split("<|endoftext|>") if part]
    documents = tokenizer(parts, verbose=False)["input_ids"] if parts else []
    return [[*ids, tokenizer.eos_token_id] for ids in documents]


def in_order(pool: Executor, function: Callable, batches: Iterable, workers: int) -> Iterator:
    """What the function makes of each batch. Only some batches wait, or are worked on."""
    waiting = deque()
    for batch in batches:
        waiting.append(pool.submit(function, batch))
        if len(waiting) > 2 * workers:
            yield waiting.popleft().result()
    for result in waiting:
        yield result.result()


def write_part(number: int, rows: list[np.ndarray], place: dict, args) -> Path:
    """Writes rows into shards. Their folder gets its name when its files are on the disk."""
    from streaming import MDSWriter

    temporary = args.output / "incomplete"
    shutil.rmtree(temporary, ignore_errors=True)
    columns = {"tokens": f"ndarray:int32:{args.seq_length}"}
    options = {"compression": args.compression, "hashes": ["xxh3_64"]}
    with MDSWriter(out=str(temporary), columns=columns, **options) as writer:
        for row in rows:
            writer.write({"tokens": row})
    place = place | {"largest_token": int(max(row.max() for row in rows))}
    (temporary / "place.json").write_text(json.dumps(place))
    sync(temporary)
    return temporary.rename(args.output / f"part-{number:05}")
