"""Chapter 4 reads a stream: every row once, in an order that a resumed run repeats."""

import http.server
import json
import random
import re
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import WITHOUT_INDUCTOR, assert_one_sentence, exact, take_over
from runner import CHAPTER_4, load
from test_fsdp import save_weights
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

# Each rank writes the labels that it was trained on, in their order
WATCH = """
import os, torch
import torch.distributed as dist

seen = []

def to_empty(self, *, device, recurse=True):
    original_to_empty(self, device=device)
    forward = self.forward
    def watched(input_ids, labels, **options):
        if self.training:
            seen.append(labels.clone())
        return forward(input_ids=input_ids, labels=labels, **options)
    self.forward = watched
    return self

original_to_empty = torch.nn.Module.to_empty
torch.nn.Module.to_empty = to_empty

def tell():
    torch.save(torch.stack(seen), os.environ["SEEN"] + os.environ["RANK"])
    destroy()

destroy = dist.destroy_process_group
dist.destroy_process_group = tell
"""


@pytest.fixture(scope="module")
def files(texts, tmp_path_factory):
    """Eight files of documents, each of which has a number of its own."""
    folder = tmp_path_factory.mktemp("stream")
    for n in range(8):
        some = [f"number {i} {texts[i]}" for i in range(n * 10, n * 10 + 10)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in some)
        (folder / f"{n}.jsonl").write_text(lines)
    return folder


@pytest.fixture(scope="module")
def held_out(texts, tmp_path_factory):
    file = tmp_path_factory.mktemp("held-out") / "text.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[300:320]))
    return file


@pytest.fixture
def stream(trainer, files, held_out):
    """Runs chapter 4 on the eight files; `seen` has the rows of each rank."""

    def run(*flags, processes=2, name="run", **options):
        path = trainer.folder / f"seen-{name}-"
        before = WATCH + options.pop("before", "")
        flags = ["-d", f"{files}/*.jsonl", "--eval-dataset", held_out, *flags]
        options |= {"script": CHAPTER_4, "processes": processes, "env": {"SEEN": str(path)}}
        result = trainer(*flags, name=name, before=before, **options)
        saved = [path.with_name(path.name + str(rank)) for rank in range(processes)]
        result.seen = [torch.load(file) for file in saved if file.exists()]
        return result

    return run


def places_at(run, step: int) -> list[dict]:
    """The place of each rank in its stream."""
    state = json.loads((run.folder / f"step-{step:08d}" / "state.json").read_text())
    return state["places"]


@pytest.mark.rest
def test_two_resumes_in_a_row_across_passes(stream, trainer):
    """They read what an undisturbed run reads, also where the packer has a rest."""
    flags = ["--max-steps", 54, "--keep-checkpoints", 99, "--eval-freq", 54]
    flags += ["--shuffle-window", 20, "-b", 4]
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
        take_over(origin, trainer, name, first)
        resumed = stream(*flags, "--ckpt-freq", second, name=name)
        assert exact(resumed.records) == exact(origin.records)
        take_over(resumed, trainer, f"{name}-{second}", second)
        again = stream(*flags, name=f"{name}-{second}")
        assert exact(again.records) == exact(origin.records)
        for rank in range(2):
            assert torch.equal(resumed.seen[rank], origin.seen[rank][first:])
            assert torch.equal(again.seen[rank], origin.seen[rank][second:])


@pytest.fixture(scope="module")
def weights(tmp_path_factory, model):
    """The fixture `model` with weights, so that a plain loop can begin with the same ones."""
    folder = tmp_path_factory.mktemp("models") / "with-weights"
    shutil.copytree(model, folder)
    return save_weights(folder)


def plain_losses(folder, steps: list[torch.Tensor]) -> list[float]:
    return plain_loop(folder, steps)[0]


def plain_loop(folder, steps: list[torch.Tensor]) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a loop without ranks and micro-batches.

    It takes all rows of a step at once.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    groups = [
        [p for p in model.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False)
    ]
    groups = [{"params": p, "weight_decay": d} for p, d in zip(groups, (0.01, 0.0), strict=True)]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = get_scheduler("cosine", optimizer, 0, len(steps))
    losses, norms = [], []
    for labels in steps:
        mask = (labels >= 0).long()
        logits = model(input_ids=labels * mask, attention_mask=mask).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.rest
@pytest.mark.parametrize(("processes", "accumulation"), [(2, 1), (3, 2)])
def test_losses_with_padding(stream, weights, processes, accumulation):
    """As in a loop over the same rows with an attention mask, which the chapter does not need.

    Once with the compiled loss, which takes no NumPy number.
    """
    size = 6 // processes
    flags = ["-m", weights, "--no-from-scratch", "--max-steps", 8, "--lr", 1e-3, "--eval-freq", 0]
    flags += ["--packing", "overflow", "-b", size, "--gradient-accumulation-steps", accumulation]
    flags += ["--compile"] if processes == 2 else []
    run = stream(*flags, processes=processes, before=WITHOUT_INDUCTOR)
    assert ("8 files for 3 ranks: each rank reads all" in run.output) == (processes == 3)
    steps = [
        torch.cat(
            [rows[n * accumulation : (n + 1) * accumulation].flatten(0, 1) for rows in run.seen]
        )
        for n in range(8)
    ]
    assert all(len(rows) == 6 * accumulation for rows in steps)
    assert run.column("loss") == pytest.approx(plain_losses(weights, steps), rel=1e-5)
    padding = [(rows < 0).float().mean().item() for rows in steps]
    assert max(padding) > 0.1
    assert run.column("padding") == pytest.approx(padding, abs=1e-6)


@pytest.mark.rest
@pytest.mark.parametrize(("processes", "steps", "left"), [(2, 40, 0), (3, 26, 2)])
def test_each_document_once_in_a_pass(stream, weights, processes, steps, left):
    """With one row for each of the 80 documents. The order of a pass is not that of another."""
    flags = ["--packing", "trunc", "-b", 1, "--max-steps", 2 * steps + 1, "--eval-freq", 0]
    run = stream(*flags, "--shuffle-window", 7, processes=processes)
    assert f"Pass 2 is over: {left} rows are left out" in run.output
    tokenizer = AutoTokenizer.from_pretrained(weights)
    texts = [[tokenizer.decode(row) for row in rows[:, 0].clamp(min=0)] for rows in run.seen]
    numbers = [[re.match(r"number (\d+) ", text)[1] for text in of_rank] for of_rank in texts]
    for begin in (0, steps):
        once = [n for of_rank in numbers for n in of_rank[begin : begin + steps]]
        assert len(once) == len(set(once)) == 80 - left
    assert numbers[0][:steps] != numbers[0][steps : 2 * steps]
    if processes == 2:  # which divide the files: a rank has whole files
        files = [{int(n) // 10 for n in of_rank[:steps]} for of_rank in numbers]
        assert not files[0] & files[1]


def reference_rows(documents: list[list[int]], packing: str, length: int) -> list[list[int]]:
    """Token by token, by the definitions."""
    rows, row = [], []
    for document in documents:
        for number, token in enumerate(document):
            if packing != "trunc" or number < length:
                row.append(token)
            if len(row) == length:
                rows.append(row)
                row = []
        if packing != "pack" and row:
            while len(row) < length:
                row.append(-100)
            rows.append(row)
            row = []
    return rows


class Documents(list):
    """What `text_windows` needs of a dataset."""

    def set_epoch(self, epoch):
        pass

    def state_dict(self):
        return {}


@pytest.mark.parametrize("packing", ["pack", "overflow", "trunc"])
def test_packing_strategies(packing):
    chance = random.Random(packing)
    lengths = [1, 8, 9, 7, 16, 17, *(chance.randint(1, 40) for _ in range(200))]
    documents = [[chance.randint(0, 999) for _ in range(length)] for length in lengths]
    args = SimpleNamespace(packing=packing, seq_length=8, shuffle_window=50, seed=0)
    chapter = load(CHAPTER_4)
    stream = Documents({"input_ids": ids} for ids in documents)
    windows = chapter.text_windows(stream, chapter.START, args)
    rows = chapter.Stream(windows, chapter.START).rows
    taken = []
    while (row := next(rows)) is not None:
        taken.append(row.tolist())
    expected = reference_rows(documents, packing, 8)
    assert sorted(taken) == sorted(expected)
    assert taken != expected
    # Rows move within their window only
    place = {tuple(row): number for number, row in enumerate(expected)}
    moved = [abs(place[tuple(row)] - number) for number, row in enumerate(taken)]
    assert max(moved) < 50 + 32 * 5
    # What the packer has left begins the next pass
    rest = [i for ids in documents for i in ids][len(expected) * 8 :]
    again = reference_rows([rest, *documents] if packing == "pack" else documents, packing, 8)
    second = []
    while (row := next(rows)) is not None:
        second.append(row.tolist())
    assert sorted(second) == sorted(again)


class Server(http.server.SimpleHTTPRequestHandler):
    """A folder by HTTP. `answer` says how a request ends."""

    answer = None  # a function of the path: "complete", "refused" or "half"
    running = threading.Event()

    def do_GET(self):
        answer = Server.answer(self.path)
        if answer == "refused":
            self.send_error(503)
        elif answer == "half":
            content = Path(self.translate_path(self.path)).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", len(content))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            while Server.running.is_set():  # and then nothing, but no end
                time.sleep(0.1)
        else:
            super().do_GET()

    def log_message(self, *_):
        pass


@pytest.fixture
def server(files):
    def handler(*arguments):
        return Server(*arguments, directory=str(files))

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        Server.running.set()
        yield f"http://127.0.0.1:{server.server_port}"
        Server.running.clear()
        server.shutdown()


@pytest.mark.rest
@pytest.mark.parametrize(
    ("flags", "status", "sentence"),
    [
        (["--eval-freq", 0], 2, "give --max-steps"),
        (["--max-steps", 1, "--eval-freq", 1], 1, "no documents to evaluate on"),
        (["--max-steps", 1, "--eval-freq", 0, "-b", 5000], 1, "too small: in each of 10 passes"),
    ],
)
def test_mistakes_end_in_one_sentence(trainer, flags, status, sentence):
    result = trainer(*flags, script=CHAPTER_4, processes=1, status=status)
    assert_one_sentence(result.output, sentence)


def jsonl(file, documents, column="text"):
    file.write_text("".join(json.dumps({column: document}) + "\n" for document in documents))
    return file


@pytest.mark.rest
def test_rows_of_a_single_token(trainer, tmp_path, texts, model):
    """A row of one token has no label. A step with such rows only has no loss, but goes on."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    fits = [text for text in texts if len(tokenizer(text)["input_ids"]) % 32 == 0]
    file = jsonl(tmp_path / "fits.jsonl", fits)
    flags = ["-d", file, "--packing", "overflow", "-b", 1, "--max-steps", 2 * len(fits)]
    run = trainer(*flags, "--eval-freq", 0, script=CHAPTER_4, processes=1)
    assert 0 in run.column("loss")
    assert max(run.column("loss")) > 1


@pytest.mark.rest
def test_another_number_of_ranks_is_refused(stream):
    stream("--max-steps", 2, "--eval-freq", 0)
    result = stream("--max-steps", 4, "--eval-freq", 0, processes=3, status=1)
    assert_one_sentence(result.run.ranks[0].output, "needs 2 ranks")


# Shorter time limits and pauses
HASTY = """
import aiohttp, time

def limits(total, sock_connect, sock_read):
    return ClientTimeout(total=total, sock_connect=sock_connect / 20, sock_read=sock_read / 20)

ClientTimeout = aiohttp.ClientTimeout
aiohttp.ClientTimeout = limits
sleep = time.sleep
time.sleep = lambda seconds: sleep(seconds / 400)
"""


@pytest.mark.rest
def test_a_stream_that_breaks(stream, server, files):
    """Once: it is opened again. For good: the run saves, ends, and goes on when asked again."""
    flags = ["--max-steps", 22, "--eval-freq", 0, "--shuffle-window", 4, "--ckpt-freq", 99]
    local = stream(*flags, "-d", files / "0.jsonl", name="local", processes=1)
    assert local.column("epoch")[-1] >= 2
    requests = []

    def answer(path):
        requests.append(path)
        return fault if len(requests) in faults else "complete"

    def remote(name, status=0):
        requests.clear()
        options = {"name": name, "processes": 1, "before": HASTY, "status": status}
        return stream(*flags, "-d", f"{server}/0.jsonl", **options)

    Server.answer = staticmethod(answer)
    faults = ()
    undisturbed = remote("remote")
    assert exact(undisturbed.records) == exact(local.records)
    assert "again" not in undisturbed.output
    needed = len(requests)

    for fault in ("refused", "half"):
        faults = (needed - 1, needed)
        again = remote(f"{fault}-twice")
        assert exact(again.records) == exact(local.records)
        assert again.output.count("warning: rank 0 opens its files again") == 1
        assert len(requests) > needed

        faults = range(needed - 1, 10_000)
        broken = remote(f"{fault}-always", status=1)
        assert_one_sentence(broken.output, "broke off after step ")
        assert broken.output.count("warning: rank 0 opens its files again") == 1
        (step,) = re.findall(r"broke off after step (\d+)", broken.output)
        assert broken.checkpoints == [f"step-{int(step):08d}"]
        assert 0 < int(step) < 22
        faults = ()
        resumed = remote(f"{fault}-always")
        losses = {r["step"]: r["loss"] for r in resumed.records}
        assert losses == {r["step"]: r["loss"] for r in local.records}


# From its third step on, rank 1 cannot read. Each save prints a line.
BREAK = """
import os, torch, torch.distributed.checkpoint

if os.environ["RANK"] == "1":
    import datasets.iterable_dataset

    def examples(self):
        for example in original_examples(self):
            if len(steps) >= 3:
                raise OSError("the disk is gone")
            yield example

    original_examples = datasets.iterable_dataset.IterableDataset.__iter__
    datasets.iterable_dataset.IterableDataset.__iter__ = examples
    step = torch.optim.AdamW.step
    torch.optim.AdamW.step = lambda *a, **o: (steps.append(None), step(*a, **o))[1]

steps = []
save = torch.distributed.checkpoint.save
torch.distributed.checkpoint.save = lambda *a, **o: (print("saved", flush=True), save(*a, **o))
"""


@pytest.mark.rest
def test_one_rank_of_two_breaks(stream):
    """All ranks save their places, once, and the next run reads what an undisturbed run reads."""
    flags = ["--max-steps", 30, "--eval-freq", 0, "--shuffle-window", 4, "-b", 4]
    origin = stream(*flags, name="origin")
    broken = stream(*flags, name="broken", before=HASTY + BREAK, status=1)
    first, second = (rank.output for rank in broken.run.ranks)
    assert_one_sentence(first, "rank 1 cannot read on (OSError('the disk is gone'))")
    assert "opens its files again" not in first
    assert second.count("warning: rank 1 opens its files again") == 1
    (step,) = map(int, re.findall(r"broke off after step (\d+)", first))
    assert 2 < step < 30
    assert first.count("saved") == 1
    assert broken.checkpoints == [f"step-{step:08d}"]
    resumed = stream(*flags, name="broken")
    assert resumed.column("loss") == origin.column("loss")
    for rank in range(2):
        assert torch.equal(resumed.seen[rank], origin.seen[rank][step:])


@pytest.mark.rest
def test_passes_without_a_step(stream, texts, tmp_path):
    """Two of four files are tiny. A pass that gives both to one rank has no step; others train."""
    for number, count in enumerate((40, 40, 1, 1)):
        jsonl(tmp_path / f"{number}.jsonl", texts[number * 40 :][:count])
    flags = ["-d", f"{tmp_path}/?.jsonl", "--packing", "trunc", "--max-steps", 60, "-b", 8]
    run = stream(*flags, "--eval-freq", 0)
    ends = [int(n) for n in re.findall(r"Pass (\d+) is over", run.output)]
    assert ends == [*range(1, len(ends) + 1)]
    trained = set(run.column("epoch"))
    assert len(trained) > 2
    assert set(range(max(trained))) - trained  # passes without a step
