"""Writes what each chapter changes in the one before to its `changes.diff`.

    python tools/diff-chapters.py

The tests compare these files with the chapters, so that no change goes unseen.
"""

import difflib
import itertools
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def chapters() -> list[Path]:
    """The scripts in the order of their numbers."""
    return sorted(REPOSITORY.glob("[0-9][0-9]-*/train-llm.py"))


def unified_diff(before: Path, after: Path) -> str:
    """As `diff -u` has it: three unchanged lines around every change."""
    names = (str(path.relative_to(REPOSITORY)) for path in (before, after))
    texts = (path.read_text().splitlines(keepends=True) for path in (before, after))
    return "".join(difflib.unified_diff(*texts, *names))


if __name__ == "__main__":
    scripts = chapters()
    for before, after in itertools.pairwise(scripts):
        file = after.with_name("changes.diff")
        file.write_text(unified_diff(before, after))
        print(f"wrote {file.relative_to(REPOSITORY)}")
