"""tools/prepare-data.py: whatever the files are, the folder has each document once."""

import gzip
import json
import signal

import datasets
import pytest
from conftest import assert_one_sentence, write_documents, write_rows
from runner import REPOSITORY, load, outcome, python, run_tool
from test_data import expected, tokenizer, tokens_of  # noqa: F401

TOOL = REPOSITORY / "tools" / "prepare-data.py"


@pytest.fixture(scope="module")
def tool():
    return load(TOOL)


def splits_of(tool, *names, column="text") -> dict[str, list]:
    splits = tool.load_documents([str(name) for name in names], None, column)
    return {split: [row["text"] for row in rows] for split, rows in splits.items()}


def test_files_of_every_kind(tool, texts, tmp_path):
    rows = datasets.Dataset.from_dict({"n": [1] * len(texts), "story": texts})
    rows.to_parquet(tmp_path / "a.parquet")
    rows.to_csv(tmp_path / "a.csv")
    rows.to_json(tmp_path / "a[1].jsonl")  # a name, although it looks like a pattern
    (tmp_path / "b.json.gz").write_bytes(gzip.compress((tmp_path / "a[1].jsonl").read_bytes()))
    for name in ("a.parquet", "a.csv", "a[1].jsonl", "b.json.gz"):
        assert splits_of(tool, tmp_path / name, column="story") == {"train": texts}, name
        with pytest.raises(OSError, match=r"no text in 'text': .* \['n', 'story'\]"):
            splits_of(tool, tmp_path / name)
    with pytest.raises(OSError, match="no text in column 'n', but '1'"):
        splits_of(tool, tmp_path / "a.parquet", column="n")
    for name in ("none.txt", "*.md", "a.tsv"):
        (tmp_path / "a.tsv").write_text("text\n")
        with pytest.raises(SystemExit, match=r"give existing ones that end in .txt, .md, "):
            splits_of(tool, tmp_path / name)
    (tmp_path / "cells.csv").write_text("text,n\nNA,1\n0007,\n")
    assert splits_of(tool, tmp_path / "cells.csv") == {"train": ["NA", "0007"]}


def test_text_files(tmp_path, chapter_1, tokenizer):  # noqa: F811
    """In the order of their names, also behind links, whatever the encoding."""
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
        "elsewhere/f.txt": b"behind the link",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    output = run_tool(tmp_path, TOOL.name, "texts/**/*.txt", "-o", "books", cwd=tmp_path)
    assert "7 files for train" in output
    assert "c.txt: 2 characters cannot be decoded" in output
    assert "d.txt: 1 characters cannot be decoded" in output
    documents = ["first\n\n\ndocument " * 9, "one", "two", "three", "bytes \ufffd\ufffd in between"]
    documents += ["zw\ufffdlf", "dreizehn", "behind the link", "held out"]
    characters = sum(map(len, documents[:-1]))
    counts = f"train: 8 documents, {characters} characters, without 1 empty documents"
    assert counts in output
    found = tokens_of(chapter_1, tokenizer, tmp_path / "books", seq_length=1)
    assert found == expected(tokenizer, documents)


def test_files_that_their_names_hold_out(tool, tmp_path):
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
    found = splits_of(tool, f"{folder}/**/*.jsonl")
    for name in ("report.json", "table.bin"):  # of the tool itself, and of no reader
        (folder / name).write_text("{}")
    assert splits_of(tool, folder) == found
    for split in ("train", "validation"):
        assert sorted(found[split]) == sorted(n for n, where in cases.items() if where == split)
    assert splits_of(tool, f"{folder}/test*.jsonl").keys() == {"train"}  # chosen to train on
    for name in ("test_io.py", "io.py"):
        (folder / name).write_text("pass")
    assert splits_of(tool, f"{folder}/*.py").keys() == {"train"}


def test_a_split_of_the_hub(tool, monkeypatch):
    def stored(*names):
        splits = {name: datasets.Dataset.from_dict({"text": [name]}) for name in names}
        splits = {name: split.to_iterable_dataset() for name, split in splits.items()}
        monkeypatch.setattr(
            datasets, "load_dataset", lambda *_, **__: datasets.IterableDatasetDict(splits)
        )

    stored("train", "test")
    assert splits_of(tool, "someone/some") == {"train": ["train"], "test": ["test"]}
    stored("train_sft", "test")
    with pytest.raises(SystemExit, match=r"splits \['train_sft', 'test'\] with someone/some:SPLIT"):
        splits_of(tool, "someone/some")
    found = splits_of(tool, "someone/some:train_sft")
    assert found == {"train": ["train_sft"], "test": ["test"]}
    # Nothing is trained on and held out.
    assert splits_of(tool, "someone/some:test").keys() == {"train", "train_sft"}


def test_files_whose_other_columns_differ(tool, tmp_path):
    """Also with the columns of agents' traces, for which `datasets` asks for another package."""
    rows = [{"text": "a", "n": 1}, {"text": "b", "n": {"m": 2}}]
    rows += [{"text": "c", "type": "message", "message": {"content": [1, "x"], "role": 2}}]
    for number, row in enumerate(rows):
        write_rows(tmp_path / f"{number}.jsonl", [row])
    assert splits_of(tool, f"{tmp_path}/*.jsonl") == {"train": ["a", "b", "c"]}


# The flags, and a part of the sentence. Each file is the second one that is read.
CASES = {
    "broken.jsonl": (b'{"text": "a"}\n{"text": "b"\n', "broken.jsonl: JSON parse error"),
    "else.csv": (b"txt,date\na,b\n", "else.csv: no text in 'text': choose --text-column among ["),
    "cut.parquet": (b"PAR1", "cut.parquet: Parquet file size is 4 bytes"),
    "cut.txt.gz": (gzip.compress(b"some text " * 99)[:-9], "cut.txt.gz: Compressed file ended"),
    "utf-16.txt": ("some text".encode("utf-16"), "utf-16.txt: convert it to UTF-8"),
    "utf-16-le.txt": ("some text".encode("utf-16-le"), "utf-16-le.txt: convert it to UTF-8"),
}


@pytest.mark.parametrize("name", CASES)
def test_an_error_names_its_file(tmp_path, name):
    content, part = CASES[name]
    (tmp_path / name).write_bytes(content)
    (tmp_path / "a.txt").write_text("good")
    flags = ["a.txt", name, "-o", "out"]
    assert_one_sentence(run_tool(tmp_path, TOOL.name, *flags, status=1, cwd=tmp_path), part)
    assert not [*tmp_path.glob("*out*/*")]


def test_the_folder_is_whole_or_not_there(tmp_path):
    """A kill leaves nothing, and the next command goes its way. Folders of others stay."""
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "file").touch()
    write_documents(tmp_path / "a.jsonl", ["one", "two"])
    flags = ["a.jsonl", "-o", "others"]
    output = run_tool(tmp_path, TOOL.name, *flags, status=1, cwd=tmp_path)
    assert_one_sentence(output, "this tool has not written others")
    slow = "import os, signal\nos.sync = lambda: os.kill(os.getpid(), signal.SIGKILL)\n"
    flags = ["a.jsonl", "-o", "out"]
    killed, output = outcome(tmp_path, TOOL, *flags, before=slow, cwd=tmp_path)
    assert (killed, (tmp_path / "out").exists()) == (-signal.SIGKILL, False), output
    for _ in range(2):  # the second time, it replaces its own folder
        run_tool(tmp_path, TOOL.name, *flags, cwd=tmp_path)
        assert len([*(tmp_path / "out").iterdir()]) == 2
        assert [path.name for path in tmp_path.glob(".*")] == []


# Prints the peak memory of the process, in GB.
PEAK = """
import resource, runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)
"""


@pytest.mark.rest
def test_memory_of_a_large_text_file(tmp_path):
    """600 MB, half of them one document, and half of them many, take less than 1 GB."""
    file = tmp_path / "large.txt"
    story = "def story(self):\n    return 'once upon a time' + self.end\n" * 2000
    count = 300_000_000 // len(story)
    with file.open("w") as stream:
        stream.writelines((story + "<|endoftext|>") for _ in range(count))
        stream.writelines(story for _ in range(count))
    done = python("-c", PEAK, TOOL, file, "-o", tmp_path / "out")
    assert float(done.stdout.split()[-1]) < 1
    documents = datasets.load_dataset("parquet", data_dir=str(tmp_path / "out"))["train"]
    assert len({*(tmp_path / "out").glob("train-*")}) == 2
    lengths = [len(text) for text in documents["text"]]
    assert sum(lengths) == 2 * count * len(story)
    assert max(lengths) < 500_000
    assert lengths[:count] == [len(story)] * count
