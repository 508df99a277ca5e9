"""From documents to batches: every token once, in an order that depends on seed and epoch alone."""

import argparse
import gzip
import itertools
import json
import os
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from conftest import TINY_LLAMA
from transformers import AutoConfig, AutoTokenizer

END = 0  # of text, for the tiny tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_LLAMA)


def load(chapter_1, tokenizer, name, seq_length=32, text_column="text"):
    args = argparse.Namespace(
        dataset_name=str(name), dataset_subset=None, text_column=text_column, seq_length=seq_length
    )
    config = AutoConfig.from_pretrained(TINY_LLAMA)
    return chapter_1.load_samples(args, tokenizer, config, global_batch=4)


def stream(samples) -> list[int]:
    return [int(token) for i in range(len(samples)) for token in samples[i]]


@pytest.mark.parametrize("seq_length", [7, 32, 100])
def test_samples_hold_the_documents(chapter_1, tokenizer, dataset, texts, seq_length):
    train, held_out = load(chapter_1, tokenizer, dataset, seq_length)
    expected = [t for text in texts for t in [*tokenizer(text)["input_ids"], END]]
    packed = stream(train) + stream(held_out)
    assert packed == expected[: len(packed)]
    assert len(expected) - len(packed) < seq_length  # dropped: less than one sample in all
    assert len(held_out) == max((len(train) + len(held_out)) // 100, 1)
    sample = train[0]
    assert sample.shape == (seq_length,)
    assert sample.dtype == np.int32


def test_samples_across_many_chunks(chapter_1, tokenizer):
    """Documents of any length, in Arrow chunks of any size, an empty one among them."""
    chance = np.random.default_rng(0)
    documents = [list(map(int, chance.integers(1, 9, n))) for n in chance.integers(0, 40, 500)]
    parts = [
        datasets.Dataset.from_dict({"input_ids": documents[i : i + 50]}) for i in range(0, 500, 50)
    ]
    samples = chapter_1.PackedSamples(datasets.concatenate_datasets(parts), 16)
    assert samples.tokens.num_chunks == 10
    tokens = list(itertools.chain(*documents))
    assert len(samples) == len(tokens) // 16
    assert stream(samples) == tokens[: len(samples) * 16]


def test_end_of_text_after_every_document(chapter_1, tokenizer):
    rows = {"text": ["a b", "", None, "c"], "other": [1, 2, 3, 4]}
    ids = chapter_1.tokenize(rows, tokenizer, "text", 2048)["input_ids"]
    assert ids == [[*tokenizer("a b")["input_ids"], END], [*tokenizer("c")["input_ids"], END]]
    assert chapter_1.tokenize({"text": [None]}, tokenizer, "text", 2048) == {"input_ids": []}

    class Strips:  # finds no tokens in a text of spaces
        eos_token_id = END

        def __call__(self, texts, **_):
            return {"input_ids": [tokenizer(t.strip())["input_ids"] for t in texts]}

    assert chapter_1.tokenize({"text": ["  ", "b"]}, Strips(), "text", 2048) == {
        "input_ids": [[*tokenizer("b")["input_ids"], END]]
    }


def write(folder, name, texts, column="text"):
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps({"n": 1, column: text}) + "\n" for text in texts)
    (folder / name).write_text(text)


@pytest.mark.parametrize("split", ["validation", "test"])
def test_a_split_of_its_own_is_held_out(chapter_1, tokenizer, texts, tmp_path, split):
    write(tmp_path / "data", "train.jsonl", texts[:300])
    write(tmp_path / "data", f"{split}.jsonl", texts[300:])
    train, held_out = load(chapter_1, tokenizer, tmp_path / "data")
    for samples, part in [(train, texts[:300]), (held_out, texts[300:])]:
        tokens = [t for text in part for t in [*tokenizer(text)["input_ids"], END]]
        assert stream(samples) == tokens[: len(tokens) // 32 * 32]


def test_files_of_every_kind(chapter_1, tokenizer, texts, tmp_path):
    rows = datasets.Dataset.from_dict({"n": [1] * len(texts), "story": texts})
    rows.to_parquet(tmp_path / "a.parquet")
    rows.to_csv(tmp_path / "a.csv")
    rows.to_json(tmp_path / "a.jsonl")
    expected = [t for text in texts for t in [*tokenizer(text)["input_ids"], END]]
    for name, compressed in (("a.jsonl", "b.json.gz"), ("a.csv", "b.csv.gz")):
        (tmp_path / compressed).write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    for name in ("a.parquet", "a.csv", "a.jsonl", "b.json.gz", "b.csv.gz"):
        train, _ = load(chapter_1, tokenizer, tmp_path / name, text_column="story")
        assert stream(train) == expected[: len(train) * 32]
    for column in ("text", "n"):  # absent, and not a text
        sentence = f"'{column}' is no column of text: choose --text-column among story"
        with pytest.raises(SystemExit, match=sentence):
            load(chapter_1, tokenizer, tmp_path / "a.jsonl", text_column=column)
    # Text files: one document each, in the order of their names, whatever the bytes
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.txt").write_text("second\n\ndocument " * 99)
    (folder / "a.txt").write_text("first\n\n\ndocument " * 99)
    (folder / "deep" / "c.txt").write_bytes(b"third " * 99 + b"\xff\xfe")
    texts = [
        "first\n\n\ndocument " * 99,
        "second\n\ndocument " * 99,
        "third " * 99 + "\ufffd\ufffd",
    ]
    expected = [t for text in texts for t in [*tokenizer(text)["input_ids"], END]]
    train, _ = load(chapter_1, tokenizer, f"{folder}/**/*.txt")
    assert stream(train) == expected[: len(train) * 32]
    (folder / "deep" / "c.txt").unlink()
    with pytest.raises(SystemExit, match="is a folder of text: give a pattern"):
        load(chapter_1, tokenizer, folder)
    (tmp_path / "a.tsv").write_text("text\n")
    with pytest.raises(SystemExit, match=r"a.tsv must end in .txt, .md, .py, .json"):
        load(chapter_1, tokenizer, tmp_path / "a.tsv")
    # A folder as the Hub has it, with a page beside the data
    (tmp_path / "clone").mkdir()
    (tmp_path / "clone" / "README.md").write_text("# Data")
    shutil.copy(tmp_path / "a.parquet", tmp_path / "clone" / "train.parquet")
    train, _ = load(chapter_1, tokenizer, tmp_path / "clone", text_column="story")
    assert len(train) > 0


def test_the_order_is_a_function_of_seed_and_epoch(chapter_1):
    order = chapter_1.sample_order
    whole = order(0, 300, 100, 7)
    for epoch in range(3):  # every sample once in each epoch
        assert sorted(whole[100 * epoch : 100 * epoch + 100]) == list(range(100))
    assert whole[:100] != whole[100:200]
    assert order(0, 300, 100, 8) != whole
    # From anywhere, across an epoch, in pieces of any size: the same
    for first, count in [(0, 1), (95, 10), (150, 150), (299, 1)]:
        assert order(first, count, 100, 7) == whole[first : first + count]
    # Never another order for the same seed: it would break the resume of runs that exist
    assert order(0, 6, 10, 0) == EXPECTED_ORDER


EXPECTED_ORDER = [3, 7, 6, 4, 1, 0]


def test_read_batch(chapter_1, tokenizer, dataset):
    train, _ = load(chapter_1, tokenizer, dataset)
    batch = chapter_1.read_batch(train, [5, 0, 7], torch.device("cpu"))
    assert (batch.shape, batch.dtype) == ((3, 32), torch.int64)
    assert batch.tolist() == [train[i].tolist() for i in (5, 0, 7)]


def test_tokenized_once(trainer, texts):
    """A second run reads the cache, whatever else it does differently."""
    cache = Path(os.environ["HF_HOME"])
    file = trainer.folder / "own.jsonl"
    write(trainer.folder, file.name, texts[:100])
    counts = [len(list(cache.rglob("cache-*.arrow")))]
    for name, size in [("first", 32), ("second", 16)]:
        trainer("-d", file, "-s", size, "--max-steps", 1, name=name)
        counts.append(len(list(cache.rglob("cache-*.arrow"))))
    assert counts == [counts[0], counts[0] + 1, counts[0] + 1]
