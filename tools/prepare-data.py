"""Writes one clean folder out of the texts or conversations that you have. Chapters train on it.

    python tools/prepare-data.py "texts/**/*.txt" notes.jsonl.gz -o data/books
    python tools/prepare-data.py data/books data/code --share 70 30 -o data/mixed
    python tools/prepare-data.py HuggingFaceH4/no_robots --as messages --held-out 2% -o data/robots
    python tools/prepare-data.py chats/*.jsonl --as messages --rows -m Qwen/Qwen3-0.6B -o data/chats
    python tools/prepare-data.py stories.txt -o data/stories --mds -m openai-community/gpt2 -s 1024

A source is a file, a pattern, a folder, an address, or a dataset on the Hub: NAME or NAME:SPLIT.
docs/data.md has all forms. The folder gets train-*.parquet, perhaps validation-*.parquet, a
README.md that `load_dataset` and the Hub read, and report.json with all counts.

The first pass reads the sources into Arrow files of a temporary folder. DuckDB finds copies,
chooses the documents, and sorts their numbers. Then the documents are read in this order from the
files, which are mapped into memory. With --mds, the folder also gets rows of tokens for chapter 10:
`tokens`, int32 of shape (seq_length,), with -100 where `--packing` pads. A stop loses one part of
the rows, and the same command goes on. With --rows, the Parquet files have rows of tokens with
labels instead, for chapters 16 and 17 (labels.py).
"""

import argparse
import codecs
import fcntl
import glob
import json
import multiprocessing
import os
import shlex
import shutil
import signal
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

import duckdb
import numpy
import pyarrow
import xxhash
import yaml
from conversations import ROLES, plain, to_json
from documents import (
    PIECE,
    PLACES,
    TEXTS,
    File,
    Found,
    encoded_documents,
    find_files,
    guess_encoding,
)
from labels import SHOWN, write_rows
from pyarrow import parquet
from rows import write_mds
from tqdm import tqdm

from models import REPOSITORY, sync

REPORT = "report.json"
ROWS = "rows.json"  # what chapters 16 and 17 compare with their flags
CHUNK = 500_000  # bytes of documents that the first pass holds in memory; larger ones are slower
GROUP = 4_000_000  # characters of a row group of the result; the tool holds one in memory
GROUPS = 128  # of a file, which has a few hundred MB
TASK = 64_000_000  # bytes of the small files that one worker reads together
REASONS = 20  # for rejected rows that are shown; report.json has all
SAMPLE = 4_000_000  # characters of each source that --dry-run reads
MEMORY = "600MB"  # of DuckDB
MODEL = "meta-llama/Llama-3.2-1B"
DEMO = {
    "sources": [f"{sysconfig.get_path('stdlib')}/[a-z]*.py"],
    "model_name": f"{REPOSITORY}/models/tiny-llama",
    "seq_length": 256,
    "mds": True,
    "shuffle": False,
}
PACKINGS = ["pack", "overflow", "trunc"]
NO_BAR = tqdm(disable=True)
ZSTD = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": False,
    "write_statistics": False,
}


# -- First pass: all documents in Arrow files ------------------------------------------------------

COLUMNS = pyarrow.schema(
    {
        "source": pyarrow.int32(),
        "held_out": pyarrow.bool_(),
        "characters": pyarrow.int64(),
        "digest": pyarrow.binary(16),
        "text": pyarrow.binary(),  # UTF-8, or a conversation as JSON
    }
)


def groups(items: Iterable, size_of: Callable, size: int) -> Iterator[list]:
    """Neighbours, as lists that have a little more than this size."""
    group, left = [], size
    for item in items:
        group.append(item)
        left -= size_of(item)
        if left < 0:
            yield group
            group, left = [], size
    if group:
        yield group


def read_task(files: list[File], args, output: Path | None, bar=NO_BAR) -> Found:
    """Reads some files into an Arrow file. Without this file, it only counts."""
    found = Found()
    digest = xxhash.xxh3_128()
    rows = rows_of(files, args, found, bar)
    with pyarrow.ipc.new_stream(str(output or os.devnull), COLUMNS) as writer:
        for group in groups(rows, lambda row: len(row[4]) + 100, CHUNK):
            columns = [*zip(*group, strict=True)]
            digest.update(repr(columns[:2]).encode() + b"".join(columns[3]))
            writer.write_batch(pyarrow.record_batch(columns, COLUMNS))
    found.digest = digest.digest()
    return found


def rows_of(files: list[File], args, found: Found, bar) -> Iterator[tuple]:
    """The rows of COLUMNS of some files."""
    limit = int(args.held_out * 2**64)
    read = Counter()  # characters of each source
    held_out = False
    for file in files:
        if args.dry_run and read[file.source] > SAMPLE:
            continue
        before = piece = 0
        for row, data, characters in encoded_documents(file, args, found):
            if not data:
                found.counts["empty"] += 1
                found.lost[file.source] += file.kind not in TEXTS
                continue
            digest = xxhash.xxh3_128_digest(data, seed=args.seed)
            piece = piece + 1 if row == before else 0
            before = row
            if piece == 0:  # it decides for all pieces of a document
                held_out = file.held_out or int.from_bytes(digest[:8]) < limit
                found.counts["documents"] += 1
                found.first.setdefault(file.source, data[:300].decode(errors="ignore"))
            found.counts["documents that are cut"] += piece == 1
            found.counts["characters"] += characters
            read[file.source] += characters
            yield file.source, held_out, characters, digest, data
            if found.counts["documents"] % 100 == 0:
                bar.update(file.progress())
            if args.dry_run and read[file.source] > SAMPLE:
                break
        found.counts["files"] += 1
        bar.update(file.size - file.done)


def cost(file: File) -> int:
    return file.size + 10_000  # opening a file takes time, too


def read_all(files: list[File], args, work: Path | None) -> Found:
    total = Found()
    tasks = [files]  # a dry run reads the beginning of each source
    if not args.dry_run:
        total_cost = sum(map(cost, files))
        # The second pass opens the files of all tasks, so there are at most a few hundred.
        tasks = [*groups(files, cost, max(TASK, total_cost / 500))]
    outputs = [work and work / f"{number:05}.arrow" for number in range(len(tasks))]
    size = sum(file.size for file in files)
    with tqdm(total=size, unit="B", unit_scale=True, disable=None, desc="reading") as bar:
        if args.workers == 1 or args.dry_run:
            for task, output in zip(tasks, outputs, strict=True):
                total.add(read_task(task, args, output, bar))
                bar.set_postfix_str(f"{total.counts['files']:,} files")
            return total
        context = multiprocessing.get_context("spawn")
        ignore = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_IGN)}
        with ProcessPoolExecutor(args.workers, context, **ignore) as pool:
            jobs = [
                pool.submit(read_task, task, args, output)
                for task, output in zip(tasks, outputs, strict=True)
            ]
            try:
                for job, task in zip(jobs, tasks, strict=True):
                    total.add(job.result())
                    bar.update(sum(file.size for file in task))
                    bar.set_postfix_str(f"{total.counts['files']:,} files")
            finally:
                pool.shutdown(cancel_futures=True)
    return total


# -- Second pass: DuckDB chooses and orders the documents ------------------------------------------

# Of equal documents, the held-out one is the first. Its `copy` is 0.
DOCUMENTS = """
CREATE TABLE documents AS
SELECT document, source, held_out, characters, row_number() OVER equal - 1 AS copy,
    first_value(held_out) OVER equal AND NOT held_out AS in_both
FROM stored WINDOW equal AS (PARTITION BY digest ORDER BY held_out DESC, document)
"""
# All documents of a source count `whole` times. The first ones of a random order count once more,
# until they have the characters `rest`.
CHOSEN = """
CREATE TABLE chosen AS
SELECT document, held_out, times, unnest(range(times)) AS repeat
FROM (
    SELECT document, held_out, CASE WHEN held_out THEN 1 ELSE whole + (
        rest >= sum(characters) OVER (PARTITION BY source, held_out
        ORDER BY md5_number(concat_ws(' ', $seed, document)), document))::INT END AS times
    FROM documents JOIN shares USING (source)
)
"""
# A random place between 0 and 1. The repeats of a document have equal distances.
PLACE = "(md5_number_upper(concat_ws(' ', {seed}, document)) / 2**64 + repeat / times) % 1"


def choose(connection, args, report: dict) -> None:
    """Makes the table `chosen`: documents, and how often each is written."""
    run = connection.execute
    run(DOCUMENTS)
    what = "count(*) FILTER (copy > 0), count(*) FILTER (in_both), count(*) FILTER (held_out)"
    names = ["copies", "in both splits", "held out"]
    report["counts"] |= zip(names, run(f"SELECT {what} FROM documents").fetchone(), strict=True)
    if args.dedupe:
        run("DELETE FROM documents WHERE copy > 0")
    run("CREATE TABLE shares (source BIGINT, whole BIGINT, rest DOUBLE)")
    times = dict.fromkeys(range(len(args.sources)), 1)
    sums = "SELECT source, sum(characters)::BIGINT FROM documents WHERE NOT held_out GROUP BY ALL"
    sizes = dict(run(sums).fetchall())
    if args.share:
        missing = [name for number, name in enumerate(args.sources) if number not in sizes]
        if missing:
            sys.exit(f"error: {missing[0]} has no text to train on, for --share")
        needed = [sizes[number] / share for number, share in enumerate(args.share)]
        # The characters for a share of 1. No source counts more than --repeat times.
        unit = min(max(needed), args.repeat * min(needed))
        times = {number: unit * share / sizes[number] for number, share in enumerate(args.share)}
        for number, name in enumerate(args.sources):
            entry = {"characters": sizes[number], "times": round(times[number], 3)}
            report["shares"][name] = entry
    for number, count in times.items():
        rest = count % 1 * sizes.get(number, 0)
        run("INSERT INTO shares VALUES (?, ?, ?)", [number, int(count), rest or -1])
    run(CHOSEN, {"seed": args.seed})


def in_order(connection, texts: list, is_held_out: bool, args) -> Iterator[pyarrow.Array]:
    """The documents of a split in their new order, as arrays of one text, which is not copied."""
    firsts = numpy.cumsum([0, *map(len, texts)])  # the number of the first document of each array
    place = PLACE.format(seed=args.seed) if args.shuffle else "repeat"
    query = f"SELECT document FROM chosen WHERE held_out = $1 ORDER BY {place}, document"
    for batch in connection.sql(query, params=[is_held_out]).to_arrow_reader(10_000):
        numbers = batch.column(0).to_numpy()
        arrays = numpy.searchsorted(firsts, numbers, side="right") - 1
        rows = numbers - firsts[arrays]
        for array, row in zip(arrays.tolist(), rows.tolist(), strict=True):
            yield texts[array].slice(row, 1)


def write_splits(work: Path, folder: Path, args, types: dict, report: dict) -> dict[str, int]:
    """Writes all documents in their order. Returns the rows of each split."""
    files = [pyarrow.memory_map(str(file)) for file in sorted(work.iterdir())]
    stored = pyarrow.concat_tables(pyarrow.ipc.open_stream(file).read_all() for file in files)
    texts = stored["text"].chunks
    stored = stored.drop(["text"]).append_column("document", [numpy.arange(len(stored))])
    options = {"memory_limit": MEMORY, "threads": 1, "temp_directory": str(work)}
    rows = {}
    with duckdb.connect(work / "documents.duckdb", config=options) as connection:
        connection.register("stored", stored)
        choose(connection, args, report)

        def documents(name: str) -> Iterator[pyarrow.Array]:
            return in_order(connection, texts, name == "validation", args)

        if args.rows:
            rows, report["tokens"] = write_rows(
                documents, lambda name, tables: write_split(name, tables, folder), work, args
            )
            return rows
        for name in ("train", "validation"):
            bar = tqdm(documents(name), unit=" rows", unit_scale=True, disable=None, desc=name)
            row_groups = groups(bar, lambda document: document.total_values_length, GROUP)
            tables = (table_of(pyarrow.concat_arrays(group), types) for group in row_groups)
            rows[name] = write_split(name, tables, folder)
    return {name: count for name, count in rows.items() if count}


def write_split(name: str, tables: Iterator[pyarrow.Table], folder: Path) -> int:
    """Writes tables as row groups of Parquet files. Returns the number of rows."""
    files, rows = [], 0
    writer = None
    for number, table in enumerate(tables):
        if number % GROUPS == 0:
            if writer:
                writer.close()
            files.append(folder / f"{name}-{len(files):05}")
            writer = parquet.ParquetWriter(files[-1], table.schema, **ZSTD)
        writer.write_table(table)
        rows += len(table)
    if writer:
        writer.close()
    for file in files:
        file.rename(f"{file}-of-{len(files):05}.parquet")
    return rows


def table_of(documents: pyarrow.Array, types: dict[str, set]) -> pyarrow.Table:
    """A column of texts, or columns of messages, whose keys have these types, and tools.

    Null stands for a key that a message does not have. Calls of tools are JSON text: a table would
    fill in the keys that other calls have.
    """
    if not types:
        return pyarrow.table({"text": documents.view(pyarrow.string())})
    rows = [json.loads(document) for document in documents.to_pylist()]
    plain = {"float": pyarrow.float64(), "bool": pyarrow.bool_(), "str": pyarrow.string()}
    kinds = {"role": pyarrow.string(), "content": pyarrow.string()}
    for key in sorted(types.keys() - kinds.keys()):
        kinds[key] = plain[max(types[key])]  # text, if there is a text
        for message in (message for row in rows for message in row["messages"]):
            if len(types[key]) > 1 and isinstance(message.get(key), bool):
                message[key] = to_json(message[key])
    kind = pyarrow.list_(pyarrow.struct(kinds))
    messages = pyarrow.array([row["messages"] for row in rows], kind)
    tools = pyarrow.array([row["tools"] for row in rows], pyarrow.string())
    return pyarrow.table({"messages": messages, "tools": tools})


# -- The folder and its report ---------------------------------------------------------------------


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yields a temporary folder. It gets the name of the output when it is complete."""
    temporary = output.with_name(f".{output.name}.incomplete")
    temporary.mkdir(parents=True, exist_ok=True)
    with locked(temporary):
        try:
            for left in temporary.iterdir():  # by a process that was killed
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            yield temporary
            old = output.with_name(f".{output.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            sync(temporary)
            if output.exists():
                output.rename(old)
            temporary.rename(output)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Ends the tool if another process has this lock. A process that ends loses it."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        sys.exit(f"error: another process writes to {folder}: wait until it has ended")
    finally:
        os.close(lock)


def facts_of(files: list[File], args) -> dict:
    """What the result depends on: the flags, and names, sizes and times of the files."""
    others = {"sources", "output", "workers", "dry_run", "check", "overwrite", "skip_bad"}
    others |= {"mds", "compression", "part_rows", "demo"}
    others |= {"model_name", "seq_length", "packing"} if not args.rows else set()
    facts = {"flags": {name: value for name, value in vars(args).items() if name not in others}}
    facts["sources"] = []
    for number, source in enumerate(args.sources):
        own = [[file.name, file.size, file.time] for file in files if file.source == number]
        entry = {"source": source, "files": len(own), "bytes": sum(size for _, size, _ in own)}
        entry["names, sizes and times"] = xxhash.xxh3_128_hexdigest(json.dumps(own).encode())
        facts["sources"].append(entry)
    return facts


def old_report(args, facts: dict) -> dict:
    """The report of the folder that is there. Ends the tool if it is of other sources."""
    if not args.output.exists():
        return {}
    try:
        report = json.loads((args.output / REPORT).read_text(encoding="utf-8"))
        old = {name: report["facts"][name] for name in facts}
    except (OSError, ValueError, KeyError, TypeError):
        sys.exit(f"error: this tool has not written {args.output}: choose another -o")
    if args.check or args.overwrite:
        return report
    old["flags"].setdefault("max_characters", PIECE)  # of a folder from before this flag
    flags = {name: value for name, value in facts["flags"].items() if value or name in old["flags"]}
    changed = [name for name in flags if flags[name] != old["flags"].get(name)]
    names = [f"--{name.replace('form', 'as').replace('_', '-')}" for name in changed]
    what = f"different flags ({', '.join(names)})" if names else ""
    if [entry["source"] for entry in old["sources"]] != args.sources:
        what = "different sources"
    if what:
        sys.exit(f"error: {args.output} was made with {what}: --overwrite replaces it")
    return report


# `datasets` caches a folder by its name and this YAML alone, so the YAML has a hash of the content.
README = """---
configs:
- config_name: default
  description: documents {digest}
  data_files:
{splits}
---

# {name}

tools/prepare-data.py has written this folder: {rows}. `report.json` has the sources and all counts.
"""
README_OF_ROWS = """
Chapters 16 and 17 train on these rows of {length:,} tokens{packing}. They read the same facts in
`rows.json`.

| | |
|---|---|
| tokenizer | of `{model_name}`, hash `{tokenizer}` |
| chat template | hash `{template}` |
| stop tokens | {stop_tokens} |
"""


def write_report(report: dict, folder: Path, name: str) -> None:
    text = json.dumps(report, indent=2)
    (folder / REPORT).write_text(text)
    splits = "\n".join(f"  - split: {s}\n    path: {s}-*.parquet" for s in report["rows"])
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    rows = ", ".join(f"{count:,} rows in {split}" for split, count in report["rows"].items())
    page = README.format(digest=digest, splits=splits, name=name, rows=rows)
    if facts := report.get("tokens"):
        (folder / ROWS).write_text(json.dumps(facts, indent=2))
        packing = "" if facts["packed"] else ", each of one text and padding"
        page += README_OF_ROWS.format_map(facts | {"packing": packing})
    (folder / "README.md").write_bytes(page.encode(errors="replace"))


def report_of(found: Found, facts: dict, left_out: Counter, files: list[File], args) -> dict:
    by_name = {file.name: file for file in files}
    undecoded = {}
    for name, count in found.undecoded.most_common(PLACES):
        guess = guess_encoding(by_name[name], args)
        what = f"{count:,} characters are not UTF-8 or zero"
        undecoded[name] = f"{what}, perhaps {guess}: give --encoding"
    counts = {name: count for name, count in found.counts.items() if count}
    if undecoded:
        counts["undecoded characters"] = found.undecoded.total()
    rejected = {
        reason: {"rows": count, "places": found.places[reason]}
        for reason, count in found.rejected.items()
    }
    versions = {"python": sys.version.split()[0], "pyarrow": pyarrow.__version__}
    return {
        "facts": facts,
        "first": {args.sources[number]: text for number, text in found.first.items()},
        "counts": counts,
        "rejected": rejected,
        "damaged": found.damaged,
        "undecoded": undecoded,
        "files left out": dict(left_out),
        "columns left out": sorted(map(str, found.unread)),
        "shares": {},
        "digest": found.hexdigest(),
        "versions": versions | {"duckdb": duckdb.__version__},
    }


def check_rejected(report: dict, found: Found, args) -> None:
    """Ends the tool if a source has become nothing, or if more than 1 % of all is bad."""
    counts = report["counts"]
    rejected = sum(entry["rows"] for entry in report["rejected"].values())
    what = ""
    if rejected > counts.get("rows", 0) / 100:
        what = f"{rejected:,} of {counts['rows']:,} rows are rejected: correct them"
    elif counts.get("undecoded characters", 0) > counts.get("characters", 0) / 100:
        what = "more than 1% of the characters cannot be decoded: give --encoding"
    if what and not args.skip_bad:
        show(report, args)
        sys.exit(f"error: {what}, or go on with --skip-bad")
    lost = [args.sources[n] for n, count in found.lost.items() if count and n not in found.first]
    if lost:
        show(report, args)
        sys.exit(f"error: nothing is left of {', '.join(lost[:PLACES])}: the lines above say why")


def show(report: dict, args) -> None:
    """About ten lines for people."""
    for entry in report["facts"]["sources"][:PLACES]:
        first = report["first"].get(entry["source"], "")
        print(f"{entry['source']}: {entry['files']:,} files, {entry['bytes'] / 1e6:,.1f} MB")
        print(f"  begins with {first[:150]!r}")
    print("read: " + ", ".join(f"{count:,} {name}" for name, count in report["counts"].items()))
    if others := report["files left out"]:
        print("files left out: " + ", ".join(f"{count:,} {why}" for why, count in others.items()))
    if report["columns left out"]:
        print("columns left out: " + ", ".join(report["columns left out"]))
    for reason, entry in [*report["rejected"].items()][:REASONS]:
        print(f"rejected: {entry['rows']:,} rows: {reason}: {'; '.join(entry['places'])[:300]}")
    for file, reason in [*report["damaged"].items(), *report["undecoded"].items()][:PLACES]:
        print(f"warning: {file}: {reason}")
    for source, entry in report["shares"].items():
        print(f"share: {source}: {entry['characters']:,} characters, {entry['times']:g} times")
    if "rows" in report:
        rows = ", ".join(f"{count:,} rows in {split}" for split, count in report["rows"].items())
        print(f"{args.output}: {rows}; {report['seconds']:.0f} s")
        if "tokens" in report:
            first = report["tokens"]["first"]
            end = " ..." if len(first) > SHOWN else ""
            print(f"the first row, of which «this» has a loss:\n{first[:SHOWN]}{end}")
            print(training("more/16-chat", args, args.output, "-s", args.seq_length))
        elif args.form == "messages":
            flags = ["--as", "messages", "--rows", "-m", args.model_name, "-s", args.seq_length]
            command = [args.output, *flags, "-o", f"{args.output}-rows"]
            print(f"Make rows of it: python tools/prepare-data.py {shlex.join(map(str, command))}")
        elif not args.mds:
            print(training("01-single-gpu", args, args.output))


def training(chapter: str, args, data, *flags) -> str:
    """The command that trains on the folder, on one device."""
    start = "torchrun --standalone --nproc-per-node 1" if chapter.startswith("more") else "python"
    flags = ["-d", data, "-e", args.output.name, *flags]
    flags += ["-m", args.model_name] if args.model_name != MODEL else []
    return f"Train on it: {start} {chapter}/train-llm.py {shlex.join(map(str, flags))}"


def show_rows(args) -> None:
    """How chapter 10 trains on the rows of --mds. It takes compressed ones from an address only."""
    data = f"s3://BUCKET/{args.output.name}" if args.compression else args.output
    is_held_out = any(args.output.glob("validation-*"))
    flags = ["--eval-dataset", args.output] if is_held_out else ["--eval-freq", 0]
    print(training("more/10-mds-shards", args, data, "-s", args.seq_length, *flags))


# -- All together ----------------------------------------------------------------------------------


def prepare(args) -> None:
    began = time.perf_counter()
    files, left_out = find_files(args.sources, args, args.output)
    facts = json.loads(json.dumps(facts_of(files, args)))
    if args.dry_run:
        show(report_of(read_all(files, args, None), facts, left_out, files, args), args)
        print(f"A dry run: at most {SAMPLE / 1e6:.0f} MB of a source; nothing was written")
        return
    old = old_report(args, facts)
    if args.check or (old and not args.overwrite):
        # Files may be copied or touched, so only their content tells whether they changed.
        is_same = not args.check and old["facts"] == facts
        is_same = is_same or read_all(files, args, None).hexdigest() == old.get("digest")
        if args.check:
            print(f"{args.output} has {'the same' if is_same else 'other'} documents")
            sys.exit(not is_same)
        if not is_same:
            before = old["facts"]["sources"]
            changed = [entry["source"] for entry in facts["sources"] if entry not in before]
            what = " or ".join(changed[:PLACES]) or "this tool"
            sys.exit(f"error: {what} changed since {args.output} was made: --overwrite replaces it")
        print(f"Nothing has changed: {args.output} has these files already, with these flags")
        return
    with new_folder(args.output) as folder:
        work = folder / "work"
        work.mkdir()
        found = read_all(files, args, work)
        report = report_of(found, facts, left_out, files, args)
        check_rejected(report, found, args)
        if not report["counts"].get("documents"):
            sys.exit("error: there is no document to train on")
        report["rows"] = write_splits(work, folder, args, found.types, report)
        if "train" not in report["rows"]:
            sys.exit("error: all documents are held out, so there is none to train on")
        shutil.rmtree(work)
        report["seconds"] = round(time.perf_counter() - began, 1)
        write_report(report, folder, args.output.name)
    show(report, args)


# -- Flags -----------------------------------------------------------------------------------------


def percent(text: str) -> float:
    """1% and 0.01 are the same."""
    value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError("give a part such as 1% or 0.01")
    return value


def role(text: str) -> tuple[str, str]:
    """bing=assistant: one of the five roles, or the name itself, which a template may know."""
    name, _, role = text.partition("=")
    if not name or role not in {*ROLES, name}:
        raise argparse.ArgumentTypeError(f"give NAME={'|'.join(ROLES)}, or NAME=NAME to keep it")
    return plain(name), role


def options(text: str) -> dict:
    """{enable_thinking: false}: YAML, of which JSON is a part."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("give options such as '{enable_thinking: false}'")
    return json.loads(json.dumps(value, default=str))  # a date is no JSON


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("sources", nargs="*", help="files, patterns, folders, addresses, or names on the Hub")
    add("-o", "--output", type=Path, required=True, help="the folder to write")
    add("--as", dest="form", choices=["text", "messages"], default="text", help="what rows become")
    add("--text-column", default="text", help="of tables and JSON")
    add("--role", type=role, action="append", default=[], help="such as bing=assistant")
    add("--subset", help="configuration name on the Hub")
    add("--encoding", help="of all files, such as cp1252; by default UTF-8, or by their mark")
    add("--delimiter", help="between the cells of .csv (a comma) and .tsv (a tab)")
    add("--held-out", type=percent, default=0.0, help="such as 1%%, by a hash of the document")
    add("--max-characters", type=int, default=PIECE, help="a longer text is cut into pieces")
    add("--dedupe", action="store_true", help="writes one of equal documents")
    add("--share", nargs="+", type=float, help="parts of the characters, one for each source")
    add("--repeat", type=float, default=4, help="with --share, a source counts at most so often")
    add("--shuffle", action=argparse.BooleanOptionalAction, default=True, help="over all sources")
    add("--seed", type=int, default=0, help="of the order, of --held-out and of --share")
    add("--drop-nulls", action="store_true", help="also in JSON, if a table has filled them in")
    add("--skip-bad", action="store_true", help="goes on without bad rows and damaged files")
    add("--workers", type=int, default=1, help="processes that read files")
    add("--dry-run", action="store_true", help="reads some MB of each source, and writes nothing")
    add("--check", action="store_true", help="reads all, and compares with the folder")
    add("--overwrite", action="store_true", help="replaces an older folder of this tool")
    add("-m", "--model-name", default=MODEL, help="of --rows and --mds: whose tokenizer")
    add("-s", "--seq-length", type=int, default=1024, help="of --rows and --mds: tokens of a row")
    add("--rows", action="store_true", help="writes rows of tokens, for chapters 16 and 17")
    add("--chat-template", type=Path, help="a Jinja file, in place of the model's own template")
    add("--template-options", type=options, default={}, help="'{enable_thinking: false}'")
    add("--mds", action="store_true", help="also writes rows of tokens, for chapter 10")
    add("--packing", choices=PACKINGS, default="pack", help="of --mds: text to rows")
    add("--no-packing", action="store_const", dest="packing", const="none", help="one text a row")
    add("--compression", choices=["zstd", "gz", "bz2"], help="of --mds, for slow networks")
    add("--part-rows", type=int, default=65_536, help="of --mds: a stop loses at most so many")
    add("--demo", action="store_true", help="the text, tokenizer and rows of the chapters' --demo")
    if "--demo" in sys.argv[1:]:
        parser.set_defaults(**DEMO)
    args = parser.parse_args()
    args.role = dict(args.role)
    args.sources = args.sources or DEMO["sources"] * args.demo
    if not args.sources:
        parser.error("give one or more sources")
    if min(args.seq_length - 1, args.part_rows) < 1 or (args.mds and args.form == "messages"):
        parser.error("--mds is for text, with at least 2 tokens in a row, and a row in a part")
    if args.rows and (args.mds or args.packing not in ("pack", "none")):
        parser.error("--rows knows --no-packing, but not --mds, and none of its --packing")
    if not args.rows and (args.chat_template or args.template_options or args.packing == "none"):
        parser.error("--chat-template, --template-options and --no-packing are for --rows")
    if args.chat_template:
        try:
            args.chat_template = args.chat_template.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            parser.error(f"--chat-template: {error}")
    if glob.has_magic(os.path.realpath(args.output)):
        parser.error(f"`datasets` cannot read {args.output}, whose path has one of * ? [")
    try:
        codecs.lookup(args.encoding or "utf-8")
    except LookupError as error:
        parser.error(str(error))
    if args.share and (len(args.share) != len(args.sources) or min(args.share) <= 0):
        parser.error("--share needs a part above 0 for each source")
    if min(args.workers, args.max_characters) < 1 or args.seed < 0:
        parser.error("--workers and --max-characters must be above 0, and --seed not below 0")
    return args


def stop(number, frame):
    sys.exit(128 + number)  # so that temporary files are removed


def main() -> None:
    args = parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        prepare(args)
        if args.mds and not args.dry_run and not args.check:
            with locked(args.output):
                write_mds(args)
            show_rows(args)
    except KeyboardInterrupt:
        sys.exit("\nStopped: nothing was written")
    except BrokenProcessPool:
        sys.exit("error: a process was killed, perhaps for memory: lower --workers, and go on")
    except (OSError, ValueError, ImportError, duckdb.Error) as error:  # such as a full disk
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
