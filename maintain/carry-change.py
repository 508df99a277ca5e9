"""Carries uncommitted changes of chapters into the chapters that continue them.

    python maintain/carry-change.py               # every changed chapter
    python maintain/carry-change.py 03-fsdp       # this one, and the chapters that continue it

The tool makes a three-way merge for each step of the tree: what has changed in a chapter since the
last commit, or since the tool ran last, changes in the next chapter, too. Where both chapters have
other lines, the next chapter gets conflict marks, and the chapters after it wait. Edit these lines
and run the tool again: it goes on there. When no chapter waits, it writes the diffs and tables.
"""

import argparse
import difflib
import importlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
CONFLICT = re.compile(
    r"^<<<<<<< [^\n]*\n(?P<ours>.*?)^\|\|\|\|\|\|\| [^\n]*\n(?P<base>.*?)"
    r"^=======\n(?P<theirs>.*?)^>>>>>>> [^\n]*\n",
    re.MULTILINE | re.DOTALL,
)

# An import statement takes no file name with a hyphen.
tables = importlib.import_module("write-tables")


def git(*arguments: str | Path) -> str | None:
    """What the command prints, or None if it fails."""
    command = ["git", "-C", REPOSITORY, *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stdout if result.returncode == 0 else None


def committed(script: Path) -> str | None:
    """None for a chapter without a commit."""
    return git("show", f"HEAD:./{script.relative_to(REPOSITORY)}")


def conflicts(text: str) -> list[int]:
    """The numbers of their first lines."""
    lines = enumerate(text.splitlines(), 1)
    return [number for number, line in lines if line.startswith("<<<<<<< ")]


class Carried:
    """The versions that chapters had when this tool carried them last, kept in the git folder.

    A second run thus carries only what is new, and does not repeat conflicts that somebody has
    edited. A commit ends the memory.
    """

    def __init__(self) -> None:
        head = git("rev-parse", "HEAD")
        if head is None:
            sys.exit("error: git has no commit here to compare with")
        memory = REPOSITORY / git("rev-parse", "--git-path", "carried").strip()
        self.folder = memory / head.strip()

    def version(self, script: Path, after: Path) -> str | None:
        """The version of `script` that `after` has."""
        memory = self.folder / after.parent.name
        is_changed = committed(after) != after.read_text()
        had_conflict = memory.with_suffix(".conflict").exists()  # and keeps its own lines
        has_it = memory.exists() and (is_changed or had_conflict)
        return memory.read_text() if has_it else committed(script)

    def save(self, text: str, after: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        memory = self.folder / after.parent.name
        memory.write_text(text)
        if conflicts(after.read_text()):
            memory.with_suffix(".conflict").touch()


def merge(before: Path, base: str, after: Path) -> str:
    """`after` with the changes that `before` has since `base`; conflicts have marks."""
    names = (after.parent.name, f"{before.parent.name} until now", before.parent.name)
    return merge_texts(after.read_text(), base, before.read_text(), names)


def merge_texts(ours: str, base: str, theirs: str, names: tuple[str, str, str]) -> str:
    """The base with the changes of both sides; conflicts have marks with these names."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("ours", "base", "theirs")]
        for file, text in zip(files, (ours, base, theirs), strict=True):
            file.write_text(text)
        labels = [part for name in names for part in ("-L", name)]
        command = ["git", "merge-file", "-p", "--diff3", *labels, *files]
        result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode > 127:  # below, it is the number of conflicts
        sys.exit(f"error: git merge-file: {result.stderr.strip()}")
    return CONFLICT.sub(merge_lines, result.stdout)


def edits(old: list[str], new: list[str]) -> list[tuple[int, int, list[str]]]:
    """Begin and end of each changed stretch of the old lines, and the new lines in its place."""
    opcodes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return [(a, b, new[c:d]) for kind, a, b, c, d in opcodes if kind != "equal"]


def overlap(one: tuple, other: tuple) -> bool:
    """Whether two changed stretches have a common line, or begin and end at the same one."""
    begin, end = max(one[0], other[0]), min(one[1], other[1])
    inside = begin == end and (one[0] < begin < one[1] or other[0] < begin < other[1])
    return begin < end or inside or one[:2] == other[:2]


def merge_lines(conflict: re.Match) -> str:
    """The lines of a conflict, merged if no line has changed on both sides.

    Git finds a conflict if changed lines touch each other. Here they may: a chapter often has a
    comment of its own above a line of the chapter before.
    """
    ours, base, theirs = (conflict[name].splitlines(True) for name in ("ours", "base", "theirs"))
    of_ours, of_theirs = edits(base, ours), edits(base, theirs)
    of_theirs = [edit for edit in of_theirs if edit not in of_ours]
    if any(overlap(one, other) for one in of_ours for other in of_theirs):
        return conflict[0]
    merged, position = [], 0
    for begin, end, lines in sorted(of_ours + of_theirs):
        merged += base[position:begin] + lines
        position = end
    return "".join(merged + base[position:])


def carry(first: str | None) -> bool:
    """Whether all changes came down without a conflict. `first`: the chapter to begin with."""
    carried = Carried()
    chosen, waits_for = {first}, {}
    for name, parent in tables.CONTINUES.items():
        before, after = tables.SCRIPTS[parent], tables.SCRIPTS[name]
        if first and parent not in chosen:
            continue
        chosen.add(name)
        if before in waits_for:
            waits_for[after] = waits_for[before]
            print(f"{name}: waits for {waits_for[after].parent.name}")
            continue
        text, old = before.read_text(), after.read_text()
        base = carried.version(before, after)
        if base not in (None, text) and not conflicts(old):
            after.write_text(merge(before, base, after))
            carried.save(text, after)
        new = after.read_text()
        if lines := conflicts(new):
            waits_for[after] = after
            places = ", ".join(map(str, lines))
            print(
                f"{name}: conflict{'s' * (len(lines) > 1)} at line{'s' * (len(lines) > 1)} {places}"
            )
        elif new != old:
            print(f"{name}: changed")
    if not waits_for:
        tables.write()
    return not waits_for


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("chapter", nargs="?", choices=tables.SCRIPTS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(0 if carry(parse_args().chapter) else 1)
