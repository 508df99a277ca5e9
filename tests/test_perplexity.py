"""tools/perplexity.py: chapter 4's figure, which a plain loop over documents confirms."""

import json
import math
import sys

import pytest
import torch
from conftest import LLAMA, Trainer, write_model
from runner import CHAPTER_4, REPOSITORY, load
from test_fsdp import save_weights
from transformers import AutoModelForCausalLM, AutoTokenizer

PERPLEXITY = REPOSITORY / "tools" / "perplexity.py"
LENGTH = 32
COUNT = 30  # of the documents, four of which are empty


def write_documents(file, documents, column="text"):
    file.write_text("".join(json.dumps({column: document}) + "\n" for document in documents))
    return file


@pytest.fixture(scope="module")
def documents(texts):
    """Shorter and longer ones than a row, with empty and missing ones in between."""
    some = texts[300:340]
    return ["", *some[:10], None, *some[10:20], "", "", *some[20:]]


@pytest.fixture(scope="module")
def held_out(documents, tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("held-out") / "text.jsonl", documents)


@pytest.fixture(scope="module")
def trained(model, dataset, held_out, tmp_path_factory):
    """Two steps of chapter 4 on two ranks, each evaluated and saved."""
    trainer = Trainer(tmp_path_factory.mktemp("runs"), model, dataset)
    flags = ["--max-steps", 2, "--eval-freq", 1, "--ckpt-freq", 1]
    flags += ["--eval-dataset", held_out, "--eval-documents", COUNT]
    return trainer(*flags, script=CHAPTER_4, processes=2)


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


def test_chapter_4_logs_the_same(trained, held_out, measure):
    final = trained.column("eval/perplexity")[-1]
    steps = dict(zip(trained.checkpoints, trained.column("eval/perplexity"), strict=True))
    assert len(set(steps.values())) == 2
    for folder, perplexity in (steps | {"final": final}).items():
        for rows in (5, 1000):
            loss, documents, _ = measure(trained.folder / folder, held_out, "-b", rows)
            assert math.exp(loss) == pytest.approx(perplexity, rel=1e-6)
            assert documents == COUNT - 4


def test_a_plain_loop_finds_the_same(trained, documents, held_out, measure):
    final = trained.folder / "final"
    tokenizer = AutoTokenizer.from_pretrained(final)
    first = filter(None, documents[:COUNT])
    lengths = [len(tokenizer(document)["input_ids"]) for document in first]
    assert min(lengths) < LENGTH - 1 < 2 * LENGTH < max(lengths)
    expected, labels = plain_loop(final, documents)
    assert measure(final, held_out)[1:] == (COUNT - 4, labels)
    loss = measure(final, held_out)[0]
    assert math.exp(loss) == pytest.approx(math.exp(expected), rel=1e-6)


def test_a_tokenizer_of_another_model(measure, held_out, tmp_path):
    folder = save_weights(write_model(tmp_path / "m", **LLAMA))
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(100)
    model.save_pretrained(folder)
    with pytest.raises(SystemExit, match="is outside the vocabulary of"):
        measure(folder, held_out)
