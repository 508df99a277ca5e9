"""A row of the matrix: a chapter trains two steps, and repeats the second one from a checkpoint.

What it is compared with is its reference: by default, chapter 1 on one process, at the same global
batch. Chapters that read other samples are compared with a plain loop over these.
"""

import math
import re
import shutil
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from helpers.assertions import final_tensors
from helpers.chapters import damaged, with_torch_muon
from helpers.data import IMPORTABLE, write_documents
from helpers.models import TINY_LLAMA, write_weights
from helpers.plain_loops import (
    SIZE,
    flags_for,
    plain_loop,
    plain_loop_over_rows,
    with_adapters,
)
from helpers.runner import CHAPTERS_BY_NUMBER, load, patches, run_tool
from helpers.trainings import PARTS, Case, described, run_cases
from transformers import AutoTokenizer

TP, PP, CP, EP = (f"--{x}-parallel" for x in ("tensor", "pipeline", "context", "expert"))
SCRATCH = "--from-scratch"
OWN_GROUPS = {"06": TP, "07": PP, "11": CP}  # by default, all ranks are one group
ORDER = ("step", "epoch", "learning_rate")


@dataclass
class Found:
    """What a training has found, or has to find."""

    loss: list[float]
    norm: list[float]
    held_out: list[float]
    gradients: list[dict]  # of each step, by the names of parameters
    weights: dict  # in the end, by their names in `final/`
    order: dict = field(default_factory=dict)  # epochs and learning rates, but of a plain loop


def found_by(case: Case) -> Found:
    columns = (case.column(name) for name in ("loss", "grad_norm", "eval/loss"))
    gradients = [case.gradients(step) for step in (1, 2)]
    order = {name: case.column(name) for name in ORDER}
    return Found(*columns, gradients, final_tensors(case), order)


class Chapter1:
    """The reference of a row, and the model and samples of both."""

    samples = 24  # of a step, for 1, 2, 3, 4 and 8 ranks
    rate = 1e-4  # the learning rate of the first step
    script, start, before = "01", ["--no-from-scratch"], ""
    reads_base_again = False  # in a resume

    def __init__(self, row: "Row", folder, fixture):
        self.row, self.folder, self.fixture = row, folder, fixture
        self.model = folder / row.model
        if not self.model.exists():
            write_weights(self.model, row.model)
        self.flags = ["-m", self.model, *self.data(), *self.start, "--lr", self.rate]

    def data(self) -> list:
        return ["-d", self.fixture("dataset"), "-s", 32]

    @property
    def name(self) -> str:
        """Rows with equal names have the same reference."""
        start = "random" if SCRATCH in self.row.flags else "pretrained"
        return f"one rank, {self.row.model}, {start}, {self.batch}"

    @property
    def batch(self) -> int:
        return self.row.batch if self.row.same_batch else self.samples

    def case(self) -> dict | None:
        """Its training, if it is one of a chapter."""
        flags = [*self.flags, "-b", self.batch]
        flags += ["--gradient-accumulation-steps", self.samples // self.batch]
        flags += [SCRATCH] if SCRATCH in self.row.flags else []
        return described(self.folder, self.name, self.script, flags)

    def expected(self, run: Case) -> Found:
        return found_by(Case(self.folder / self.name))


class WithTorchMuon(Chapter1):
    def case(self) -> dict:
        self.script = with_torch_muon(self.folder)
        return super().case()


class Itself(Chapter1):
    """Chapter 14 on one rank, whose gradients have tests of their own."""

    script, start = "14", PARTS


class PlainLoop(Chapter1):
    rate = 1e-3

    def case(self) -> None:
        return None


class SameRows(PlainLoop):
    """A plain loop over the rows that the ranks have read of a stream. Each is another one."""

    before = patches("seen_rows", "no_floats")

    def data(self) -> list:
        """Two files to train on, and a held-out one. Their documents are short, so all fit."""
        documents = [f"{n} {text[:40]}" for n, text in enumerate(self.fixture("texts"))]
        for number in range(2):
            some = documents[number * 100 : number * 100 + 100]
            write_documents(self.folder / f"{number}.jsonl", some)
        held_out = write_documents(self.folder / "held-out.jsonl", documents[300:320])
        self.held_out = documents[300:310]
        flags = ["-d", f"{self.folder}/?.jsonl", "-s", 32, "--shuffle-window", 16]
        return [*flags, "--eval-dataset", held_out, "--eval-documents", 10]

    def expected(self, run: Case) -> Found:
        seen = [
            torch.load(file).view(2, -1, 32)
            for file in sorted(self.folder.glob(f"{run.folder.name} seen*"))
        ]
        rows = [tuple(row) for of_rank in seen for row in of_rank.flatten(0, 1).tolist()]
        assert len({*rows}) == len(rows) == 2 * self.samples
        steps = [torch.cat(parts) for parts in zip(*seen, strict=True)]
        padding = [(labels < 0).float().mean().item() for labels in steps]
        assert (max(padding) > 0.1) == ("overflow" in self.row.flags)
        torch.testing.assert_close(run.column("padding"), padding, rtol=0, atol=1e-6)
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        parts = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in self.held_out]
        ids = [token for part in parts for token in part]
        samples = torch.tensor(ids[: len(ids) // 32 * 32]).view(-1, 32)
        return Found(**vars(plain_loop_over_rows(self.model, steps, samples)))


class SameShards(SameRows):
    before = IMPORTABLE + SameRows.before

    def data(self) -> list:
        flags = super().data()
        rows = self.folder / "shards"
        command = [flags[1], "-o", rows, "--no-shuffle", "--mds", "-m", TINY_LLAMA, "-s", 32]
        command += ["--part-rows", 30]
        run_tool(self.folder, "prepare-data.py", *command, before=IMPORTABLE)
        return ["-d", rows, *flags[2:]]


class Conversations(PlainLoop):
    """A plain loop in which each conversation is alone."""

    samples = 12  # for 1 to 4 ranks
    before = patches("no_floats")

    def data(self) -> list:
        rows = self.fixture("rows_of_conversations")
        if self.row.data == "texts":
            self.rows = self.folder / "rows of text"
            command = [self.fixture("dataset"), "--rows", "-m", TINY_LLAMA, "-s", SIZE]
            run_tool(self.folder, "prepare-data.py", *command, "-o", self.rows)
        elif self.row.data == "packed":
            self.rows = rows()
        else:
            self.rows = rows("--no-packing")
        if self.row.data == "blank":
            self.rows = without_labels(self.rows, self.folder / "rows without labels")
        return flags_for(self.model, self.rows)[3:]

    def adapt(self, model):
        return model

    def expected(self, run: Case) -> Found:
        chapter = load(CHAPTERS_BY_NUMBER[self.row.chapter])
        return Found(**vars(plain_loop(chapter, self.model, self.rows, self.adapt)))


class Adapters(Conversations):
    """The same with PEFT."""

    reads_base_again = True

    def adapt(self, model):
        flags = self.row.flags
        targets = "--lora-targets"
        chosen = flags[flags.index(targets) + 1] if targets in flags else "all-linear"
        return with_adapters(model, chosen)


def without_labels(rows, folder):
    """A copy in which about every second row has no label, so some micro-batches have no answer."""
    shutil.copytree(rows, folder)
    for file in folder.glob("train-*"):
        found = pq.read_table(file).to_pylist()
        for row in found:
            if row["input_ids"][3] % 2:
                row |= {"labels": [-100] * SIZE, "answer_tokens": 0}
        pq.write_table(pa.Table.from_pylist(found), file)
    return folder


@dataclass(frozen=True)
class Row:
    chapter: str  # its number
    model: str  # of helpers.models.MODELS: its family, and in which way it is unusual
    batch: int  # samples of a rank at a time; the accumulation follows from them
    flags: list = field(default_factory=list)
    ranks: int = 2
    reference: type = Chapter1
    data: str = "packed"  # of conversations: also "alone", "blank", "texts"
    same_batch: bool = False  # of the reference: the second loss of a mixture is that of a batch
    quick: bool = False

    def __str__(self) -> str:
        name = CHAPTERS_BY_NUMBER[self.chapter].parent.name
        data = self.data if self.data != "packed" else ""
        parts = [name, self.model, data, f"{self.ranks} ranks", *map(str, self.flags)]
        return " ".join(part.removeprefix("--") for part in parts if part)

    @property
    def name(self) -> str:
        """Of its run."""
        return re.sub("[^a-z0-9,-]+", " ", f"{self}")

    @property
    def job(self) -> str:
        """The rows of a chapter on as many ranks are one job, but each quick row is its own."""
        name = CHAPTERS_BY_NUMBER[self.chapter].parent.name
        return name if self.quick else f"{name} {self.ranks} ranks"

    @property
    def accumulation(self) -> int:
        """Of a rank's micro-batches, or of those that go through a pipeline."""
        own = OWN_GROUPS.get(self.chapter)
        sizes = {own: self.ranks} if own else {}
        for name in (TP, PP, CP):
            if name in self.flags:
                sizes[name] = self.flags[self.flags.index(name) + 1]
        groups = self.ranks // math.prod(sizes.values())
        count = self.reference.samples // self.batch // groups
        assert count * self.batch * groups == self.reference.samples, self
        return count


@dataclass
class Trained:
    row: Row
    run: Case
    again: Case  # from the first checkpoint
    expected: Found
    output: str  # of rank 0


def train(rows: list[Row], folder, fixture) -> list[Trained]:
    """Trains rows of a chapter in one job. `fixture` gives a fixture by its name."""
    script = CHAPTERS_BY_NUMBER[rows[0].chapter]
    if rows[0].chapter == "19":  # several chunks
        script = damaged(script, folder, {"LOSS_CHUNK = 1024": "LOSS_CHUNK = 50"})
    references = [row.reference(row, folder, fixture) for row in rows]
    alone = {reference.name: reference for reference in references}
    alone = [case for reference in alone.values() if (case := reference.case())]
    if alone:
        run_cases(folder, "one rank", alone, 1)
    cases = []
    for row, reference in zip(rows, references, strict=True):
        flags = [*reference.flags, "-b", row.batch, *row.flags]
        flags += ["--gradient-accumulation-steps", row.accumulation]
        names = [row.name, f"{row.name}, again"]
        both = [described(folder, name, script, flags) for name in names]
        for case in both:
            case["env"]["SEEN"] = f"{folder}/{case['name']} seen "
        both[1]["continues"] = [f"{folder}/{name}/step-00000001" for name in names]
        if not reference.reads_base_again:
            both[1]["without"] = str(reference.model)
        cases += both
    before = references[0].before
    before += patches("files_on_disk", "slow_rank_1") if rows[0].quick else ""
    job = run_cases(folder, "job", cases, rows[0].ranks, before)
    trained = []
    for row, reference in zip(rows, references, strict=True):
        run, again = Case(folder / row.name), Case(folder / f"{row.name}, again")
        expected = reference.expected(run)
        trained.append(Trained(row, run, again, expected, job.ranks[0].output))
    return trained
