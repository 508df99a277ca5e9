"""What tools read: whatever files there are become documents, which are texts or messages.

docs/data.md has the forms. Each reader yields the rows of a file one after the other, so a file may
be larger than the memory. tools/prepare-data.py, preflight.py and perplexity.py import this module.
"""

import bz2
import csv
import glob
import gzip
import io
import json
import lzma
import os
import re
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pyarrow
import pyarrow.parquet
import xxhash
from conversations import COLUMNS, Rejected, conversation_as_text

TEXTS, JSON, TABLES = {".txt", ".md", ".py"}, {".json", ".jsonl"}, {".parquet", ".arrow"}
DELIMITERS = {".csv": ",", ".tsv": "\t"}
FORMATS = {*TEXTS, *JSON, *DELIMITERS, *TABLES, ".mds"}
PACKED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
PACKED[".zst"] = partial(pyarrow.input_stream, compression="zstd")
# The words in names of files that are held out, such as chats_dev.csv or validation.jsonl
WORDS = "validation|valid|val|dev|eval|evaluation|test|testing"
HELD_OUT = re.compile(rf"(?<![a-z])({WORDS})(?![a-z])", re.IGNORECASE)
# They describe data, and are no documents.
ABOUT = {"README.md", "report.json", "dataset_info.json", "dataset_dict.json", "state.json"}
ABOUT |= {"index.json", "rows.json", "place.json"}
# A longer mark stands before the shorter one with which it begins.
MARKS = {b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32", b"\xef\xbb\xbf": "utf-8-sig"}
MARKS |= {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
ENCODINGS = ["cp1252", "cp1250", "cp1251", "cp932", "gb18030", "big5", "cp949"]  # to guess from
POINTER = b"version https://git-lfs.github.com/spec"
END = "<|endoftext|>"  # between the documents of a text file
PIECE = 250_000  # characters; by default, a longer document is cut into such pieces
LONGEST = 250_000_000  # characters of a row of JSON, which takes several times as much memory
PLACES = 5  # of rejected rows that are shown, for each reason
DAMAGED = (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error, csv.Error)
DAMAGED += (pyarrow.ArrowException,)


@dataclass
class File:
    name: str  # a path or an address; its ending gives the format
    source: int = 0  # the number of its source
    held_out: bool = False
    stream: io.FileIO | None = None  # while it is read
    done: int = 0  # bytes that the progress bar has

    def __post_init__(self):
        path = Path(self.name.lower())
        self.packed = path.suffix if path.suffix in PACKED else ""
        self.kind = path.with_suffix("").suffix if self.packed else path.suffix
        if path.name == "index.json":  # of shards
            self.kind = ".mds"
        if "://" in self.name:
            system, path = fsspec.url_to_fs(self.name)
            info = system.info(path)
            self.size = info.get("size") or 0
            self.time = str([info.get(key) for key in ("mtime", "ETag", "LastModified")])
        else:
            self.size = os.stat(self.name).st_size
            self.time = os.stat(self.name).st_mtime_ns

    def path(self) -> str:
        """On this machine. A file at an address is downloaded once, into a cache."""
        if "://" not in self.name:
            return self.name
        import datasets  # here, because it takes a second

        return str(datasets.DownloadManager().download(self.name))

    def progress(self) -> int:
        """The bytes read since the last call."""
        before = self.done
        if self.stream and not self.stream.closed:
            self.done = self.stream.tell()
        return self.done - before


@dataclass
class Found:
    """What reading has found."""

    counts: Counter = field(default_factory=Counter)
    rejected: Counter = field(default_factory=Counter)  # reason: rows
    places: dict = field(default_factory=lambda: defaultdict(list))  # reason: the first rows
    undecoded: Counter = field(default_factory=Counter)  # file: characters
    damaged: dict = field(default_factory=dict)  # file: the reason
    unread: set = field(default_factory=set)  # columns with values that are not read
    types: dict = field(default_factory=lambda: defaultdict(set))  # of the keys of messages
    first: dict = field(default_factory=dict)  # source: the beginning of its first document
    lost: Counter = field(default_factory=Counter)  # source: rows and files that became nothing
    digest: bytes = b""  # of all documents

    def add(self, later: "Found") -> None:
        for name in ("counts", "rejected", "undecoded", "damaged", "unread", "lost"):
            getattr(self, name).update(getattr(later, name))
        for reason, places in later.places.items():
            self.places[reason] = (self.places[reason] + places)[:PLACES]
        for key, types in later.types.items():
            self.types[key] |= types
        self.first = later.first | self.first
        self.digest += later.digest

    def hexdigest(self) -> str:
        return xxhash.xxh3_128_hexdigest(self.digest)


def reading(**options) -> SimpleNamespace:
    """How files are read: the flags of tools/prepare-data.py, or their defaults."""
    flags = {"form": "text", "text_column": "text", "subset": None, "encoding": None}
    flags |= {"delimiter": None, "drop_nulls": False, "skip_bad": False, "role": {}}
    flags["max_characters"] = PIECE
    return SimpleNamespace(**flags | options)


# -- Sources ---------------------------------------------------------------------------------------


def find_files(sources: list[str], args, output: Path | None = None) -> tuple[list, Counter]:
    """The files of all sources, each real file once, and how many others were left out, and why."""
    files, left_out, seen = [], Counter(), set()
    for number, source in enumerate(map(os.path.expanduser, sources)):
        has_files = len(files)
        if "://" in source:
            found = at_address(source, number)
        elif os.path.exists(source) or glob.has_magic(source) or Path(source).suffix in FORMATS:
            found = local_files(source, number, left_out)
        else:
            found = on_the_hub(source, args.subset, number)
        for file in found:
            real = os.path.realpath(file.name) if "://" not in file.name else file.name
            if output and real.startswith(f"{os.path.realpath(output)}/"):
                left_out["inside the output"] += 1
            elif real in seen:
                left_out["links to files that are read already"] += 1
            elif file.kind not in FORMATS:
                left_out[f"that end in {file.kind or 'nothing'}"] += 1
            elif args.form == "messages" and file.kind in TEXTS:
                left_out["of text, which have no messages"] += 1
            else:
                files.append(file)
                seen.add(real)
        if len(files) == has_files:
            others = "".join(f"; {count:,} {why}" for why, count in left_out.items())
            known = ", ".join(sorted(FORMATS))
            sys.exit(f"error: no files for {source}: give some that end in {known}{others}")
    if all(file.held_out for file in files):  # so they are chosen to train on
        for file in files:
            file.held_out = False
    return files, left_out


def local_files(source: str, number: int, left_out: Counter) -> list[File]:
    """The files of a name, a folder or a pattern. Their names tell which are held out."""
    if os.path.exists(f"{source}/index.json") and not glob.glob(f"{glob.escape(source)}/train-*"):
        return [File(f"{source}/index.json", number)]  # shards of MDS
    pattern = f"{glob.escape(source)}/**" if os.path.isdir(source) else source
    names = [source] if os.path.isfile(source) else sorted({*expand(pattern)})
    if dead := sum(not os.path.exists(name) for name in names):
        left_out["links to nothing"] = dead
    names = [name for name in names if os.path.isfile(name)]
    if os.path.isdir(source):  # what describes the data is no document
        described = [name for name in names if os.path.basename(name) not in ABOUT]
        if described and len(described) < len(names):
            left_out["READMEs and reports"] += len(names) - len(described)
        names = described or names
    # The folder of all files may be named "test" without meaning it.
    base = os.path.commonpath(names) if len(names) > 1 else os.path.dirname(source)
    return [File(name, number, held_out_by_name(name.removeprefix(base))) for name in names]


def expand(pattern: str) -> list[str]:
    """As glob does. But links that lead back to a parent are followed once."""
    if "**" not in pattern:
        return glob.glob(pattern)
    head, _, tail = pattern.partition("**")
    names, seen = [], set()
    for base in filter(os.path.isdir, glob.glob(head or "./")):
        for folder, below, _ in os.walk(base, onerror=refuse, followlinks=True):
            below[:] = sorted(name for name in below if not name.startswith("."))
            real = os.path.realpath(folder)
            if real in seen:
                below.clear()
                continue
            seen.add(real)
            names += expand(os.path.join(glob.escape(folder), tail.strip("/") or "*"))
    return [os.path.normpath(name) for name in names]


def refuse(error: OSError) -> None:
    raise error  # os.walk would leave out a folder that it may not read


def held_out_by_name(name: str) -> bool:
    return bool(HELD_OUT.search(name)) and not name.endswith(".py")  # test_io.py is code


def at_address(source: str, number: int) -> list[File]:
    """The files of an address, such as s3://bucket/*.jsonl"""
    system, path = fsspec.url_to_fs(source)
    paths = sorted(system.glob(path)) if glob.has_magic(path) else [path]
    names = [system.unstrip_protocol(path) for path in paths]
    base = os.path.commonpath(paths) if len(paths) > 1 else os.path.dirname(path)
    files = zip(names, paths, strict=True)
    return [File(name, number, held_out_by_name(path.removeprefix(base))) for name, path in files]


def on_the_hub(source: str, subset: str | None, number: int) -> list[File]:
    """The files of a split, as they are on the Hub. Another split may be held out."""
    import datasets

    name, _, split = source.partition(":")
    split = split or "train"
    try:
        data_files = datasets.load_dataset_builder(name, subset).config.data_files or {}
    except ValueError as error:  # perhaps of several lines, with an example in Python
        reason = " ".join(str(error).partition("Example of usage")[0].split())
        sys.exit(f"error: {name}: {reason} (--subset chooses a configuration)")
    splits = {str(key): list(addresses) for key, addresses in data_files.items()}
    if split not in splits:
        sys.exit(f"error: choose one of the splits {[*splits]} with {name}:SPLIT")
    others = [other for other in splits if HELD_OUT.search(other) and other != split]
    held_out = "validation" if "validation" in others else next(iter(others), None)
    files = [File(address, number) for address in splits[split]]
    return files + [File(address, number, True) for address in splits.get(held_out, [])]


# -- Readers of a file: they yield the number of each row, and the row or why it is rejected -------


def open_text(file: File, args, errors: str, newline: str | None) -> io.TextIOWrapper:
    """The characters of a file, by --encoding, or by its mark, or as UTF-8."""
    file.stream = io.FileIO(file.path())
    stream = io.BufferedReader(file.stream, 1_000_000)
    if file.packed:
        stream = io.BufferedReader(PACKED[file.packed](stream), 1_000_000)
    head = stream.peek(10_000)[:10_000]
    if head.startswith(POINTER):
        raise Rejected("a pointer of git-lfs and not the content, so run `git lfs pull`")
    by_mark = next((name for mark, name in MARKS.items() if head.startswith(mark)), None)
    encoding = args.encoding or by_mark or "utf-8"
    if b"\0" in head and encoding.startswith("utf-8"):
        raise Rejected("zero bytes: no text, or UTF-16 without its mark: --encoding utf-16-le")
    return io.TextIOWrapper(stream, encoding, errors, newline)


def read_text(file: File, args, found: Found) -> Iterator:
    """What is between <|endoftext|>. The pieces of a long document have the same number."""
    size = args.max_characters
    number = 1
    unfinished = ""  # a document that may go on in the next characters of the file
    has_piece = False  # of this document, which is empty if it has white space alone
    with open_text(file, args, "replace", newline=None) as stream:
        while characters := stream.read(PIECE):
            if undecoded := characters.count("\ufffd") + characters.count("\0"):
                found.undecoded[file.name] += undecoded
            *documents, unfinished = (unfinished + characters).split(END)
            for document in documents:
                yield number, {"text": document if has_piece or document.strip() else ""}
                number += 1
                has_piece = False
            while len(unfinished) > size + len(END):  # its last characters may begin an END
                yield number, {"text": unfinished[:size]}
                unfinished = unfinished[size:]
                has_piece = True
    yield number, {"text": unfinished if has_piece or unfinished.strip() else ""}


def read_json(file: File, args, found: Found) -> Iterator:
    """A row in each line, or a list of all rows, or rows of several lines each.

    A line that is a list of messages is a row, too.
    """
    # Bytes that are not UTF-8 become characters that encode() refuses later, with file and row.
    with open_text(file, args, "surrogateescape", newline="\n") as stream:
        begun = False
        for number, line in enumerate(iter(lambda: stream.readline(LONGEST), ""), 1):
            if line.isspace():
                continue
            is_list = not begun and line.lstrip()[0] == "["
            is_row = is_list and args.form == "messages" and is_conversation(line)
            if not begun and (is_list or line.strip() == "{") and not is_row:
                yield from read_values(stream, line)
                return
            begun = True
            if len(line) == LONGEST:
                raise Rejected(f"line {number} has more than {LONGEST:,} characters")
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                yield number, Rejected("no JSON", error)


def is_conversation(line: str) -> bool:
    """Whether a line is a list of messages, and not the beginning of a list of all rows."""
    try:
        first, _ = json.JSONDecoder().raw_decode(line.lstrip()[1:].lstrip())
    except (ValueError, RecursionError):
        return False
    return line.rstrip().endswith("]") and isinstance(first, dict) and {*first} & {"role", "from"}


def read_values(stream: io.TextIOWrapper, buffer: str) -> Iterator:
    """The elements of a list, or values one after the other, some of them in memory."""
    decoder = json.JSONDecoder()
    is_list = buffer.lstrip()[0] == "["
    position = buffer.index("[") + 1 if is_list else 0
    number = 1
    while True:
        position = re.compile(r"[\s,]*").match(buffer, position).end()
        if is_list and buffer[position : position + 1] == "]":
            if buffer[position + 1 :].strip() or stream.read(1000).strip():
                raise Rejected("something stands behind the list: a row must be an object")
            return
        try:
            value, position = decoder.raw_decode(buffer, position)
        except (json.JSONDecodeError, RecursionError) as error:
            # Only a string is cut far from the end of the buffer. Other errors are the file's own.
            at = getattr(error, "pos", 0)
            is_cut = at > len(buffer) - 10 or str(error).startswith("Unterminated")
            more = ""
            if is_cut and len(buffer) - position < LONGEST:
                more = stream.read(max(1_000_000, len(buffer) - position))
            if not more and (is_list or buffer[position:].strip()):
                raise Rejected(f"row {number} is no JSON", error) from None
            if not more:
                return
            buffer, position = buffer[position:] + more, 0
        else:
            yield number, value
            number += 1


def read_cells(file: File, args, found: Found) -> Iterator:
    """The rows of a table as text: 007 and NA stay. Their number is that of their last line."""
    csv.field_size_limit(LONGEST)
    delimiter = args.delimiter or DELIMITERS[file.kind]
    with open_text(file, args, "surrogateescape", newline="") as stream:
        reader = csv.reader(stream, delimiter=delimiter, strict=True)
        names = next(reader, [])
        if len({*names}) < len(names):
            raise Rejected("two columns have one name", names)
        if len(names) == 1 and re.search("[;\t|]", names[0]):
            raise Rejected(f"the line {names[0]!r} has no {delimiter!r}: give --delimiter")
        while True:
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield reader.line_num, Rejected("quotation marks or cells are wrong", error)
                continue
            if len(row) == len(names):
                yield reader.line_num, dict(zip(names, row, strict=True))
            elif row:  # an empty line has no cells
                counts = f"{len(row)} cells, and {len(names)} columns"
                yield reader.line_num, Rejected("another number of cells than of columns", counts)


def read_table(file: File, args, found: Found) -> Iterator:
    """The rows of Parquet or Arrow: the columns that are wanted, and no others."""
    with pyarrow.memory_map(file.path()) as source:
        head = source.read(100)
        source.seek(0)
        if head.startswith(POINTER):
            raise Rejected("a pointer of git-lfs and not the content, so run `git lfs pull`")
        if file.kind == ".parquet":
            table = pyarrow.parquet.ParquetFile(source)
            names = table.schema_arrow.names
        else:
            is_file = head.startswith(b"ARROW1")
            table = (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(source)
            names = table.schema.names
        wanted = [args.text_column] if args.form == "text" else COLUMNS
        columns = [name for name in names if name in wanted]
        found.unread.update(name for name in names if name not in columns)
        if not columns:
            raise Rejected(f"no column {' or '.join(wanted)}", f"the columns are {names}")
        if len({*columns}) < len(columns):
            raise Rejected("two columns have one name", columns)
        if file.kind == ".parquet":
            batches = table.iter_batches(batch_size=500, columns=columns)
        elif is_file:
            batches = (table.get_batch(i) for i in range(table.num_record_batches))
        else:
            batches = table
        number = 1
        for batch in batches:
            for start in range(0, batch.num_rows, 500):
                for row in python_rows(batch.select(columns).slice(start, 500)):
                    yield number, row
                    number += 1


def python_rows(batch: pyarrow.RecordBatch) -> list:
    """Its rows. A row with bytes that are not UTF-8 is rejected alone."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            return [Rejected("not UTF-8, or half a character", error)]
        return [row for i in range(batch.num_rows) for row in python_rows(batch.slice(i, 1))]


def read_shards(file: File, args, found: Found) -> Iterator:
    """The rows of a folder of MDS, without what is no text."""
    from streaming import StreamingDataset

    samples = StreamingDataset(local=os.path.dirname(file.name), batch_size=1)
    for i in range(len(samples)):
        yield i + 1, {name: value for name, value in samples[i].items() if isinstance(value, str)}


READERS = dict.fromkeys(TEXTS, read_text) | dict.fromkeys(JSON, read_json)
READERS |= dict.fromkeys(DELIMITERS, read_cells) | dict.fromkeys(TABLES, read_table)
READERS[".mds"] = read_shards


def text_of(row: object, column: str, found: Found) -> str:
    """The text of a row, or nothing where it is null. No part of it is white space alone."""
    if not isinstance(row, dict):
        raise Rejected("a row must be an object", row)
    if column not in row:
        raise Rejected(f"no text in {column!r}: choose --text-column", f"columns {[*row]}")
    text = row.pop(column)
    found.unread.update(row)
    if not isinstance(text, str | None):
        raise Rejected(f"no text in {column!r}, but a {type(text).__name__}", text)
    if END in (text or ""):
        text = END.join(part for part in text.split(END) if part.strip())
    return text or ""


# -- Documents -------------------------------------------------------------------------------------


def encoded_documents(file: File, args, found: Found) -> Iterator[tuple[int, bytes, int]]:
    """The number of the row of each document, its UTF-8, and its characters.

    A document may be empty. A conversation is JSON. The pieces of a long document
    have the same number. A file that cannot be read ends the tool, or is noted with --skip-bad.
    """
    rows = READERS[file.kind](file, args, found)
    number = before = 0
    while True:
        try:
            number, row = next(rows)
        except StopIteration:
            return
        except (Rejected, *DAMAGED) as error:
            reason = ": ".join(map(str, error.args)) or repr(error)
            reason = f"{reason} (after row {number:,})" if number else reason
            if not args.skip_bad:
                sys.exit(f"error: {file.name}: {reason}")
            found.damaged[file.name] = reason
            found.lost[file.source] += 1
            return
        found.counts["rows"] += number != before
        before = number
        try:
            if isinstance(row, Rejected):
                raise row
            if args.form == "messages":
                text, characters = conversation_as_text(row, args, found, file.kind in TABLES)
                pieces = [(text.encode(), characters)]
            else:
                column = "text" if file.kind in TEXTS else args.text_column
                text = text_of(row, column, found)
                size = args.max_characters
                texts = [text[i : i + size] for i in range(0, len(text) or 1, size)]
                pieces = [(piece.encode(), len(piece)) for piece in texts]
        except UnicodeEncodeError:
            reject(found, file, number, "not UTF-8, or half a character")
        except Rejected as error:
            reject(found, file, number, *error.args)
        else:
            for piece, characters in pieces:
                yield number, piece, characters


def documents_of(file: File, args, found: Found) -> Iterator[tuple[int, str, int]]:
    """As encoded_documents(), with texts."""
    for number, data, characters in encoded_documents(file, args, found):
        yield number, data.decode(), characters


def reject(found: Found, file: File, number: int, reason: str, *shown) -> None:
    found.rejected[reason] += 1
    found.lost[file.source] += 1
    if len(found.places[reason]) < PLACES:
        place = f"{file.name}:{number}"
        found.places[reason].append(place + "".join(f": {str(value)[:80]}" for value in shown))


def held_out_texts(source: str, args) -> Iterator[str]:
    """The held-out documents of a source, or all if there are none."""
    files, _ = find_files([source], args)
    held_out = [file for file in files if file.held_out]
    for file in held_out or files:
        for _, text, _ in documents_of(file, args, Found()):
            yield text


def guess_encoding(file: File, args) -> str:
    import charset_normalizer

    with open_text(file, args, "replace", "") as stream:
        data = stream.buffer.read(100_000)
    guess = charset_normalizer.from_bytes(data, cp_isolation=ENCODINGS).best()
    return " or ".join(guess.could_be_from_charset) if guess else "no text"
