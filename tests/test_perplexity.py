"""tools/perplexity.py: its figure is that of a plain loop over documents."""

import argparse
import gzip
import sys

import pytest
import torch
from helpers.data import write_documents
from helpers.models import LLAMA, save_weights, write_model
from helpers.runner import REPOSITORY, load
from transformers import AutoModelForCausalLM, AutoTokenizer

PERPLEXITY = REPOSITORY / "tools" / "perplexity.py"
LENGTH = 32
COUNT = 30  # of the documents, four of which are empty


@pytest.fixture(scope="module")
def documents(texts):
    """Shorter and longer ones than a row, with empty and missing ones in between."""
    some = texts[300:340]
    return ["", *some[:10], None, *some[10:20], "", "", *some[20:]]


@pytest.fixture(scope="module")
def held_out(documents, tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("held-out") / "text.jsonl", documents)


@pytest.fixture(scope="module")
def tool():
    """The script as a module, whose figures have all digits."""
    return load(PERPLEXITY)


@pytest.fixture
def measure(tool, monkeypatch):
    """The loss, the number of documents and the number of labels."""

    def measure(model, dataset, *flags):
        flags = [model, "-d", dataset, "-s", LENGTH, "--eval-documents", COUNT, *flags]
        monkeypatch.setattr(sys, "argv", ["perplexity.py", *map(str, flags)])
        return tool.measure(tool.parse_args())

    return measure


def plain_loop(folder, documents):
    """One row at a time, without padding, in float64."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).double().eval()
    losses = []
    for document in filter(None, documents[:COUNT]):
        ids = [*tokenizer(document)["input_ids"], tokenizer.eos_token_id]
        while ids:
            row, ids = ids[:LENGTH], ids[LENGTH:]
            with torch.no_grad():
                logits = model(torch.tensor([row])).logits[0]
            logs = logits - logits.exp().sum(dim=-1, keepdim=True).log()
            losses += [-logs[i, token].item() for i, token in enumerate(row[1:])]
    return sum(losses) / len(losses), len(losses)


def test_a_plain_loop_finds_the_same(pretrained, documents, held_out, measure):
    """That chapters 4 and 10 log the same: test_matrix.py"""
    tokenizer = AutoTokenizer.from_pretrained(pretrained)
    first = filter(None, documents[:COUNT])
    lengths = [len(tokenizer(document)["input_ids"]) for document in first]
    assert min(lengths) < LENGTH - 1 < 2 * LENGTH < max(lengths)
    expected, labels = plain_loop(pretrained, documents)
    for rows in (5, 1000):
        loss, *counts = measure(pretrained, held_out, "-b", rows)
        assert counts == [COUNT - 4, labels]
        assert loss == pytest.approx(expected, rel=1e-6)


def test_files_are_read_as_prepare_data_reads_them(tool, pretrained, tmp_path):
    """Marks of encodings, names in brackets, archives, and several documents in a file."""
    tokenizer = AutoTokenizer.from_pretrained(pretrained)
    text = "one<|endoftext|>two"
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "p[8].txt").write_text(text, "utf-8-sig")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "c.jsonl").write_text('{"text": "one"}\n{"text": ""}\n{"text": "two"}\n')
    (tmp_path / "wide.txt").write_text(text, "utf-16")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train-0.txt").write_text("zero")
    (tmp_path / "folder" / "validation-0.txt").write_text(text)
    args = argparse.Namespace(dataset_subset=None, text_column="text", eval_documents=9)
    end = tokenizer.eos_token_id
    expected = [[*tokenizer(part)["input_ids"], end] for part in ("one", "two")]
    for name in ("a.txt", "p[8].txt", "b.txt.gz", "c.jsonl", "wide.txt", "folder"):
        args.dataset_name = str(tmp_path / name)
        assert tool.tokenized(tokenizer, args) == expected, name


def test_a_tokenizer_of_another_model(measure, held_out, tmp_path):
    folder = save_weights(write_model(tmp_path / "m", **LLAMA))
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(100)
    model.save_pretrained(folder)
    with pytest.raises(SystemExit, match="is outside the vocabulary of"):
        measure(folder, held_out)
