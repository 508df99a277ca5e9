"""Tokenizes and packs a dataset into MDS shards, for chapter 10 on any number of ranks.

    python tools/write-mds.py -o /data/c4 -d allenai/c4 --dataset-subset en --compression zstd
    python tools/write-mds.py -o outputs/mds --demo     # the text of the chapters' --demo
    python tools/write-mds.py -o /data/rows -d /data/FineWeb-Edu    # a folder of MDS with texts

One MDS sample is one row: `tokens`, int32 of shape (seq_length,), with -100 where `--packing` pads.
`rows.json` beside `index.json` has the facts that a training checks. The rows are the rows of
chapter 4, in the order of the documents. They do not depend on the number of processes. The last
tokens of the corpus, fewer than a row, are dropped.

The rows are written in parts. A part gets its name when it is complete, with the place in the
documents after it. The same command goes on after the last complete part, unless the documents
have changed since then. Only one process writes to a folder at a time.
"""

import argparse
import glob
import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from pathlib import Path

import datasets
import fsspec
import huggingface_hub
import numpy as np
import transformers
import xxhash
from filelock import FileLock, Timeout
from tqdm import tqdm
from transformers import AutoTokenizer

from models import REPOSITORY, load_script, positive, sync

DEMO = {
    "model_name": f"{REPOSITORY}/models/tiny-llama",
    "dataset_name": f"{sysconfig.get_path('stdlib')}/[a-z]*.py",
    "seq_length": 256,
}
PROBE = "Probe of 1 tokenizer: naïve?"  # other tokenizers make other tokens of it
BATCH = 32  # documents that a process tokenizes at a time
# What storages tell about a file: its size, and what changes with its content
FILE_FACTS = ["name", "size", "mtime", "ETag", "LastModified", "Last-Modified"]
FILE_FACTS += ["blob_id", "updated"]
LOCK = ".lock"  # an empty file in the output; a process that writes holds the lock of this file


def parse_args() -> argparse.Namespace:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description="Text to MDS shards.", formatter_class=formatter)
    add, count = parser.add_argument, positive(int)
    add("-o", "--output", type=Path, required=True, help="folder for index.json and the shards")
    add("-m", "--model-name", default="meta-llama/Llama-3.2-1B", help="whose tokenizer")
    add("-d", "--dataset-name", default="tatsu-lab/alpaca", help="Hub id, file or MDS folder")
    add("--dataset-subset", help="configuration name on the Hub")
    add("--text-column", default="text", help="the column to write")
    add("-s", "--seq-length", type=int, default=1024, help="tokens per row")
    add("--packing", choices=["pack", "overflow", "trunc"], default="pack", help="text to rows")
    add("--max-documents", type=count, help="only the first ones")
    add("--compression", choices=["zstd", "gz", "bz2"], help="of shards for slow networks")
    add("--part-rows", type=count, default=65_536, help="a stop loses at most so many rows")
    add("--processes", type=count, default=os.cpu_count(), help="that tokenize")
    add("--demo", action="store_true", help="the text, tokenizer and rows of the chapters' --demo")
    if "--demo" in sys.argv[1:]:
        parser.set_defaults(**DEMO)
    args = parser.parse_args()
    if args.seq_length < 2:
        parser.error("--seq-length must be at least 2")
    return args


def fingerprint(name: str) -> str:
    """A short text that changes when the documents change."""
    if "://" in name:
        system, path = fsspec.url_to_fs(name)
        try:
            files = [system.info(path)]
        except FileNotFoundError:
            files = [*system.glob(path, detail=True).values()]  # a pattern
        if not files:
            raise FileNotFoundError(f"no file matches {name}")
        # A server may tell only some of these facts.
        facts = [[str(file.get(key)) for key in FILE_FACTS] for file in files]
        return hashlib.sha256(json.dumps(sorted(facts)).encode()).hexdigest()
    pattern = f"{name}/**/*" if os.path.isdir(name) else name
    if os.path.exists(f"{name}/index.json"):
        pattern = f"{name}/index.json"  # reading adds files to a folder of compressed MDS
    names = [name] if os.path.isfile(name) else sorted(glob.glob(pattern, recursive=True))
    files = [file for file in names if os.path.isfile(file)]
    if files:
        facts = [(file, os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in files]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return huggingface_hub.dataset_info(name).sha  # the commit


def read_mds(folder: str) -> Iterator[dict[str, str]]:
    """The texts of each MDS sample, in order."""
    from streaming import StreamingDataset

    samples = StreamingDataset(local=folder, batch_size=1)
    for i in range(len(samples)):
        yield {name: value for name, value in samples[i].items() if isinstance(value, str)}


def load_documents(args: argparse.Namespace) -> datasets.IterableDataset:
    """The split `train` as a stream with a column `text`, or the samples of an MDS folder."""
    name = args.dataset_name
    prepare_data = load_script(REPOSITORY / "tools" / "prepare-data.py")
    if "://" in name and not Path(name).suffix:
        sys.exit(f"error: {name} is a folder: name its files of text, or copy MDS to a disk first")
    if os.path.exists(f"{name}/index.json"):
        samples = datasets.IterableDataset.from_generator(read_mds, gen_kwargs={"folder": name})
        documents = prepare_data.text_alone(samples, args.text_column)
    else:
        splits = prepare_data.load_documents([name], args.dataset_subset, args.text_column)
        documents = splits["train"]
    if args.max_documents:
        documents = documents.take(args.max_documents)
    return documents


def start_process(model_name: str) -> None:
    """Each process has a tokenizer of its own."""
    global tokenizer
    tokenizer = AutoTokenizer.from_pretrained(model_name)


def tokenize(texts: list[str]) -> list[list[int]]:
    """The token ids of each document that is not empty, with one end-of-text token at its end."""
    texts = [text for text in texts if text]
    # Text files with many documents mark the end of each document like this.
    texts = [part for text in texts for part in text.split("<|endoftext|>") if part]
    documents = tokenizer(texts, verbose=False)["input_ids"] if texts else []
    return [[*ids, tokenizer.eos_token_id] for ids in documents]


def to_rows(documents: list[list[int]], rest: list[int], packing: str, length: int):
    """Rows of `length` token ids, with -100 for padding; and the tokens that are left for later.

    pack: documents end to end, after `rest`. overflow: each document in rows of its own. trunc: one
    row for each document, with its beginning. Chapter 4 makes the same rows.
    """
    if packing == "pack":
        documents = [list(chain(rest, *documents))]  # a single long document
    if packing == "trunc":
        documents = [ids[:length] for ids in documents]
    rows = [ids[i : i + length] for ids in documents for i in range(0, len(ids), length)]
    rest = []
    if packing == "pack" and rows and len(rows[-1]) < length:
        rest = rows.pop()
    return [np.array(row + [-100] * (length - len(row)), np.int32) for row in rows], rest


def in_order(pool: Executor, batches: Iterator[tuple[list[str], dict]], ahead: int) -> Iterator:
    """The token ids of each batch and the place after it; `ahead` batches wait or are worked on."""
    waiting = deque()
    for texts, place in batches:
        waiting.append((pool.submit(tokenize, texts), place))
        if len(waiting) > ahead:
            result, place = waiting.popleft()
            yield result.result(), place
    for result, place in waiting:
        yield result.result(), place


def batches_of(documents: datasets.IterableDataset) -> Iterator[tuple[list, dict]]:
    """Texts of some documents, and the place in the stream after them."""
    opened = iter(documents)
    while texts := [document["text"] for document in islice(opened, BATCH)]:
        yield texts, documents.state_dict()


def write_part(folder: Path, rows: list[np.ndarray], place: dict, args: argparse.Namespace) -> None:
    """Writes rows into shards. The folder gets its name when its files are on the disk."""
    from streaming import MDSWriter

    temporary = folder.with_name("incomplete")
    shutil.rmtree(temporary, ignore_errors=True)
    columns = {"tokens": f"ndarray:int32:{args.seq_length}"}
    options = {"compression": args.compression, "hashes": ["xxh3_64"]}
    with MDSWriter(out=str(temporary), columns=columns, **options) as writer:
        for row in rows:
            writer.write({"tokens": row})
    facts = place | {"largest_token": int(max(row.max() for row in rows))}
    (temporary / "place.json").write_text(json.dumps(facts))
    sync(temporary)
    temporary.rename(folder)


def write(args: argparse.Namespace) -> int:
    """Writes the parts that are missing, then the index of all; returns the number of rows."""
    args.output.mkdir(parents=True, exist_ok=True)
    names = {file.name for file in args.output.iterdir()} - {"incomplete", LOCK}
    if names and not any(name.startswith("part-") for name in names):
        sys.exit(f"error: {args.output} has other files: choose another --output")
    try:
        with FileLock(args.output / LOCK, timeout=0):
            return write_rows(args)
    except Timeout:
        sys.exit(f"error: another process is writing to {args.output}: wait until it has ended")


def write_rows(args: argparse.Namespace) -> int:
    """`write`, when no other process writes to the folder."""
    try:
        from streaming.base.util import merge_index
    except ImportError:
        sys.exit("error: MDS needs a package that is missing: see more/10-mds-shards/README.md")
    tokenizer = AutoTokenizer.from_pretrained(args.model_name)
    if tokenizer.eos_token_id is None:
        sys.exit(f"error: the tokenizer of {args.model_name} has no end-of-text token")
    documents = load_documents(args)
    documents_now = fingerprint(args.dataset_name)
    rows_file = {"seq_length": args.seq_length, "packing": args.packing}
    probe = [*tokenizer(PROBE)["input_ids"], tokenizer.eos_token_id]
    rows_file |= {"max_documents": args.max_documents, "tokenizer_probe": probe}
    rows_file |= {"tokenizer": args.model_name}  # for people: another name is no other tokenizer
    flags = ("dataset_name", "dataset_subset", "text_column", "compression")
    source = {name: getattr(args, name) for name in flags} | rows_file
    parts = sorted(args.output.glob("part-*"))
    place = {"position": None, "rest": [], "documents": 0, "source": source}
    place["fingerprint"] = documents_now
    if parts:
        place = json.loads((parts[-1] / "place.json").read_text())
    if place["source"] != source:
        sys.exit(f"error: {args.output} has rows of other flags: choose another --output")
    if place["fingerprint"] != documents_now:
        changed = f"the documents of {args.dataset_name} have changed"
        sys.exit(f"error: {changed} since {args.output} was begun: choose another --output")
    if (args.output / "index.json").exists():
        print(f"{args.output} is complete")
        return rows_in(args.output / "index.json")

    if parts:
        documents.load_state_dict(place["position"])
        print(f"Continuing after {len(parts)} parts, {place['documents']} documents")
    rows = []
    rest = place["rest"]
    count = place["documents"]
    options = {"initializer": start_process, "initargs": [args.model_name]}
    if args.processes == 1:
        executor = ThreadPoolExecutor(1, **options)
    else:
        context = multiprocessing.get_context("spawn")
        executor = ProcessPoolExecutor(args.processes, context, **options)
    with (
        executor as pool,
        tqdm(unit=" documents", initial=count, total=args.max_documents, unit_scale=True) as bar,
    ):
        batches = batches_of(documents)
        for ids, position in in_order(pool, batches, 2 * args.processes):
            if ids:
                more, rest = to_rows(ids, rest, args.packing, args.seq_length)
                rows += more
            count += len(ids)
            bar.update(len(ids))
            if len(rows) >= args.part_rows:
                place |= {"position": position, "rest": rest, "documents": count}
                write_part(args.output / f"part-{len(parts):05d}", rows, place, args)
                parts.append(None)
                rows = []
    if rows:
        place |= {"position": documents.state_dict(), "rest": rest, "documents": count}
        write_part(args.output / f"part-{len(parts):05d}", rows, place, args)
        parts.append(None)
    if not parts:
        sys.exit("error: there is not a single row: lower --seq-length")
    indices = sorted(map(str, args.output.glob("part-*/index.json")))
    logging.disable(logging.WARNING)  # that folders exist, and where a temporary one is
    # A folder of its own, so that the index appears at once and whole.
    merge_index(indices, str(args.output / "incomplete"))
    index = args.output / "incomplete" / "index.json"
    places = [json.loads(file.read_text()) for file in args.output.glob("part-*/place.json")]
    rows_file |= {"largest_token": max(place["largest_token"] for place in places)}
    # For people: chapter 10 puts the same hash into its checkpoints, as `tokens_hash`.
    rows_file |= {"index_hash": xxhash.xxh3_64(index.read_bytes()).hexdigest()}
    rows_file |= {"rows": rows_in(index)}
    (args.output / "rows.json").write_text(json.dumps(rows_file, indent=2))
    index.rename(args.output / "index.json")
    shutil.rmtree(args.output / "incomplete")
    return rows_file["rows"]


def rows_in(index: Path) -> int:
    return sum(shard["samples"] for shard in json.loads(index.read_text())["shards"])


def main() -> None:
    args = parse_args()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    if args.processes > 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread in each process
    try:
        count = write(args)
    except BrokenProcessPool:
        sys.exit("error: a process was killed, perhaps for memory: lower --processes, and go on")
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(f"{count:,} rows of {args.seq_length} tokens in {args.output}")


if __name__ == "__main__":
    main()
