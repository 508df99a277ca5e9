"""Writes what each chapter changes in the one that it continues to its `changes.diff`.

    python tools/diff-chapters.py

The tests compare these files with the chapters, so that no change goes unseen.
"""

import difflib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]

# The tree of chapters: each one, and the one that it continues. Chapters 1 and 9 continue none.
CONTINUES = {
    "02-ddp": "01-single-gpu",
    "03-fsdp": "02-ddp",
    "04-streaming": "03-fsdp",
    "05-multi-node": "03-fsdp",
    "06-tensor-parallel": "03-fsdp",
    "07-pipeline-parallel": "03-fsdp",
    "08-gradient-compression": "02-ddp",
    "10-mds-shards": "05-multi-node",
    "11-context-parallel": "03-fsdp",
    "12-expert-parallel": "03-fsdp",
    "13-3d-parallel": "07-pipeline-parallel",
    "14-sparse-low-rank": "01-single-gpu",
}


def chapters() -> list[Path]:
    """The scripts in the order of their numbers."""
    return sorted(REPOSITORY.glob("[0-9][0-9]-*/train-llm.py"))


def pairs() -> list[tuple[Path, Path]]:
    """Each script that continues another, behind the one that it continues."""
    scripts = {path.parent.name: path for path in chapters()}
    return [
        (scripts[CONTINUES[name]], script)
        for name, script in scripts.items()
        if CONTINUES.get(name) in scripts
    ]


def unified_diff(before: Path, after: Path) -> str:
    """As `diff -u` has it: three unchanged lines around every change."""
    names = (str(path.relative_to(REPOSITORY)) for path in (before, after))
    texts = (path.read_text().splitlines(keepends=True) for path in (before, after))
    return "".join(difflib.unified_diff(*texts, *names))


if __name__ == "__main__":
    for before, after in pairs():
        file = after.with_name("changes.diff")
        file.write_text(unified_diff(before, after))
        print(f"wrote {file.relative_to(REPOSITORY)}")
