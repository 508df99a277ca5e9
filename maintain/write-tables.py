"""Writes the files and tables that follow from the folders of the chapters.

    python maintain/write-tables.py

- `changes.diff` of each chapter: what it changes in the one that it continues;
- `changed` in its `chapter.toml`, the limit of these lines of code, where they have become fewer;
- the table of a page, between `<!-- written by ... -->` and `<!-- end -->`;
- on the first page, `[78 changed lines](02-ddp/changes.diff)`;
- the diffs of the short scripts, on their page and on the first page.

A test fails where one of these files says something else.
"""

import ast
import difflib
import io
import re
import sys
import tokenize
from collections.abc import Iterable
from functools import lru_cache
from itertools import islice
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.append(str(REPOSITORY / "tools"))
from chapters import CONTINUES, FACTS, SCRIPTS  # noqa: E402

# -- Diffs -----------------------------------------------------------------------------------------


def unified_diff(before: Path, after: Path) -> str:
    """As `diff -u` has it: three unchanged lines around every change."""
    names = (str(path.relative_to(REPOSITORY)) for path in (before, after))
    texts = (path.read_text().splitlines(keepends=True) for path in (before, after))
    return "".join(difflib.unified_diff(*texts, *names))


def with_diffs(page: str) -> str:
    """A page with new diffs of short scripts, without imports and without lines of comments."""

    def code(name: str) -> list[str]:
        text = (REPOSITORY / "learn" / "in-short" / f"{name}.py").read_text()
        lines = text[text.index("\nSTEPS = ") :].splitlines(keepends=True)
        return [line for line in lines if not line.lstrip().startswith("#")]

    def new_block(match: re.Match) -> str:
        before, after = match[1], match[2]
        lines = difflib.unified_diff(code(before), code(after), f"{before}.py", f"{after}.py", n=1)
        lines = [re.sub("@@ .*", "@@", line) for line in lines]
        return f"```diff\n{''.join(lines)}```"

    return re.sub(r"```diff\n--- (\w+)\.py\n\+\+\+ (\w+)\.py\n.*?```", new_block, page, flags=re.S)


# -- Changed lines of code -------------------------------------------------------------------------


def docstring_lines(text: str) -> set[int]:
    """Their numbers, from 1."""
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Module)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    strings = [node.body[0] for node in nodes if ast.get_docstring(node) is not None]
    return {n for s in strings for n in range(s.lineno, s.end_lineno + 1)}


@lru_cache
def code_lines(text: str) -> set[int]:
    """Numbers, from 1, of all lines but comments, docstrings and blank lines."""
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    found = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent | {tokenize.ENDMARKER}:
            found |= set(range(token.start[0], token.end[0] + 1))
    return found - docstring_lines(text)


@lru_cache
def changes(before: str, after: str) -> list[tuple[range, range]]:
    """The line numbers, from 1, of each changed stretch in both texts."""
    lines = (text.splitlines() for text in (before, after))
    matcher = difflib.SequenceMatcher(None, *lines, autojunk=False)
    opcodes = [opcode for opcode in matcher.get_opcodes() if opcode[0] != "equal"]
    return [(range(a + 1, b + 1), range(c + 1, d + 1)) for _, a, b, c, d in opcodes]


def changed_code_lines(name: str) -> int:
    """A line that takes the place of another counts once."""
    before, after = SCRIPTS[CONTINUES[name]].read_text(), SCRIPTS[name].read_text()
    a, b = code_lines(before), code_lines(after)
    hunks = changes(before, after)
    return sum(max(sum(i in a for i in x), sum(i in b for i in y)) for x, y in hunks)


# -- Pages -----------------------------------------------------------------------------------------


def table(header: str, rows: list[list[str]]) -> str:
    lines = [f"| {header} |", "|---" * (header.count("|") + 1) + "|"]
    lines += ["|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in rows]
    return "\n".join(lines)


def number(name: str) -> str:
    return str(int(name[:2]))


def table_of_chapters(names: Iterable[str], top: str = "") -> str:
    """`top` leads from the page to the top folder."""
    rows = []
    for name in names:
        folder = f"{top}{SCRIPTS[name].parent.relative_to(REPOSITORY)}"
        row = [f"[`{name}`]({folder}/README.md)", FACTS[name]["for"], "", ""]
        if name in CONTINUES:
            diff = f"[{changed_code_lines(name)}]({folder}/changes.diff)"
            row[2:] = [number(CONTINUES[name]), diff]
        rows.append(row)
    return table("chapter | for | builds on | changed lines", rows)


def table_of_losses() -> str:
    """Chapters whose `losses` have the same words before the colon share a row."""
    rows = {}
    for name in CONTINUES:
        kind, colon, reason = FACTS[name].get("losses", "as in chapter 1").partition(": ")
        chapters, reasons = rows.setdefault(kind + colon, ([], []))
        chapters.append(number(name))
        if reason not in reasons:
            reasons.append(reason)
    cells = [[", ".join(some), kind + ", ".join(why)] for kind, (some, why) in rows.items()]
    return table("chapters | losses", cells)


TABLES = {
    "README.md": lambda: table_of_chapters(islice(SCRIPTS, 3)),
    "docs/chapters.md": lambda: table_of_chapters(SCRIPTS, top="../"),
    "docs/demos.md": table_of_losses,
}


def with_table(page: str, table: str) -> str:
    pattern = r"(<!-- written by maintain/write-tables.py.*? -->\n\n).*?(\n\n<!-- end -->)"
    text, count = re.subn(pattern, lambda match: match[1] + table + match[2], page, flags=re.DOTALL)
    if count != 1:
        sys.exit("error: a page has not one place for its table")
    return text


def with_counts(page: str) -> str:
    """The first page with the numbers in its text: [78 changed lines](02-ddp/changes.diff)."""

    def new_count(match: re.Match) -> str:
        return f"[{changed_code_lines(match[2])} {match[1]}]({match[2]}/changes.diff)"

    return re.sub(r"\[\d+ (changed lines|more)\]\((\S+?)/changes\.diff\)", new_count, page)


# -- Files -----------------------------------------------------------------------------------------


def texts() -> dict[Path, str]:
    """What each file should say."""
    found = {}
    for name in (*TABLES, "learn/in-short/README.md"):
        page = REPOSITORY / name
        if page.exists():  # a test has chapters without pages
            text = with_counts(with_diffs(page.read_text()))
            found[page] = with_table(text, TABLES[name]()) if name in TABLES else text
    for name, before in CONTINUES.items():
        script, facts = SCRIPTS[name], SCRIPTS[name].with_name("chapter.toml")
        found[script.with_name("changes.diff")] = unified_diff(SCRIPTS[before], script)
        limit = f"changed = {min(FACTS[name]['changed'], changed_code_lines(name))}"
        found[facts] = re.sub(r"^changed = \d+$", limit, facts.read_text(), flags=re.MULTILINE)
    return found


def write() -> list[Path]:
    """The files that it has changed."""
    wanted = texts()
    old = [file for file in wanted if not file.exists() or file.read_text() != wanted[file]]
    for file in old:
        file.write_text(wanted[file])
    return old


if __name__ == "__main__":
    for file in write():
        print(f"wrote {file.relative_to(REPOSITORY)}")
