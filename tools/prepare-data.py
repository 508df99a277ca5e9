"""Writes a folder with clean text out of what you have. The chapters train on it: -d FOLDER.

    python tools/prepare-data.py "texts/**/*.txt" notes.jsonl.gz -o data/books
    python tools/prepare-data.py TinyStoriesV2-GPT4-*.txt -o data/stories
    python tools/prepare-data.py HuggingFaceFW/fineweb --dataset-subset sample-10BT -o data/web

Sources are files (.txt, .md, .py, .json, .jsonl, .csv, .parquet, each also as .gz), patterns,
folders, and datasets on the Hub: NAME, or NAME:SPLIT. A text file has one document, or
several with <|endoftext|> between them. Documents above 250,000 characters are cut. Files that are
named like chats_dev.csv or validation.jsonl are held out.

The folder gets train-*.parquet, and validation-*.parquet for held-out documents, with one column
`text`. It appears under its name when it is complete. The text may be larger than the memory.
"""

import argparse
import gzip
import json
import os
import re
import shutil
import sys
from collections import defaultdict
from glob import escape, glob
from itertools import chain, islice
from pathlib import Path

import datasets
import pandas
import pyarrow
import pyarrow.parquet
from tqdm import tqdm

# The names of files that are held out, such as chats_dev.csv or validation.jsonl
HELD_OUT = re.compile(r"(?<![a-z])(validation|valid|val|dev|eval|test)(?![a-z])", re.IGNORECASE)
TEXT_PIECE = 250_000  # characters of a text file that are read at once, to save memory
GROUP = 16_000_000  # characters of a row group; the tool holds one in memory
GROUPS = 20  # of a Parquet file
REPORT = "report.json"


# -- Readers of one file: they yield the texts of its documents ------------------------------------


def read_text(file, column):
    """What is between <|endoftext|> in a text file, long documents in pieces."""
    open_file = gzip.open if file.endswith(".gz") else open
    undecoded = 0
    unfinished = ""  # a document that may go on in the next piece of the file
    with open_file(file, "rt", encoding="utf-8-sig", errors="replace") as stream:
        while piece := stream.read(TEXT_PIECE):
            if piece.startswith("\ufffd\ufffd") or "\0" in piece[:2]:  # UTF-16
                raise ValueError("convert it to UTF-8")
            undecoded += piece.count("\ufffd")  # in place of what cannot be decoded
            documents = (unfinished + piece).split("<|endoftext|>")
            unfinished = documents.pop()
            if len(unfinished) >= TEXT_PIECE:
                documents.append(unfinished)
                unfinished = ""
            yield from documents
    yield unfinished
    if undecoded:
        tqdm.write(f"warning: {file}: {undecoded:,} characters cannot be decoded: is it UTF-8?")


def read_csv(file, column):
    """A column of a table. Cells such as NA or 0007 stay as they are."""
    for rows in pandas.read_csv(file, dtype=str, keep_default_na=False, chunksize=10_000):
        check_column(column, rows)
        yield from rows[column]


def read_rows(file, column):
    """A column of JSON or Parquet. Files, and rows of a file, may differ in other columns."""
    file_format = ending_of(file)[1:].removesuffix("l")
    # Without this option, `datasets` replaces the columns of files that look like logs of agents.
    options = {"parse_agent_traces": False} if file_format == "json" else {}
    options |= {"split": "train", "streaming": True}
    rows = iter(datasets.load_dataset(file_format, data_files=[escape(file)], **options))
    first = next(rows, {column: None})
    check_column(column, first)
    for row in chain([first], rows):
        text = row.get(column)
        if not isinstance(text, str | None):
            raise ValueError(f"no text in column {column!r}, but {str(text)[:60]!r}")
        yield text


READERS = {".txt": read_text, ".md": read_text, ".py": read_text, ".csv": read_csv}
READERS |= {".json": read_rows, ".jsonl": read_rows, ".parquet": read_rows}


def check_column(column, columns):
    if column not in columns:
        raise ValueError(f"no text in {column!r}: choose --text-column among {[*columns]}")


def ending_of(file):
    return Path(file.removesuffix(".gz")).suffix


# -- All sources. Other tools use load_documents, too ----------------------------------------------


def load_documents(sources, subset=None, column="text"):
    """The splits of all sources, as streams of rows {"text": ...}."""
    files = []
    parts = defaultdict(list)
    for source in sources:
        name = os.path.expanduser(source)
        ending = ending_of(name)
        if "://" in name and READERS.get(ending) != read_text:
            # `datasets` reads from servers and buckets, too, and expands patterns.
            file_format = ending[1:].removesuffix("l")  # json for .jsonl
            splits = datasets.load_dataset(file_format, data_files=name, streaming=True)
        elif "*" in name or ending in READERS or os.path.exists(name):
            files += find_files(name)
            splits = {}
        else:
            name, _, split = name.partition(":")  # a name on the Hub: NAME, or NAME:SPLIT
            split = split or "train"
            splits = datasets.load_dataset(name, subset, streaming=True)
            if split not in splits:
                sys.exit(f"error: choose one of the splits {[*splits]} with {name}:SPLIT")
            splits["train"] = splits.pop(split)  # call the chosen split "train"
        for split, documents in splits.items():
            parts[split].append(text_alone(documents, column))
    by_name = hold_out([*dict.fromkeys(files)]) if files else {}
    for split, names in by_name.items():
        features = datasets.Features(text=datasets.Value("string"))
        tqdm.write(f"{len(names):,} files for {split}")
        arguments = {"files": names, "column": column}
        stream = datasets.IterableDataset.from_generator(read_files, features, gen_kwargs=arguments)
        parts[split].insert(0, stream)
    return {split: datasets.concatenate_datasets(streams) for split, streams in parts.items()}


def find_files(name):
    """The files of a name, a pattern or a folder, in the order of their names."""
    if os.path.isdir(name):  # all of its files that can be read
        below = sorted(glob(f"{escape(name)}/**/*", recursive=True))
        found = [file for file in below if ending_of(file) in READERS]
        found = [file for file in found if Path(file).name != REPORT]
    else:
        found = [name] if os.path.isfile(name) else sorted(glob(name, recursive=True))
    files = [file for file in found if os.path.isfile(file)]
    if not files or any(ending_of(file) not in READERS for file in files):
        sys.exit(f"error: no files for {name}: give existing ones that end in {', '.join(READERS)}")
    return files


def hold_out(files):
    """The files to train on, and those that their names hold out."""
    folder = os.path.commonpath(files)  # its name may have the word "test" without meaning it
    texts = [file for file in files if not file.endswith(".py")]  # test_io.py is code to train on
    held_out = [file for file in texts if HELD_OUT.search(file.removeprefix(folder))]
    train = [file for file in files if file not in {*held_out}]
    return {"train": train, "validation": held_out} if train and held_out else {"train": files}


def text_alone(documents, column):
    """The stream with one column, `text`."""
    documents = documents._resolve_features()
    text_types = (datasets.Value("string"), datasets.Value("large_string"))
    check_column(column, [name for name, kind in documents.features.items() if kind in text_types])
    documents = documents.select_columns(column)
    return documents if column == "text" else documents.rename_column(column, "text")


def read_files(files, column):
    """The rows of local files. An error names its file."""
    for file in files:
        try:
            for text in READERS[ending_of(file)](file, column):
                yield {"text": text}
        except Exception as error:
            raise OSError(f"{file}: {error.__cause__ or error}") from error


# -- Writing ---------------------------------------------------------------------------------------


def write_split(folder, split, documents):
    """The Parquet files of a split. Returns what went in and out."""
    counts = {"documents": 0, "characters": 0, "empty": 0}
    groups = groups_of(tqdm(documents, split, unit=" documents", disable=None), counts)
    schema = pyarrow.schema({"text": pyarrow.string()})
    for number, first in enumerate(groups):
        file = folder / f"{split}-{number:05}.parquet"
        with pyarrow.parquet.ParquetWriter(file, schema, compression="zstd") as writer:
            for texts in chain([first], islice(groups, GROUPS - 1)):
                writer.write(pyarrow.table({"text": texts}, schema))
    return counts


def groups_of(documents, counts):
    """Lists of texts. Without empty documents, which it counts."""
    texts = []
    full = GROUP
    for row in documents:
        if not row["text"]:
            counts["empty"] += 1
            continue
        texts.append(row["text"])
        counts["documents"] += 1
        counts["characters"] += len(row["text"])
        if counts["characters"] >= full:
            yield texts
            texts = []
            full = counts["characters"] + GROUP
    if texts:
        yield texts


def prepare(args):
    """Writes under another name, and renames what is complete. Returns the counts by split."""
    output = args.output
    if output.exists() and any(output.iterdir()) and not (output / REPORT).exists():
        sys.exit(f"error: this tool has not written {output}: choose another --output")
    splits = load_documents(args.sources, args.dataset_subset, args.text_column)
    temporary = output.with_name(f".{output.name}.incomplete")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        counts = {"train": write_split(temporary, "train", splits["train"])}
        for split in [name for name in ("validation", "test") if name in splits]:
            counts["validation"] = write_split(temporary, "validation", splits[split])
            if counts["validation"]["documents"]:
                break
        if not counts["train"]["documents"]:
            sys.exit("error: there is no text to train on")
        report = {"sources": args.sources, "text_column": args.text_column, "splits": counts}
        (temporary / REPORT).write_text(json.dumps(report, indent=2))
        os.sync()  # all files are on the disk before the folder gets its name
        shutil.rmtree(output, ignore_errors=True)
        temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return counts


def main():
    parser = argparse.ArgumentParser(description="Text of any sources as one folder.")
    parser.add_argument("sources", nargs="+", help="files, patterns, or names on the Hub")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the new folder")
    parser.add_argument("--text-column", default="text", help="the column with the text")
    parser.add_argument("--dataset-subset", help="configuration name on the Hub")
    args = parser.parse_args()
    try:
        counts = prepare(args)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    for split, numbers in counts.items():
        size = f"{numbers['documents']:,} documents, {numbers['characters']:,} characters"
        print(f"{split}: {size}, without {numbers['empty']:,} empty documents")
    print(f"Train on them: python 01-single-gpu/train-llm.py -e NAME -d {args.output}")


if __name__ == "__main__":
    main()
