"""tools/perplexity.py: chapter 4's figure, which a plain loop over documents confirms."""

import gzip
import json
import math
import re
import shutil
import sys

import pytest
import torch
from conftest import Trainer, assert_one_sentence
from runner import CHAPTER_1, CHAPTER_4, REPOSITORY, Run, load
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
        for rows in (1, 5, 1000):
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


@pytest.mark.rest
def test_weights_of_other_chapters(trainer, held_out, measure):
    folder = trainer("--max-steps", 1, "--eval-freq", 0, script=CHAPTER_1).folder
    step = measure(folder / "step-00000001", held_out)
    assert step == measure(folder / "final", held_out)
    # In fp32, whatever the files have
    model = AutoModelForCausalLM.from_pretrained(folder / "final")
    shutil.copytree(folder / "final", folder / "bf16")
    model.bfloat16().save_pretrained(folder / "bf16")
    shutil.copytree(folder / "final", folder / "rounded")
    model.float().save_pretrained(folder / "rounded")
    assert measure(folder / "bf16", held_out) == measure(folder / "rounded", held_out)
    assert measure(folder / "bf16", held_out) != step


def test_datasets(trained, documents, held_out, measure, tmp_path):
    final = trained.folder / "final"
    expected = measure(final, held_out)
    compressed = tmp_path / "text.json.gz"
    compressed.write_bytes(gzip.compress(held_out.read_bytes()))
    assert measure(final, compressed) == expected

    # Two files of a glob, in their order; another column, and all documents
    write_documents(tmp_path / "1.jsonl", documents[:20], "words")
    write_documents(tmp_path / "2.jsonl", documents[20:], "words")
    words = [f"{tmp_path}/?.jsonl", "--text-column", "words"]
    assert measure(final, *words) == expected
    assert measure(final, *words, "--eval-documents", 999)[1] == 40

    # Validation, or else test, or else train
    splits = tmp_path / "splits"
    splits.mkdir()
    for n, split in enumerate(("train", "test", "validation"), 1):
        write_documents(splits / f"{split}.jsonl", documents[: n + 1])
        assert measure(final, splits)[1] == n

    # A text file is one document
    folder = tmp_path / "texts" / "deep"
    folder.mkdir(parents=True)
    for n, text in enumerate(filter(None, documents[:COUNT])):
        (folder / f"{n:02}.txt").write_text(text)
    assert measure(final, folder.parent) == expected


MISTAKES = {
    "no model": (["{tmp}/nothing", "-d", "{held_out}"], 1, "cannot load the model"),
    "damaged model": (["{damaged}", "-d", "{held_out}"], 1, "cannot load the model"),
    "few positions": (["{final}", "-d", "{held_out}", "-s", 129], 1, "128 positions"),
    "no dataset": (["{final}", "-d", "http://127.0.0.1:9/a.jsonl"], 1, "cannot load the dataset"),
    "broken file": (["{final}", "-d", "{tmp}/broken.jsonl"], 1, "cannot load the dataset"),
    "broken later": (["{final}", "-d", "{tmp}/later.json.gz"], 1, "cannot load the dataset"),
    "no text": (
        ["{final}", "-d", "{tmp}/numbers.jsonl"],
        1,
        "column of text: the dataset has none",
    ),
    "a column of numbers": (
        ["{final}", "-d", "{tmp}/both.jsonl", "--text-column", "n"],
        1,
        "'n' is no column of text: choose --text-column among text",
    ),
    "no column": (
        ["{final}", "-d", "{held_out}", "--text-column", "body"],
        1,
        "'body' is no column of text: choose --text-column among text",
    ),
    "no documents": (["{final}", "-d", "{tmp}/empty.jsonl"], 1, "no document"),
    "empty file": (["{final}", "-d", "{tmp}/nothing.jsonl"], 1, "cannot load the dataset"),
    "other splits": (["{final}", "-d", "{tmp}/splits"], 1, "other names only: dialogues"),
    "no flag": (["{final}"], 2, "-d/--dataset-name"),
    "short rows": (["{final}", "-d", "{held_out}", "-s", 1], 2, "--seq-length"),
    "no rows": (["{final}", "-d", "{held_out}", "-b", 0], 2, "--batch-size"),
}


@pytest.mark.rest
def test_mistakes(trained, held_out, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(trained.folder / "step-00000002", damaged)
    (damaged / "__1_0.distcp").unlink()
    (tmp_path / "broken.jsonl").write_text('{"text": "a')
    (tmp_path / "nothing.jsonl").write_text("")
    write_documents(tmp_path / "numbers.jsonl", [1, 2], "number")
    (tmp_path / "both.jsonl").write_text(json.dumps({"text": "a text", "n": 1}) + "\n")
    write_documents(tmp_path / "empty.jsonl", ["", ""])
    (tmp_path / "splits" / "data").mkdir(parents=True)
    write_documents(tmp_path / "splits" / "data" / "dialogues-00000-of-00001.jsonl", ["a"])
    later = b"".join(b'{"text": "%d"}\n' % number for number in range(100_000))
    (tmp_path / "later.json.gz").write_bytes(gzip.compress(later)[:-1000])
    places = {"tmp": tmp_path, "held_out": held_out, "damaged": damaged}
    places["final"] = trained.folder / "final"
    for name, (flags, status, sentence) in MISTAKES.items():
        flags = ["-s", LENGTH, *(str(flag).format(**places) for flag in flags)]
        run = Run(PERPLEXITY, flags, tmp_path / f"{name}.txt")
        assert run.wait() == status, run.output
        assert_one_sentence(run.output, sentence)
        assert not re.search("^loss", run.output, re.MULTILINE)
