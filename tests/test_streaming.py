"""Chapter 4 reads a stream: every row once, in an order that a resumed run repeats."""

import json
import random
import re
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from helpers.assertions import assert_one_sentence
from helpers.data import write_documents
from helpers.plain_loops import reference_rows
from helpers.runner import CHAPTER_4, load
from helpers.trainer import resume, watched
from transformers import AutoTokenizer


@pytest.fixture(scope="module")
def files(texts, tmp_path_factory):
    """Eight files of documents, each of which has a number of its own."""
    folder = tmp_path_factory.mktemp("stream")
    for n in range(8):
        some = [f"number {i} {texts[i]}" for i in range(n * 10, n * 10 + 10)]
        write_documents(folder / f"{n}.jsonl", some)
    return folder


@pytest.fixture(scope="module")
def held_out(texts, tmp_path_factory):
    file = tmp_path_factory.mktemp("held-out") / "text.txt"
    file.write_text("<|endoftext|>".join(texts[300:320]))
    return file


@pytest.fixture
def stream(trainer, files, held_out):
    """Runs chapter 4 on the eight files."""

    def run(*flags, name="run", **options):
        flags = ["-d", f"{files}/*.jsonl", "--eval-dataset", held_out, *flags]
        return watched(trainer, *flags, name=name, script=CHAPTER_4, **options)

    return run


def places_at(run, step: int) -> list[dict]:
    """The place of each rank in its stream."""
    state = json.loads((run.folder / f"step-{step:08d}" / "state.json").read_text())
    return state["places"]


@pytest.mark.rest
def test_two_resumes_in_a_row_across_passes(stream, trainer):
    """They read what an undisturbed run reads, also where the packer has a rest."""
    flags = ["--max-steps", 32, "--keep-checkpoints", 99, "--eval-freq", 32]
    flags += ["--shuffle-window", 20, "-b", 8]
    origin = stream(*flags, "--ckpt-freq", 1, name="origin")
    passes = origin.column("epoch")
    assert passes[0] == 0
    assert passes[-1] == 2
    turn = passes.index(1)  # the step before the first one of pass 1
    # The first step whose places are in a later window of pass 1, and not where this pass begins
    later = turn + 1
    while not all(place["pass"] == 1 and place["position"] for place in places_at(origin, later)):
        later += 1
    for first, second in ((3, turn), (turn + 1, later)):
        name = f"from-{first}"
        options = {"name": name, "again": stream}
        resumed = resume(origin, trainer, first, *flags, "--ckpt-freq", second, **options)
        options["name"] = f"{name}-{second}"
        again = resume(resumed, trainer, second, *flags, **options)
        for rank in range(2):
            assert torch.equal(resumed.seen[rank], origin.seen[rank][first:])
            assert torch.equal(again.seen[rank], origin.seen[rank][second:])


@pytest.mark.rest
@pytest.mark.parametrize("processes", [2, 3])
def test_each_document_once_in_a_pass(stream, pretrained, processes):
    """With one row for each of the 80 documents. The order of a pass is not that of another.

    A rank with fewer documents than the others begins its next pass earlier.
    """
    flags = ["--packing", "trunc", "-b", 1, "--max-steps", 60, "--eval-freq", 0]
    run = stream(*flags, "--shuffle-window", 7, processes=processes)
    assert ("8 files for 3 ranks: each rank reads all" in run.output) == (processes == 3)
    tokenizer = AutoTokenizer.from_pretrained(pretrained)
    texts = [[tokenizer.decode(row) for row in rows[:, 0].clamp(min=0)] for rows in run.seen]
    numbers = [[re.match(r"number (\d+) ", text)[1] for text in of_rank] for of_rank in texts]
    shares = [len(range(rank, 80, processes)) for rank in range(processes)]
    first = [of_rank[:share] for of_rank, share in zip(numbers, shares, strict=True)]
    assert len(set().union(*first)) == sum(map(len, first)) == 80
    second = [of_rank[share : 2 * share] for of_rank, share in zip(numbers, shares, strict=True)]
    assert all(len(set(of_rank)) == len(of_rank) for of_rank in second)
    assert first[0] != second[0][: len(first[0])]
    if processes == 2:  # which divide the files: a rank has whole files
        files = [{int(n) // 10 for n in of_rank} for of_rank in first]
        assert not files[0] & files[1]


class Documents(list):
    """What `read_windows` needs of a dataset."""

    def set_epoch(self, epoch):
        pass

    def state_dict(self):
        return {"some": "position"}


@pytest.mark.parametrize("packing", ["pack", "overflow", "trunc"])
def test_packing_strategies(packing):
    chance = random.Random(packing)
    lengths = [1, 8, 9, 7, 16, 17, *(chance.randint(1, 40) for _ in range(200))]
    documents = [[chance.randint(0, 999) for _ in range(length)] for length in lengths]
    args = SimpleNamespace(packing=packing, seq_length=8, shuffle_window=50, seed=0)
    chapter = load(CHAPTER_4)
    stream = Documents({"input_ids": ids} for ids in documents)
    windows = chapter.read_windows(stream, chapter.START, args)
    passes = defaultdict(list)
    while 2 not in passes:
        rows, place = next(windows)
        passes[place["pass"]] += [row.tolist() for row in rows]
    taken = passes[0]
    expected = reference_rows(documents, packing, 8)
    assert sorted(taken) == sorted(expected)
    assert taken != expected
    # Rows move within their window only
    place = {tuple(row): number for number, row in enumerate(expected)}
    once = [(number, tuple(row)) for number, row in enumerate(taken) if expected.count(row) == 1]
    moved = [abs(place[row] - number) for number, row in once]
    assert max(moved) < 50 + 5
    # What the packer has left begins the next pass
    rest = [i for ids in documents for i in ids][len(expected) * 8 :]
    again = reference_rows([rest, *documents] if packing == "pack" else documents, packing, 8)
    assert sorted(passes[1]) == sorted(again)


@pytest.mark.rest
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--eval-freq", 0], "give --max-steps"),
        (["--max-steps", 1, "--eval-freq", 1], "too little text to evaluate on"),
        (["--eval-freq", 0, "--max-steps", 1, "--text-column", "a"], "no column 'a': choose"),
    ],
)
def test_mistakes_end_in_one_sentence(trainer, flags, sentence):
    result = trainer(*flags, script=CHAPTER_4, processes=1, status=1)
    assert_one_sentence(result.output, sentence)


@pytest.mark.rest
def test_a_rank_without_text(trainer, tmp_path):
    """It would look for text without end."""
    file = write_documents(tmp_path / "one.jsonl", ["The only document."])
    flags = ["-d", file, "--max-steps", 1, "--eval-freq", 0]
    result = trainer(*flags, script=CHAPTER_4, processes=2, status=1)
    assert_one_sentence(result.run.ranks[1].output, "no text for rank 1: give more files")


@pytest.mark.rest
def test_the_first_documents(stream):
    """In each pass, and over all ranks."""
    flags = ["--packing", "trunc", "-b", 1, "--max-steps", 10, "--eval-freq", 0]
    run = stream(*flags, "--max-documents", 10, name="origin")
    rows = [tuple(row) for of_rank in run.seen for row in of_rank.flatten(0, 1).tolist()]
    assert [rows.count(row) for row in rows] == 20 * [2]


@pytest.mark.rest
def test_rows_of_a_single_token(trainer, tmp_path, texts, model):
    """A row of one token has no label. A step with such rows only has no loss, but goes on."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    fits = [text for text in texts if len(tokenizer(text)["input_ids"]) % 32 == 0]
    file = write_documents(tmp_path / "fits.jsonl", fits)
    flags = ["-d", file, "--packing", "overflow", "-b", 1, "--max-steps", 2 * len(fits)]
    run = trainer(*flags, "--eval-freq", 0, script=CHAPTER_4, processes=1)
    assert 0 in run.column("loss")
    assert max(run.column("loss")) > 1
