"""tools/prepare-data.py: whatever the files are, the folder has each document once."""

import bz2
import gzip
import json
import lzma
import os
import re
import signal
from collections import Counter
from unittest.mock import Mock

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.assertions import assert_one_sentence
from helpers.data import expected_tokens, tokens_of, write_documents, write_rows
from helpers.runner import REPOSITORY, SCRIPTS, load, outcome, python, run_tool

TOOL = REPOSITORY / "tools" / "prepare-data.py"
TINY = REPOSITORY / "models" / "tiny-llama"


@pytest.fixture(scope="module")
def documents():
    return load(REPOSITORY / "tools" / "documents.py")


def splits_of(documents, *names, **options) -> dict[str, list]:
    """What the tool reads, by its split, in the order of the sources."""
    args = documents.reading(**options)
    files, _ = documents.find_files([str(name) for name in names], args)
    splits = {}
    for file in files:
        found = [text for _, text, _ in documents.documents_of(file, args, documents.Found())]
        splits.setdefault("validation" if file.held_out else "train", []).extend(found)
    return splits


@pytest.fixture
def prepared(prepare, tmp_path):
    """The output of the tool, and the rows of the splits of the folder `out`."""

    def run(*flags, status=0) -> tuple[str, dict]:
        output = prepare(*flags, status=status)
        splits = {"train": [], "validation": []}
        for file in sorted((tmp_path / "out").glob("*.parquet")):
            rows = pq.read_table(file).to_pylist()
            splits[file.name.split("-")[0]] += [row.get("text", row) for row in rows]
        return output, splits

    return run


def test_files_of_every_kind(documents, texts, tmp_path):
    rows = datasets.Dataset.from_dict({"n": [1] * len(texts), "story": texts})
    rows.to_parquet(tmp_path / "a.parquet")
    rows.save_to_disk(tmp_path / "saved")
    rows.to_csv(tmp_path / "a.csv")
    rows.to_pandas().to_csv(tmp_path / "a.tsv", sep="\t", index=False)
    rows.to_json(tmp_path / "a[1].jsonl")  # a name, although it looks like a pattern
    (tmp_path / "list.json").write_text(json.dumps([*rows], indent=2))
    (tmp_path / "lines.json").write_text("\n".join(json.dumps(row, indent=1) for row in rows))
    data = (tmp_path / "a[1].jsonl").read_bytes()
    (tmp_path / "wide.jsonl").write_bytes(data.decode().encode("utf-16"))
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(data))
    (tmp_path / "b.json.bz2").write_bytes(bz2.compress(data))
    (tmp_path / "b.json.xz").write_bytes(lzma.compress(data))
    (tmp_path / "b.json.zst").write_bytes(pa.compress(data, "zstd", asbytes=True))
    for path in tmp_path.iterdir():
        assert splits_of(documents, path, text_column="story") == {"train": texts}, path
    with pytest.raises(SystemExit, match=r"a.parquet: no column text: the columns are \['n', 'st"):
        splits_of(documents, tmp_path / "a.parquet")
    for name in ("none.txt", "*.md", "a.html"):
        (tmp_path / "a.html").write_text("text\n")
        with pytest.raises(SystemExit, match=r"give some that end in .arrow, .csv, "):
            splits_of(documents, tmp_path / name)
    # Also the columns of agents' traces, for which `datasets` asks for another package
    rows = [{"text": "a", "n": 1}, {"text": "b", "n": {"m": 2}}]
    rows += [{"text": "c", "type": "message", "message": {"content": [1, "x"], "role": 2}}]
    assert splits_of(documents, write_rows(tmp_path / "c.jsonl", rows)) == {"train": [*"abc"]}
    (tmp_path / "cells.csv").write_text("text,n\nNA,1\n0007,\n")
    assert splits_of(documents, tmp_path / "cells.csv") == {"train": ["NA", "0007"]}


def test_text_files(prepared, tmp_path, chapter_1, tokenizer):
    """Each once, in the order of their names, also behind links, whatever the encoding."""
    (tmp_path / "texts" / "deep").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "texts" / "link").symlink_to(tmp_path / "elsewhere")
    files = {
        "texts/README.txt": b"first\n\n\ndocument " * 9,
        "texts/a.txt": b"one<|endoftext|>two<|endoftext|>three",
        "texts/b.txt": b"",
        "texts/deep/c.txt": b"bytes \xff\xfe in between",
        "texts/deep/d.txt": "zwölf".encode("latin-1"),
        "texts/deep/e.txt": "\ufeffdreizehn".encode(),
        "texts/deep/f_test.txt": b"held out",
        "texts/deep/g.txt": "vierzehn".encode("utf-16"),
        "elsewhere/f.txt": b"behind the link" * 30,
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    output, rows = prepared("texts/**/*.txt", "--no-shuffle")
    assert "c.txt: 2 characters are not UTF-8" in output
    assert "d.txt: 1 characters are not UTF-8" in output
    names = ["first\n\n\ndocument " * 9, "one", "two", "three", "bytes \ufffd\ufffd in between"]
    names += ["zw\ufffdlf", "dreizehn", "vierzehn", "behind the link" * 30]
    assert rows == {"train": names, "validation": ["held out"]}
    assert "11 rows, 10 documents" in output
    assert "Train on it: python 01-single-gpu/train-llm.py -d out -e out" in output
    found = tokens_of(chapter_1, tokenizer, tmp_path / "out", seq_length=1)
    assert found == expected_tokens(tokenizer, [*names, "held out"])
    splits = datasets.load_dataset(str(tmp_path / "out"))  # by the README
    assert {split: rows["text"][:] for split, rows in splits.items()} == rows
    for content in (b"a" * 20_000 + b"\0" * 500, "Größe ".encode("latin-1") * 99):
        (tmp_path / "texts" / "deep" / "h.txt").write_bytes(content)
        output, _ = prepared("texts/**/*.txt", "--no-shuffle", "--overwrite", status=1)
        assert "more than 1% of the characters cannot be decoded: give --encoding" in output
    flags = ["texts/deep/h.txt", "--encoding", "latin-1", "--overwrite"]
    assert prepared(*flags)[1]["train"] == ["Größe " * 99]


def test_links_that_lead_back_are_followed_once(documents, tmp_path):
    (tmp_path / "a.txt").touch()
    (tmp_path / "again").symlink_to(tmp_path)
    assert documents.expand(f"{tmp_path}/**/*.txt") == [f"{tmp_path}/a.txt"]


def test_long_documents(documents, prepared, tmp_path):
    """They are cut, and a border between two reads of the file stays a border."""
    text = "".join(f"{n} of many words " for n in range(40_000))
    (tmp_path / "a.txt").write_text(f"{text}<|endoftext|>b")
    write_documents(tmp_path / "a.jsonl", [text, "b"])
    end = "<|endoftext|>"
    # In the second case, the second read ends shortly behind a piece.
    for first in ("", "a" * 249_977):
        for length in range(249_975, 250_015):
            parts = [part for part in (first, "x" * length, "y") if part]
            (tmp_path / "border.txt").write_text(end.join(parts))
            found = splits_of(documents, tmp_path / "border.txt")["train"]
            assert ("".join(found), found[-1]) == ("".join(parts), "y")
    for name in ("a.txt", "a.jsonl"):
        output, rows = prepared(name, "--no-shuffle", "--overwrite")
        size = 250_000
        cut = [text[i : i + size] for i in range(0, len(text), size)]
        assert rows["train"] == [*cut, "b"]
        assert "2 documents, 1 documents that are cut" in output
        flags = ["--no-shuffle", "--overwrite", "--max-characters", len(text) - 1]
        assert prepared(name, *flags)[1]["train"] == [text[:-1], text[-1], "b"]


def test_files_that_their_names_hold_out(documents, tmp_path):
    cases = {
        "train.jsonl": "train",
        "validation.jsonl": "validation",
        "chats_dev.jsonl": "validation",
        "test-00000-of-00001.jsonl": "validation",
        "eval/part.jsonl": "validation",
        "latest.jsonl": "train",
    }
    folder = tmp_path / "test"  # a folder of all files says nothing
    (folder / "eval").mkdir(parents=True)
    for name in cases:
        (folder / name).write_text(json.dumps({"text": name}))
    found = splits_of(documents, f"{folder}/**/*.jsonl")
    for name in ("report.json", "table.bin"):  # of the tool itself, and of no reader
        (folder / name).write_text("{}")
    assert splits_of(documents, folder) == found
    for split in ("train", "validation"):
        assert sorted(found[split]) == sorted(n for n, where in cases.items() if where == split)
    assert splits_of(documents, f"{folder}/test*.jsonl").keys() == {"train"}  # chosen to train on
    for name in ("test_io.py", "io.py"):
        (folder / name).write_text("pass")
    assert splits_of(documents, f"{folder}/*.py").keys() == {"train"}


def test_a_split_of_the_hub(documents, monkeypatch, tmp_path):
    def stored(*names):
        files = {n: [f"file://{write_documents(tmp_path / f'{n}.jsonl', [n])}"] for n in names}
        config = type("Config", (), {"data_files": files})
        builder = type("Builder", (), {"config": config})
        monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_: builder)

    stored("train", "test")
    both = {"train": ["train"], "validation": ["test"]}
    assert splits_of(documents, "someone/some") == both
    stored("train_sft", "test")
    for name in ("someone/some", "someone/some:typo"):
        with pytest.raises(SystemExit, match=r"\['train_sft', 'test'\] with someone/some:SPLIT"):
            splits_of(documents, name)
    found = splits_of(documents, "someone/some:train_sft")
    assert found == {"train": ["train_sft"], "validation": ["test"]}
    # Nothing is trained on and held out.
    assert splits_of(documents, "someone/some:test") == {"train": ["test"]}
    error = ValueError("Pick one:\n['a', 'b']\nExample of usage: load_dataset('some', 'a')")
    monkeypatch.setattr(datasets, "load_dataset_builder", Mock(side_effect=error))
    with pytest.raises(SystemExit, match=r"some: Pick one: \['a', 'b'\] \(--subset chooses"):
        splits_of(documents, "someone/some")


def test_a_folder_that_may_not_be_read(documents, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "scandir", Mock(side_effect=PermissionError(13, "denied")))
    with pytest.raises(PermissionError):
        splits_of(documents, tmp_path)


def parquet_file(*columns: pa.Array) -> bytes:
    file = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_arrays(columns, ["text"] * len(columns)), file)
    return file.getvalue().to_pybytes()


HALF = pa.array([b"a", b"half \xc3"]).view(pa.string())
ROWS = [f'{{"text": "{n}"}}' for n in range(300)]
# A file and a part of the sentence. Each file is the second one that is read.
CASES = {
    "broken.jsonl": (b'{"text": "a"}\n{"text": "b"\n', "1 of 3 rows are rejected"),
    "no row.jsonl": (b'"text"\n[1]\n', "2 of 3 rows are rejected"),
    "list.json": (json.dumps([{"text": "a"}] * 9).encode()[:-9], "list.json: row 9 is no JSON"),
    "empty.jsonl": (b"\n", None),
    "else.csv": (b"txt,date\na,b\n", "1 of 2 rows are rejected"),
    "ragged.csv": (b"text,date\na,b,c\n", "1 of 2 rows are rejected"),
    "twice.csv": (b"text,text\na,b\n", "twice.csv: two columns have one name"),
    "quote.csv": (b'text\n"a\nb', "1 of 2 rows are rejected"),
    "numbers.jsonl": (b'{"text": 7}', "1 of 2 rows are rejected"),
    "latin-1.JSONL": ('{"text": "zwölf"}'.encode("latin-1"), "1 of 2 rows are rejected"),
    "no UTF-8.parquet": (parquet_file(HALF), "1 of 3 rows are rejected"),
    "twice.parquet": (parquet_file(HALF, HALF), "twice.parquet: two columns have one name"),
    "cut.parquet": (b"PAR1", "cut.parquet: Parquet file size is 4 bytes"),
    "cut.txt.gz": (gzip.compress(b"some text " * 99)[:-9], "cut.txt.gz: Compressed file ended"),
    "none.txt.xz": (b"some text", "none.txt.xz: Input format not supported"),
    "utf-16-le.txt": ("some text".encode("utf-16-le"), "zero bytes: no text, or UTF-16"),
    "pointer.txt": (b"version https://git-lfs.github.com/spec/v1\n", "run `git lfs pull`"),
    "few.jsonl": ("\n".join([*ROWS, '{"text']).encode(), None),
}


@pytest.mark.parametrize("name", CASES)
def test_an_error_names_its_file(prepared, tmp_path, name):
    """And the row. Fewer than 1 % of such rows are left out, with a word."""
    content, part = CASES[name]
    (tmp_path / name).write_bytes(content)
    (tmp_path / "a.txt").write_text("good")
    output, rows = prepared("a.txt", name, status=1 if part else 0)
    assert ("good" in rows["train"]) == (part is None), output
    assert [path.name for path in tmp_path.glob(".*")] == []
    if part:
        assert_one_sentence(output, part)
    if "rejected" in str(part):
        assert f"{name}:" in output
        # A source of which nothing is left is an error with --skip-bad, too.
        is_lost = name not in ("broken.jsonl", "no UTF-8.parquet")
        output, rows = prepared("a.txt", name, "--skip-bad", status=is_lost)
        if is_lost:
            assert_one_sentence(output, f"nothing is left of {name}")
        else:
            assert "good" in rows["train"]


def test_nothing_to_train_on(prepared, tmp_path):
    for name, content in ("a.jsonl", "\n\n"), ("b.txt", ""), ("c.txt", "\n<|endoftext|>\n\n"):
        (tmp_path / name).write_text(content)
        output, _ = prepared(name, status=1)
        assert_one_sentence(output, "there is no document to train on")
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "d.jsonl").write_text('{"text": ""}\n{"text": null}\n')
    output, _ = prepared("d.jsonl", "good.txt", "--skip-bad", status=1)
    assert_one_sentence(output, "nothing is left of d.jsonl: ")


def test_a_column_of_tables_alone(prepared, tmp_path):
    """Files of text have none, so --text-column does not leave them out."""
    (tmp_path / "a.txt").write_text("one<|endoftext|>two")
    write_documents(tmp_path / "b.jsonl", ["three"], column="content")
    (tmp_path / "c.csv").write_text("content,n\nfour,4\n")
    _, rows = prepared("a.txt", "b.jsonl", "c.csv", "--text-column", "content", "--no-shuffle")
    assert rows["train"] == ["one", "two", "three", "four"]


def test_separators_make_no_blank_documents(prepared, tmp_path):
    """At the end of a file, at its begin, twice in a row, and in the texts of JSON."""
    end = "<|endoftext|>"
    (tmp_path / "a.txt").write_text(f"{end}\none{end}\n\n")
    (tmp_path / "b.txt").write_text(f"two{end} {end}\tthree\n{end}\n{end}")
    write_documents(tmp_path / "c.jsonl", [f"four{end}\n\n", f"five{end}six", f"\n{end}\n"])
    long = "x" * 250_020 + "\n" * 250_000  # the last piece of a document is a part of it
    (tmp_path / "d.txt").write_text(f"{long}{end}\n")
    _, rows = prepared("a.txt", "b.txt", "c.jsonl", "d.txt", "--no-shuffle")
    *short, first, second, third = rows["train"]
    assert short == ["\none", "two", "\tthree\n", "four", f"five{end}six"]
    assert first + second + third == long


def test_the_command_that_trains(prepared, tmp_path):
    write_documents(tmp_path / "a.jsonl", ["one", "two"])
    write_rows(tmp_path / "chats.jsonl", [{"prompt": "q", "completion": "a"}])
    trains = "Train on it: python 01-single-gpu/train-llm.py -d out -e out"
    rows = "Make rows of it: python tools/prepare-data.py out --as messages --rows"
    chat = "Train on it: torchrun --standalone --nproc-per-node 1 more/16-chat/train-llm.py"
    for flags, command in (
        (["a.jsonl"], trains),
        (["a.jsonl", "-m", "x/y"], f"{trains} -m x/y"),
        (["chats.jsonl", "--as", "messages", "-m", "a b"], f"{rows} -m 'a b' -s 1024 -o out-rows"),
        (["a.jsonl", "--rows", "-s", 16, "-m", TINY], f"{chat} -d out -e out -s 16 -m {TINY}"),
    ):
        output, _ = prepared(*flags, "--overwrite")
        assert output.splitlines()[-1] == command


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_a_stop_leaves_nothing(prepared, tmp_path, name):
    """And the next command goes its way."""
    write_documents(tmp_path / "a.jsonl", ["one", "two"])
    stop = f"import os, signal\nos.fsync = lambda file: os.kill(os.getpid(), signal.{name})\n"
    flags = ["a.jsonl", "-o", "out"]
    status, output = outcome(tmp_path, TOOL, *flags, before=stop, cwd=tmp_path)
    number = getattr(signal, name)
    assert status == {"SIGKILL": -number, "SIGTERM": 128 + number, "SIGINT": 1}[name], output
    assert not (tmp_path / "out").exists()
    assert len([*tmp_path.glob(".*")]) == (name == "SIGKILL")
    prepared("a.jsonl")
    assert [*tmp_path.glob(".*")] == []


def test_folders_of_others_stay(prepare, tmp_path):
    write_documents(tmp_path / "a.jsonl", ["one"])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    assert_one_sentence(prepare("a.jsonl", status=1), "this tool has not written")


def test_sources_that_change(prepared, tmp_path):
    file = write_documents(tmp_path / "a.jsonl", ["one", "two"])
    times = os.stat(file)
    _, rows = prepared("a.jsonl")
    assert "Nothing has changed" in prepared("a.jsonl")[0]
    assert "has the same documents" in prepared("a.jsonl", "--check")[0]
    write_documents(file, ["one", "two, changed"])
    output, kept = prepared("a.jsonl", status=1)
    assert_one_sentence(output, "a.jsonl changed since out was made: --overwrite")
    assert kept == rows
    write_documents(file, ["one", "two"])  # the same content at another time
    assert "Nothing has changed" in prepared("a.jsonl")[0]
    write_documents(file, ["two", "one"])
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert "Nothing has changed" in prepared("a.jsonl")[0]
    assert "has other documents" in prepared("a.jsonl", "--check", status=1)[0]
    assert "at most 4 MB" in prepared("a.jsonl", "--dry-run")[0]


def test_flags_that_change(prepared, tmp_path):
    write_documents(tmp_path / "a.jsonl", ["one", "two"])
    write_documents(tmp_path / "b.jsonl", ["three"])
    prepared("a.jsonl")
    for flags, what in (
        (["a.jsonl", "--seed", 1], "flags (--seed)"),
        (["a.jsonl", "--as", "messages", "--role", "x=user"], "flags (--as, --role)"),
        (["a.jsonl", "b.jsonl"], "sources"),
    ):
        output, _ = prepared(*flags, status=1)
        assert_one_sentence(output, f"out was made with different {what}: --overwrite")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    del report["facts"]["flags"]["max_characters"]  # a folder from before this flag
    (tmp_path / "out" / "report.json").write_text(json.dumps(report))
    assert "Nothing has changed" in prepared("a.jsonl")[0]
    _, rows = prepared("*", "--overwrite")  # its own folder is no source
    assert sorted(rows["train"]) == ["one", "three", "two"]
    assert len([*(tmp_path / "out").iterdir()]) == 3


# -- Held out, copies and shares -------------------------------------------------------------------


def test_held_out_by_a_hash(prepared, texts, tmp_path):
    """A new source moves no document, equal documents are on one side, and no order matters."""
    write_documents(tmp_path / "a.jsonl", texts)
    flags = ["--held-out", "10%", "--overwrite"]
    _, first = prepared("a.jsonl", *flags)
    assert 20 < len(first["validation"]) < 60
    assert sorted(first["train"] + first["validation"]) == sorted(texts)
    assert first["train"] != [text for text in texts if text in {*first["train"]}]  # shuffled
    assert prepared("a.jsonl", *flags)[1] == first
    write_documents(tmp_path / "b.jsonl", [*texts[:50], *(f"{text}!" for text in texts)])
    _, both = prepared("b.jsonl", "a.jsonl", *flags)
    assert {*first["validation"]} <= {*both["validation"]}
    assert not {*both["validation"]} & {*both["train"]}
    assert prepared("a.jsonl", *flags, "--seed", 1)[1] != first
    run_tool(tmp_path, TOOL.name, "a.jsonl", "-o", "out", *flags, "--workers", 2, cwd=tmp_path)
    assert prepared("a.jsonl", *flags[:2])[1] == first


def test_copies(prepared, tmp_path):
    """They are counted. --dedupe writes one of them, and rather the one that is held out."""
    write_documents(tmp_path / "train.jsonl", ["a", "b", "a", "c", "a"])
    write_documents(tmp_path / "valid.jsonl", ["b", "d"])
    output, rows = prepared("*.jsonl", "--no-shuffle")
    assert "3 copies, 1 in both splits, 2 held out" in output
    assert rows == {"train": ["a", "b", "a", "c", "a"], "validation": ["b", "d"]}
    output, rows = prepared("*.jsonl", "--no-shuffle", "--dedupe", "--overwrite")
    assert rows == {"train": ["a", "c"], "validation": ["b", "d"]}


def test_shares(prepared, tmp_path):
    """Parts of the characters: a small source is repeated, and its copies are spread."""
    size = {"a": 3000, "b": 1000, "c": 500}
    for name, count in size.items():
        write_documents(tmp_path / f"{name}.jsonl", [f"{name}{n:06}"[:10] for n in range(count)])
    for shares, repeat, counts in (
        ([50, 50, 50], 9, {"a": 3000, "b": 3000, "c": 3000}),
        ([50, 50, 50], 2, {"a": 1000, "b": 1000, "c": 1000}),
        ([60, 30, 10], 4, {"a": 3000, "b": 1500, "c": 500}),
    ):
        flags = ["--share", *shares, "--repeat", repeat, "--overwrite"]
        output, rows = prepared("a.jsonl", "b.jsonl", "c.jsonl", *flags)
        found = Counter(text[0] for text in rows["train"])
        assert found.keys() == counts.keys()
        for name, count in counts.items():
            assert found[name] == pytest.approx(count, abs=1)
            times = [*Counter(text for text in rows["train"] if text[0] == name).values()]
            assert max(times) - min(times) <= 1 or count < size[name]
            assert f"share: {name}.jsonl: {7 * size[name]:,} characters, " in output
        places = [n for n, text in enumerate(rows["train"]) if text == rows["train"][0]]
        assert len(places) < 2 or places[1] > 5
    output, _ = prepared("a.jsonl", "b.jsonl", "--share", 1, status=2)
    (tmp_path / "d.jsonl").write_text("\n")
    output, _ = prepared("a.jsonl", "d.jsonl", "--share", 1, 1, "--overwrite", status=1)
    assert_one_sentence(output, "d.jsonl has no text to train on, for --share")


# -- Conversations ---------------------------------------------------------------------------------

CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": null, "b": 3}'}}
PARSED = {"type": "function", "function": {"name": "f", "arguments": {"a": None, "b": 3}}}
FILLED = {"function": {"name": "f", "arguments": {"a": None, "b": 3}}, "id": None}
FUNCTION = json.dumps(CALL["function"])
TWO_CALLS = json.dumps([CALL, CALL])
IN_TEXT = {"function": FUNCTION}
BARE = {"name": "f", "arguments": {}}
ONE = {"a": 1}
IN_JSON = json.dumps(json.dumps(ONE))  # JSON text in JSON text
NO_NAME = [{"arguments": "{}"}]
Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}
EMPTY = {"role": "assistant", "content": ""}


def called(calls) -> dict:
    return {"role": "assistant", "content": "", "tool_calls": calls}


CALLS = called([PARSED])
# A row, and its messages
FORMS = [
    ({"messages": [Q, A | {"name": None, "tool_calls": []}], "id": 3}, [Q, A]),
    ({"messages": json.dumps([Q, A | {"name": None}])}, [Q, A]),
    ({"messages": [json.dumps(Q), json.dumps(A)]}, [Q, A]),
    ({"messages": None}, []),
    ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, [Q, A]),
    ({"conversations": [{"from": "system", "value": "s"}, Q, A]}, [SYSTEM, Q, A]),
    ({"conversations": [{"from": "tool", "value": "t"}]}, [{"role": "tool", "content": "t"}]),
    ([Q, A], [Q, A]),
    ({"messages": json.dumps(json.dumps([Q, A]))}, [Q, A]),
    ({"conversations": [Q, A], "system": "s"}, [SYSTEM, Q, A]),
    ({"messages": [SYSTEM, Q, A], "system": "s"}, [SYSTEM, Q, A]),
    ({"messages": [SYSTEM, Q, A], "system": "another"}, [SYSTEM, Q, A]),
    ({"messages": [Q, EMPTY | {"weight": 0}, Q, A]}, [Q, EMPTY | {"weight": 0}, Q, A]),
    ({"messages": [Q, EMPTY | {"thought": "t"}]}, [Q, EMPTY | {"thought": "t"}]),
    ({"prompt": 7, "completion": 0}, [Q | {"content": "7"}, A | {"content": "0"}]),
    ({"messages": [Q, A], "prompt": "x", "completion": "y"}, [Q, A]),
    ({"messages": None, "prompt": "q", "completion": "a"}, [Q, A]),
    ({"prompt": "q", "completion": "a"}, [Q, A]),
    ({"prompt": "q", "response": "a", "system": ""}, [Q, A]),
    ({"prompt": [Q, A], "completion": [A]}, [Q | {"weight": 0}, A | {"weight": 0}, A]),
    ({"instruction": "q", "input": "", "output": "a", "text": "t"}, [Q, A]),
    ({"instruction": "q", "input": None, "output": "a", "system": "s"}, [SYSTEM, Q, A]),
    ({"instruction": "q", "output": "a", "history": [["q", "a"]]}, [Q, A, Q, A]),
    ({"instruction": "q", "output": "a", "history": '[["q", "a"]]'}, [Q, A, Q, A]),
    ({"instruction": "q", "input": "000", "output": "a"}, [Q | {"content": "q\n\n000"}, A]),
    ({"instruction": "q", "input": 0, "output": "a"}, [Q | {"content": "q\n\n0"}, A]),
    # In JSON text, a null is meant. In fields of a table, the row does not have the key.
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]}, [CALLS]),
    ({"messages": json.dumps([{"role": "assistant", "tool_calls": [PARSED]}])}, [CALLS]),
    ({"messages": [{"role": "assistant", "tool_calls": json.dumps([PARSED])}]}, [CALLS]),
    ({"messages": [{"role": "assistant", "tool_calls": [json.dumps(PARSED)]}]}, [CALLS]),
    ({"messages": [called([IN_TEXT])]}, [called([{"function": PARSED["function"]}])]),
    ({"messages": [called([FILLED])]}, [called([{"function": BARE | {"arguments": {"b": 3}}}])]),
    ({"messages": [called([BARE | {"arguments": ""}])]}, [called([BARE])]),
    (
        {"messages": [called([BARE | {"arguments": IN_JSON}])]},
        [called([BARE | {"arguments": ONE}])],
    ),
    # A call of ShareGPT, and the older form of OpenAI
    ({"conversations": [{"from": "function_call", "value": FUNCTION}]}, [CALLS]),
    ({"conversations": [{"from": "function_call", "value": TWO_CALLS}]}, [called([PARSED] * 2)]),
    ({"messages": [{"role": "assistant", "function_call": CALL["function"]}]}, [CALLS]),
]


def said_by(role: str) -> dict:
    return {"messages": [Q, {"role": role, "content": "a"}]}


# A part of the sentence, and a row
REFUSED = [
    ("no column messages, and none of the pairs", {"prompt": "q", "answer": "a"}),
    ("messages must be JSON, not this text", {"messages": "[{'role': 'user'}]"}),
    ("a message of messages must be an object: 3", {"messages": [3]}),
    ("messages must be a list: 3", {"messages": "3"}),
    ("history must be a list of pairs", {"instruction": "", "output": "", "history": [Q]}),
    ("history must be a list: 4", {"instruction": "", "output": "", "history": "4"}),
    ("tools must be a list: 4", {"tools": "4", "messages": [Q, A]}),
    ("tool_calls must be a list: 4", {"messages": [A | {"tool_calls": 4}]}),
    ("a call of a tool must be an object: 4", {"messages": [A | {"tool_calls": [4]}]}),
    ("function of a tool must be an object", {"messages": [A | {"tool_calls": [{"function": 4}]}]}),
    ("arguments must be JSON", {"messages": [A | {"tool_calls": [{"arguments": "{"}]}]}),
    ("arguments must be an object: 5", {"messages": [A | {"tool_calls": [{"arguments": "5"}]}]}),
    ("a call of a tool must have a name", {"messages": [called(NO_NAME)]}),
    ("function_call must be JSON", {"conversations": [{"from": "function_call", "value": "f()"}]}),
    ("a tool must be an object: 1", {"tools": [1], "messages": [Q, A]}),
    ("an answer is empty", {"messages": [Q, EMPTY]}),
    ("an answer is empty", {"prompt": "q", "completion": " \n"}),
    ("input must be text: True", {"instruction": "q", "input": True, "output": "a"}),
    ("input must be text: ['x']", {"instruction": "q", "input": ["x"], "output": "a"}),
    ("completion must be text: ['a", {"prompt": "q", "completion": ["a", "b"]}),
    ("must be text, perhaps empty", {"messages": [Q, A], "system": False}),
    ("must be JSON, not this text: q", ["q", "a"]),
    ("a row must be an object, or a list of messages: 3", 3),
    ("must be text, perhaps empty", {"messages": [{"content": "a"}]}),
    ("must be text, perhaps empty", {"messages": [Q, A | {"content": None}]}),
    ("must be text, perhaps empty", {"messages": [Q, A | {"content": [{"type": "text"}]}]}),
    ("weight of a message must be a number", {"messages": [A | {"weight": "0"}]}),
    ("weight of a message must be a number", {"messages": [A | {"weight": float("nan")}]}),
    ("unknown role 'bing': say which one it is, as in --role bing=assistant", said_by("bing")),
    ("as in --role 'my bot=assistant'", said_by("my bot")),
]


def test_names_of_roles(prepared, documents, tmp_path):
    """All that docs/data.md names, in any spelling. Another name rejects its row, or --role."""
    page = (REPOSITORY / "docs" / "data.md").read_text()
    table = dict(re.findall(r"^\| `(\w+)` \| (`.*) \|$", page, re.MULTILINE))
    names = {role: re.findall("`([^`]+)`", cell) for role, cell in table.items()}
    conversations = load(REPOSITORY / "tools" / "conversations.py")
    listed = {role: sorted(map(conversations.plain, cell)) for role, cell in names.items()}
    assert listed == {role: sorted(known) for role, known in conversations.ROLES.items()}
    for role, cell in names.items():
        for name in cell:
            for spelling in (name, name.upper(), name.title().replace("_", "-"), f" {name}"):
                assert conversations.role_of(spelling, {}) == role
    rows = [said_by("bing"), said_by("Narrator"), said_by("gpt")]
    write_rows(tmp_path / "a.jsonl", rows)
    output, _ = prepared("a.jsonl", "--as", "messages", "--skip-bad")
    for name in ("bing", "Narrator"):
        assert f"rejected: 1 rows: unknown role '{name}': say which one it is, as in" in output
    given = ["--role", "Bing=assistant", "--role", "narrator=narrator"]
    _, rows = prepared("a.jsonl", "--as", "messages", *given, "--overwrite", "--no-shuffle")
    roles = [[message["role"] for message in row["messages"]] for row in rows["train"]]
    assert roles == [["user", "assistant"], ["user", "narrator"], ["user", "assistant"]]
    prepared("a.jsonl", "--as", "messages", "--role", "bing=asistant", status=2)


def test_lines_that_are_lists(prepared, tmp_path):
    """Bare conversations: in lines, one alone, in a list, and between objects."""
    for name, text in {
        "lines.jsonl": f"{json.dumps([Q, A])}\n\n{json.dumps([Q, A])}\n",
        "one.jsonl": json.dumps([Q, A]),
        "list.json": json.dumps([[Q, A], [Q, A]], indent=1),
        "mixed.jsonl": "\n".join(map(json.dumps, ({"messages": [Q, A]}, [Q, A]))),
        "first.jsonl": "\n".join(map(json.dumps, ([Q, A], {"messages": [Q, A]}))),
        "sharegpt.jsonl": json.dumps([{"from": "human", "value": "q"}, A]),
    }.items():
        (tmp_path / name).write_text(text)
        _, rows = prepared(name, "--as", "messages", "--overwrite")
        assert [row["messages"] for row in rows["train"]] in ([[Q, A]], [[Q, A]] * 2), name
    # As texts, the elements of a list are rows, whatever their columns are.
    _, rows = prepared("one.jsonl", "--text-column", "content", "--overwrite", "--no-shuffle")
    assert rows["train"] == ["q", "a"]
    output, _ = prepared("lines.jsonl", "--text-column", "content", "--overwrite", status=1)
    assert_one_sentence(output, "something stands behind the list: a row must be an object")
    (tmp_path / "behind.jsonl").write_text('[{"text": "a"}]\n[{"text": "b"}]\n')
    output, _ = prepared("behind.jsonl", "--overwrite", status=1)
    assert_one_sentence(output, "something stands behind the list: a row must be an object")


def test_forms_of_rows(documents):
    args = documents.reading(form="messages")

    def conversation(row):
        text, _ = documents.conversation_as_text(row, args, documents.Found(), fills=True)
        found = json.loads(text) if text else {"messages": [], "tools": None}
        for message in found["messages"]:
            if "tool_calls" in message:
                message["tool_calls"] = json.loads(message["tool_calls"])
        return found["messages"], json.loads(found["tools"] or "null")

    for row, messages in FORMS:
        assert conversation(json.loads(json.dumps(row))) == (messages, None), row
    tool = {"type": "function", "function": {"name": "f", "default": None}}
    without = {"type": "function", "function": {"name": "f"}}
    for tools, parsed in (
        ([tool], [without]),
        (json.dumps([tool]), [tool]),
        ([json.dumps(tool)], [tool]),
        ("[]", None),
        (None, None),
    ):
        assert conversation({"messages": [Q], "tools": tools}) == ([Q], parsed)
    for sentence, row in REFUSED:
        with pytest.raises(documents.Rejected) as error:
            conversation(row)
        assert sentence in ": ".join(map(str, error.value.args))


# JSON that libraries like to change
VALUES = [
    *["20", "20.5", "-0.0", "1E+2", "1e-12", "3.141592653589793", "1e300", f"-{10**30 + 1}"],
    *["null", "true", "false", '""', '"NaN"', '"007"', '"1e5"', '"2026-01-02"'],
    *['"2026-01-02T03:04:05Z"', '"Größe \\u0000 \U0001f680"', '"Gr\\u00f6\\u00dfe"', "[]", "{}"],
    *["[null, 1]", '{"a": null}', '{"a": 1, "a": 2.0}', '[{"b": [{"c": "0"}]}, [[]], "x"]'],
]


def test_the_template_sees_what_json_says(prepare, tmp_path):
    """Numbers, dates, nulls and repeated keys, in arguments of calls and in schemas of tools."""
    labels = load(REPOSITORY / "tools" / "labels.py")
    lines = []
    for n, value in enumerate(VALUES):
        arguments = f'{{"x": {VALUES[n - 3]}, "y": {VALUES[n - 7]}, "x": {value}}}'
        call = f'{{"function": {{"name": "f", "arguments": {arguments}}}}}'
        answer = f'{{"role": "assistant", "content": "", "tool_calls": [{call}]}}'
        messages = f'[{{"role": "user", "content": "{n}"}}, {answer}]'
        lines.append(f'{{"messages": {messages}, "tools": [{{"default": {value}}}]}}\n')
    (tmp_path / "a.jsonl").write_text("".join(lines))
    prepare("a.jsonl", "--as", "messages", "--held-out", "10%")
    splits = datasets.load_dataset("parquet", data_dir=str(tmp_path / "out"))
    found = [labels.conversation_of(row) for split in splits.values() for row in split]
    found.sort(key=lambda conversation: int(conversation[0][0]["content"]))
    for (messages, tools), line in zip(found, lines, strict=True):
        row = json.loads(line)
        assert repr(tools) == repr(row["tools"])
        for message, wanted in zip(messages, row["messages"], strict=True):
            assert repr(sorted(message.items())) == repr(sorted(wanted.items()))


# -- Large files -----------------------------------------------------------------------------------


@pytest.mark.rest
def test_memory_of_a_large_text_file(tmp_path):
    """600 MB, half of them one document, and half of them many, take less than 1.5 GB."""
    file = tmp_path / "large.txt"
    story = "def story(self):\n    return 'once upon a time' + self.end\n" * 2000
    count = 300_000_000 // len(story)
    with file.open("w") as stream:
        stream.writelines((story + "<|endoftext|>") for _ in range(count))
        stream.writelines(story for _ in range(count))
    done = python(SCRIPTS / "peak_memory.py", TOOL, file, "-o", tmp_path / "out")
    assert float(done.stdout.split()[-1]) < 1.5
    documents = datasets.load_dataset("parquet", data_dir=str(tmp_path / "out"))["train"]
    assert len({*(tmp_path / "out").glob("train-*")}) == 2
    lengths = [len(text) for text in documents["text"]]
    assert sum(lengths) == 2 * count * len(story)
    assert max(lengths) == 250_000
    assert lengths.count(len(story)) == count
    assert lengths[:count] != [len(story)] * count  # in another order
