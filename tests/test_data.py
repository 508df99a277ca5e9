"""From documents to batches: every token once, in an order that depends on seed and epoch alone."""

import argparse
import gzip
import json
import os

import datasets
import pytest
import torch
from conftest import TINY_LLAMA, write_documents, write_rows
from runner import CHAPTER_1, python
from transformers import AutoTokenizer

END = 0  # of text, for the tiny tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_LLAMA)


def arguments(name, seq_length=32, text_column="text"):
    return argparse.Namespace(
        dataset_name=str(name), dataset_subset=None, text_column=text_column, seq_length=seq_length
    )


def tokens_of(chapter_1, tokenizer, name, **options) -> list[int]:
    """All tokens, those to train on and the held-out ones."""
    parts = chapter_1.load_tokens(arguments(name, **options), tokenizer)
    return [token for part in parts for token in part.to_pylist()]


def expected(tokenizer, texts) -> list[int]:
    return [token for text in texts for token in [*tokenizer(text)["input_ids"], END]]


@pytest.mark.parametrize("seq_length", [7, 100])
def test_every_token_once(chapter_1, tokenizer, dataset, texts, seq_length):
    train, held_out = chapter_1.load_tokens(arguments(dataset, seq_length), tokenizer)
    tokens = expected(tokenizer, texts)
    assert train.to_pylist() + held_out.to_pylist() == tokens
    samples = len(tokens) // seq_length
    assert len(train) % seq_length == 0
    assert len(held_out) // seq_length == max(samples // 100, 1)
    batch = chapter_1.read_batch(train, [5, 0], arguments(dataset, seq_length), torch.device("cpu"))
    assert batch.dtype == torch.int64
    assert batch[0].tolist() == tokens[5 * seq_length : 6 * seq_length]
    assert batch[1].tolist() == tokens[:seq_length]


def test_one_end_of_text_after_every_document(chapter_1, tokenizer):
    rows = {"text": ["a b", "", None, "c"], "other": [1, 2, 3, 4]}
    ids = chapter_1.tokenize(rows, tokenizer, "text")["input_ids"]
    assert ids == [[*tokenizer("a b")["input_ids"], END], [*tokenizer("c")["input_ids"], END]]
    assert chapter_1.tokenize({"text": [None]}, tokenizer, "text") == {"input_ids": []}

    class AddsEnd:  # and finds no tokens in a text of spaces
        eos_token_id = END

        def __call__(self, texts, **_):
            found = [tokenizer(text.strip())["input_ids"] for text in texts]
            return {"input_ids": [[*ids, END] if ids else [] for ids in found]}

    ids = chapter_1.tokenize({"text": ["  ", "b"]}, AddsEnd(), "text")["input_ids"]
    assert ids == [[*tokenizer("b")["input_ids"], END]]


@pytest.mark.parametrize("split", ["validation", "test"])
def test_a_split_of_its_own_is_held_out(chapter_1, tokenizer, texts, monkeypatch, split):
    """An empty one counts as none."""
    parts = {"train": texts[:300], split: texts[300:]}
    if split == "test":
        parts["validation"] = []
    features = datasets.Features(text=datasets.Value("string"))
    splits = {k: datasets.Dataset.from_dict({"text": v}, features) for k, v in parts.items()}
    monkeypatch.setattr(chapter_1, "load_documents", lambda args: splits)
    train, held_out = chapter_1.load_tokens(arguments("a-name"), tokenizer)
    assert train.to_pylist() == expected(tokenizer, texts[:300])
    assert held_out.to_pylist() == expected(tokenizer, texts[300:])


def test_files_of_every_kind(chapter_1, tokenizer, texts, tmp_path):
    rows = datasets.Dataset.from_dict({"n": [1] * len(texts), "story": texts})
    rows.to_parquet(tmp_path / "a.parquet")
    rows.to_csv(tmp_path / "a.csv")
    rows.to_json(tmp_path / "a[1].jsonl")  # a name, although it looks like a pattern
    (tmp_path / "b.json.gz").write_bytes(gzip.compress((tmp_path / "a[1].jsonl").read_bytes()))
    for name in ("a.parquet", "a.csv", "a[1].jsonl", "b.json.gz"):
        found = tokens_of(chapter_1, tokenizer, tmp_path / name, text_column="story")
        assert found == expected(tokenizer, texts), name
    for column in ("text", "n"):  # absent, and not a text
        with pytest.raises(SystemExit, match=rf"no text in column '{column}': .* \['story'\]"):
            tokens_of(chapter_1, tokenizer, tmp_path / "a.csv", text_column=column)
    for name in ("none.txt", "*.md", "a.tsv", ""):
        (tmp_path / "a.tsv").write_text("text\n")
        with pytest.raises(SystemExit, match=r"give existing ones that end in .txt, .md, "):
            tokens_of(chapter_1, tokenizer, f"{tmp_path}/{name}")


def test_text_files(chapter_1, tokenizer, tmp_path, capsys):
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
        "elsewhere/f.txt": b"behind the link",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    found = tokens_of(chapter_1, tokenizer, f"{tmp_path}/texts/**/*.txt", seq_length=4)
    documents = ["first\n\n\ndocument " * 9, "one", "two", "three", "bytes \ufffd\ufffd in between"]
    documents += ["zw\ufffdlf", "dreizehn", "behind the link"]
    assert found == expected(tokenizer, documents)
    output = capsys.readouterr().out
    assert "7 files" in output
    assert "9 documents, of which 1 are empty" in output
    assert "c.txt: 2 characters cannot be decoded" in output
    assert "d.txt: 1 characters cannot be decoded" in output
    # Other content of the same size and time is read again; so is another size at the same time.
    file = tmp_path / "texts" / "a.txt"
    times = (file.stat().st_atime, file.stat().st_mtime)
    file.write_text("four")
    os.utime(file, times)
    assert tokens_of(chapter_1, tokenizer, file, seq_length=1) == expected(tokenizer, ["four"])


def splits_of(chapter_1, name, **options) -> dict[str, list]:
    splits = chapter_1.load_documents(arguments(name, **options))
    return {split: documents["text"][:] for split, documents in splits.items()}


def test_files_that_their_names_hold_out(chapter_1, tmp_path):
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
    found = splits_of(chapter_1, f"{folder}/**/*.jsonl")
    for split in ("train", "validation"):
        assert sorted(found[split]) == sorted(n for n, where in cases.items() if where == split)
    assert splits_of(chapter_1, f"{folder}/test*.jsonl").keys() == {"train"}  # chosen to train on
    for name in ("test_io.py", "io.py"):
        (folder / name).write_text("pass")
    assert splits_of(chapter_1, f"{folder}/*.py").keys() == {"train"}


def test_a_split_of_the_hub(chapter_1, monkeypatch):
    def stored(*names):
        splits = {name: datasets.Dataset.from_dict({"text": [name]}) for name in names}
        monkeypatch.setattr(datasets, "load_dataset", lambda *_: datasets.DatasetDict(splits))

    stored("train", "test")
    assert splits_of(chapter_1, "someone/some") == {"train": ["train"], "test": ["test"]}
    stored("train_sft", "test")
    with pytest.raises(
        SystemExit, match=r"splits \['train_sft', 'test'\] with -d someone/some:SPLIT"
    ):
        splits_of(chapter_1, "someone/some")
    found = splits_of(chapter_1, "someone/some:train_sft")
    assert found == {"train": ["train_sft"], "test": ["test"]}
    # Nothing is trained on and held out.
    assert splits_of(chapter_1, "someone/some:test").keys() == {"train", "train_sft"}


def test_files_whose_other_columns_differ(chapter_1, tmp_path):
    """Also with the columns of agents' traces, for which `datasets` asks for another package."""
    rows = [{"text": "a", "n": 1}, {"text": "b", "n": {"m": 2}}]
    rows += [{"text": "c", "type": "message", "message": {"content": [1, "x"], "role": 2}}]
    for number, row in enumerate(rows):
        write_rows(tmp_path / f"{number}.jsonl", [row])
    assert splits_of(chapter_1, f"{tmp_path}/*.jsonl") == {"train": ["a", "b", "c"]}
    assert splits_of(chapter_1, f"{tmp_path}/2.jsonl") == {"train": ["c"]}


# Tokenizes a file and prints the peak memory of the process, in GB.
PEAK = """
import resource, runpy, sys
sys.argv = sys.argv[1:]
chapter = runpy.run_path(sys.argv[0])
args = chapter["parse_args"]()
tokenizer = chapter["AutoTokenizer"].from_pretrained(args.model_name)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
train, held_out = chapter["load_tokens"](args, tokenizer)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print("result", len(train) + len(held_out), (after - before) / 1e6)
"""


@pytest.mark.rest
def test_memory_of_a_large_text_file(tmp_path, tokenizer):
    """25 MB, half of them one document, and half of them many, take less than 1 GB."""
    file = tmp_path / "large.txt"
    story = "def story(self):\n    return 'once upon a time' + self.end\n" * 20
    count = 12_500_000 // len(story)
    file.write_text((story + "<|endoftext|>") * count + story * count)
    done = python("-c", PEAK, CHAPTER_1, "-m", TINY_LLAMA, "-d", file, cwd=tmp_path)
    _, tokens, memory = done.stdout.splitlines()[-1].split()
    assert float(memory) < 1
    one = len(tokenizer(story)["input_ids"])
    assert int(tokens) == pytest.approx(count * (one + 1) + count * one, rel=1e-3)


def test_the_order_is_a_function_of_seed_and_epoch(chapter_1):
    def order(epochs, seed, samples):
        args = argparse.Namespace(num_epochs=epochs, seed=seed)
        return chapter_1.sample_order(args, samples).tolist()

    whole = order(3, 7, 100)
    for epoch in range(3):  # every sample once in each epoch
        assert sorted(whole[100 * epoch : 100 * epoch + 100]) == list(range(100))
    assert whole[:100] != whole[100:200]
    assert order(3, 8, 100) != whole
    assert order(1, 7, 100) == whole[:100]
    # Never another order for the same seed: it would break the resume of runs that exist
    assert order(1, 0, 10)[:6] == [3, 7, 6, 4, 1, 0]


EMPTY_CACHE = """
import os, datasets
datasets.config.HF_DATASETS_CACHE = os.environ["CACHE"]
"""


def test_a_node_tokenizes_once(trainer, texts, tmp_path):
    """Two ranks with an empty cache leave one file, which a later run reads."""
    cache = tmp_path / "cache"
    file = write_documents(tmp_path / "own.jsonl", texts[:200])
    options = {"processes": 2, "before": EMPTY_CACHE, "env": {"CACHE": str(cache)}}
    for name, size in [("first", 32), ("second", 16)]:
        trainer("-d", file, "-s", size, "--max-steps", 1, name=name, **options)
        assert len([*cache.rglob("cache-*.arrow")]) == 1
