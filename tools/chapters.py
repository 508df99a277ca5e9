"""Reads the chapters. A folder with a `chapter.toml` is a chapter, and this file has its facts:

for        what a reader uses it for
continues  the chapter whose script it changes. Chapters 1 and 9 continue none
changed    the most lines of code that it may change there: maintain/write-tables.py lowers this
           limit, and only a person raises it
losses     how those of its demo differ from chapter 1's. Without this line, they are the same
needs      the packages that no other chapter needs

Everything else is in the script and in the README of the folder, or in its number and its name.
"""

import re
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
FILES = [*REPOSITORY.glob("*/chapter.toml"), *REPOSITORY.glob("more/*/chapter.toml")]
FOLDERS = dict(sorted((file.parent.name, file.parent) for file in FILES))
SCRIPTS = {name: folder / "train-llm.py" for name, folder in FOLDERS.items()}
FACTS = {
    name: tomllib.loads((f / "chapter.toml").read_text("utf-8")) for name, f in FOLDERS.items()
}
CONTINUES = {name: facts["continues"] for name, facts in FACTS.items() if "continues" in facts}


def script_of(number: int) -> Path:
    return next(script for name, script in SCRIPTS.items() if int(name[:2]) == number)


def short_scripts() -> dict[str, str | None]:
    """Of learn/in-short/, by the diffs on their page: each one, and the one that it continues."""
    page = (REPOSITORY / "learn" / "in-short" / "README.md").read_text("utf-8")
    diffs = re.findall(r"^--- (\w+)\.py\n\+\+\+ (\w+)\.py$", page, re.MULTILINE)
    return {"single": None} | {after: before for before, after in diffs}
