"""From documents to batches: every token once, in an order that depends on seed and epoch alone."""

import gzip

import datasets
import pytest
import torch
from helpers.data import END, arguments, expected_tokens, tokens_of, write_documents
from helpers.runner import patches


@pytest.mark.parametrize("seq_length", [7, 100])
def test_every_token_once(chapter_1, tokenizer, dataset, texts, seq_length):
    train, held_out = chapter_1.load_tokens(arguments(dataset, seq_length), tokenizer)
    tokens = expected_tokens(tokenizer, texts)
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


@pytest.mark.parametrize("split", ["validation", "test"])
def test_a_split_of_its_own_is_held_out(chapter_1, tokenizer, texts, monkeypatch, split):
    """An empty one counts as none. Both kinds have at most 1,000 samples."""
    parts = {"train": ["train"], "train_sft": texts[:300], split: texts[300:]}
    if split == "test":
        parts["validation"] = []

    def held_out_of(name, seq_length):
        features = datasets.Features(text=datasets.Value("string"))
        splits = {k: datasets.Dataset.from_dict({"text": v}, features) for k, v in parts.items()}
        splits = datasets.DatasetDict(splits)
        monkeypatch.setattr(datasets, "load_dataset", lambda *_: splits)
        return chapter_1.load_tokens(arguments(name, seq_length), tokenizer)

    train, held_out = held_out_of("someone/some:train_sft", 32)
    assert train.to_pylist() == expected_tokens(tokenizer, texts[:300])
    assert held_out.to_pylist() == expected_tokens(tokenizer, texts[300:])
    assert held_out_of("a-name:train_sft", 2)[1] == held_out.slice(length=2000)
    parts = {"train": texts * 16}
    assert len(held_out_of("a-name", 2)[1]) in (2000, 2001)


def test_files_of_every_kind(chapter_1, tokenizer, texts, tmp_path):
    rows = datasets.Dataset.from_dict({"n": [1] * len(texts), "story": texts})
    rows.to_parquet(tmp_path / "a.parquet")
    rows.to_csv(tmp_path / "a.csv")
    rows.to_json(tmp_path / "a.jsonl")
    (tmp_path / "b.json.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    for name in ("a.parquet", "a.csv", "a.jsonl", "b.json.gz"):
        found = tokens_of(chapter_1, tokenizer, tmp_path / name, text_column="story")
        assert found == expected_tokens(tokenizer, texts), name
        with pytest.raises(SystemExit, match=r"'text': choose --text-column of \['n', 'story'\]"):
            tokens_of(chapter_1, tokenizer, tmp_path / name)


def test_text_files(chapter_1, tokenizer, tmp_path, monkeypatch):
    """A file is a document, or has some with borders. One file is tokenized at a time."""
    (tmp_path / "deep").mkdir()
    files = {"a.txt": "one<|endoftext|>two<|endoftext|>three\n<|endoftext|>", "b.txt": ""}
    files |= {"c.txt": "first\n\n\ndocument " * 9, "deep/d.txt": "zwölf"}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    counts, tokenize = [], chapter_1.tokenize

    def counted(rows, **options):
        counts.append(len(rows["text"]))
        return tokenize(rows, **options)

    monkeypatch.setattr(chapter_1, "tokenize", counted)
    monkeypatch.setenv("HOME", str(tmp_path))
    found = tokens_of(chapter_1, tokenizer, "~/**/*.txt", seq_length=4)
    documents = ["one", "two", "three\n", files["c.txt"], "zwölf"]
    assert found == expected_tokens(tokenizer, documents)
    assert set(counts) == {1}
    (tmp_path / "a.txt").write_text("four")  # is read again
    found = tokens_of(chapter_1, tokenizer, tmp_path / "a.txt", seq_length=1)
    assert found == expected_tokens(tokenizer, ["four"])


def test_the_order_is_a_function_of_seed_and_epoch(chapter_1):
    def order(seed, epoch, samples):
        both = chapter_1.sample_order(seed, epoch, samples).tolist()
        assert both[samples:] == chapter_1.sample_order(seed, epoch + 1, samples)[:samples].tolist()
        return both[:samples]

    epochs = [order(7, epoch, 100) for epoch in range(3)]
    for epoch in epochs:  # every sample once
        assert sorted(epoch) == list(range(100))
    assert len({*map(tuple, epochs), tuple(order(8, 0, 100))}) == 4
    # Never another order for the same seed: it would break the resume of runs that exist
    assert order(0, 0, 10)[:6] == [3, 7, 6, 4, 1, 0]


def test_a_corpus_is_tokenized_once(trainer, texts, tmp_path):
    """Two jobs with two ranks each share an empty cache, like two nodes; a later run reads it."""
    cache = tmp_path / "cache"
    cache.mkdir()
    file = write_documents(tmp_path / "own.jsonl", texts[:200])
    options = {"processes": 2, "before": patches("empty_cache"), "env": {"CACHE": str(cache)}}
    flags = ["-d", file, "--max-steps", 1]
    jobs = [trainer.start(*flags, name=name, **options) for name in ("one", "other")]
    assert [job.wait() for job in jobs] == [0, 0], jobs[0].output + jobs[1].output
    trainer(*flags, "-s", 16, name="later", **options)
    assert len((cache / "mapped").read_text().split()) == 1
    assert len([*cache.rglob("cache-*.arrow")]) == 1
