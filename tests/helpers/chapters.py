"""Chapters with other lines, and the steps from one chapter to the next."""

import ast
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import pytest
from helpers.runner import CHAPTER_1, REPOSITORY, load


def replaced(text: str, changes: dict) -> str:
    """The text with other pieces. Each of the old ones is there once."""
    for piece, instead in changes.items():
        assert text.count(piece) == 1, piece
        text = text.replace(piece, instead)
    return text


def damaged(chapter: Path, folder: Path, damages: dict) -> Path:
    """A copy of a chapter with other lines."""
    script = folder / chapter.parent.name / chapter.name
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(replaced(chapter.read_text(), damages))
    return script


ADAMW = "torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, args.adam_beta2), fused=True)"
INSTEAD = "torch_muon.AdamWAndMuon(model, args.lr, args.adam_beta2, args.weight_decay)"
IMPORTS = "\nimport torch\nfrom helpers import torch_muon\n"


def with_torch_muon(folder, chapter=CHAPTER_1):
    """A copy of a chapter with torch.optim.Muon and AdamW, in one process."""
    changes = {ADAMW: INSTEAD, "\nimport torch\n": IMPORTS}
    return damaged(chapter, folder / "with-torch-muon", changes)


TABLES = load(REPOSITORY / "maintain" / "write-tables.py")
CONTINUES, SCRIPTS = TABLES.CONTINUES, TABLES.SCRIPTS
CHAPTERS = [*SCRIPTS]
changes, code_lines = TABLES.changes, TABLES.code_lines
MARK = re.compile(r"# ([A-Z]{2,}|[1-9]D)(?: (\d+))?: ")  # the marker, the number of an idea


@dataclass
class Step:
    """From one chapter to one that continues it."""

    before: str
    after: str
    old: str
    new: str

    @cached_property
    def lines(self) -> list[str]:
        """Of the new chapter. The first has the number 1."""
        return ["", *self.new.splitlines()]

    @cached_property
    def own(self) -> set[str]:
        """Markers that the chapter before does not have."""
        return markers(self.new) - markers(self.old)

    @cached_property
    def borrowed(self) -> dict[str, str]:
        """Markers of another lesson, and the chapter with this lesson: 13 has some of chapter 6."""
        earlier = CHAPTERS[: CHAPTERS.index(self.after)]
        homes = {marker: name for name in reversed(earlier) for marker in markers(read(name))}
        return {marker: homes[marker] for marker in self.own & homes.keys()}

    @cached_property
    def marker(self) -> str:
        """What the chapter adds, whatever else is wrong with it."""
        found = [match[1] for match in MARK.finditer(self.new)]
        return max(self.own - self.borrowed.keys(), key=found.count, default="")

    @cached_property
    def ideas(self) -> list[tuple[int, str]]:
        """The line and the number of each numbered marker of this chapter."""
        found = [(number, MARK.search(line)) for number, line in enumerate(self.lines)]
        return [(n, mark[2]) for n, mark in found if mark and mark[1] == self.marker and mark[2]]


@lru_cache
def read(name: str) -> str:
    text = SCRIPTS[name].read_text()
    if problem := syntax_error(text):
        pytest.fail(f"{name}/train-llm.py:{problem}", pytrace=False)
    return text


def syntax_error(text: str) -> str | None:
    try:
        ast.parse(text)
    except SyntaxError as error:
        return f"{error.lineno}: Python cannot read this line: {error.msg}"
    return None


def step_to(name: str) -> Step:
    return Step(CONTINUES[name], name, read(CONTINUES[name]), read(name))


def markers(text: str) -> set[str]:
    return {match[1] for match in MARK.finditer(text)}
