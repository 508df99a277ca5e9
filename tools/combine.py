"""Joins chapters: writes one script with the techniques of two or more.

    python tools/combine.py 05 17 -o lora-nodes           # lora-nodes/train-llm.py, changes.diff
    python tools/combine.py 05 17 19 -o lora-long
    python tools/combine.py 03 17 --without 16 -o lora    # chapter 17 without conversations
    python tools/combine.py --table                       # all pairs: proved, or why not

A chapter is a difference to the chapter that it continues, so Git can merge two of them. Then this
tool joins what both only add: imports, functions, flags and checks. A pair may have a stored
resolution of the places that are left, in maintain/joins/. Text that joins may still train wrong,
so the tool says whether the pair is proved (docs/combining.md): it refuses pairs that are known to
be wrong, and warns of pairs that nobody has tried.
"""

import argparse
import ast
import difflib
import hashlib
import importlib
import io
import itertools
import re
import shutil
import subprocess
import sys
import textwrap
import tokenize
from dataclasses import dataclass, field
from pathlib import Path

from chapters import CONTINUES, REPOSITORY, SCRIPTS

sys.path.append(str(REPOSITORY / "maintain"))
carry = importlib.import_module("carry-change")

JOINS = REPOSITORY / "maintain" / "joins"
RECORD = REPOSITORY / "benchmarks" / "records" / "combining.md"
PAGE = REPOSITORY / "docs" / "combining.md"
REFUSED = ("wrong", "never")
# Parts of a script in which the order of additions does not matter: lines of one of these forms
UNORDERED = re.compile(r"MUST_STAY \+=|    add\(\"--|    \"\w+\": |    (if|parser\.error)")


# -- What is known about a pair --------------------------------------------------------------------


@dataclass
class Pair:
    """What a line of maintain/joins/pairs.txt says of a pair, or the row of a proved one."""

    name: str  # such as 05+17
    status: str  # proved, joins, open, wrong, never, not tried; in the file `like`
    text: str  # how it is compared, or the reason


def known_pairs() -> dict[str, Pair]:
    found = {}
    for line in (JOINS / "pairs.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            names, status, text = (part.strip() for part in line.split("|", 2))
            found |= {name: Pair(name, status, text) for name in names.split(", ")}
    return found


def proved_rows() -> dict[str, list[str]]:
    """The cells of the rows of the record, by the names of their pairs."""
    rows = re.findall(r"^\| (\d\d\+.*) \|$", RECORD.read_text(), re.MULTILINE)
    return {cells[0]: cells for cells in (row.split(" | ") for row in rows)}


def verdict(numbers: list[str], without: str | None = None) -> Pair:
    """What is known about these chapters together. One wrong pair makes all of them wrong."""
    known, proved = known_pairs(), proved_rows()
    name = name_of(numbers, without)
    pair = known.get(name, Pair(name, "not tried", "nobody has compared it with a chapter"))
    if pair.status == "like" and name in proved:
        _, like, ranks, *_, besides, _ = proved[name]
        runs = re.findall(r"\| (\d+)[^:|]*: ([^|=>]*)", pair.text)
        on_four = [flags.strip() for number, flags in runs if number == "4"]
        flags = (on_four or [runs[0][1].strip()])[0]
        text = f"like {like} on {ranks} ranks, {besides}"
        return Pair(name, "proved", text + (f" (`{flags}`)" if flags else ""))
    if pair.status == "like":
        return Pair(name, "joins", "it joins, and maintain/prove-joins.py has no row of it")
    if len(numbers) > 2 and name not in known:
        pairs = [verdict([*part]) for part in itertools.combinations(numbers, 2)]
        for part in pairs:
            if part.status in REFUSED:
                return Pair(name, part.status, f"{part.name}: {part.text}")
        if all(part.status == "proved" for part in pairs):
            pair.text = "each pair is proved, but not all of them together"
        for part in known.values():  # perhaps three of these chapters
            if part.status == "open" and {*part.name.split("+")} < {*numbers}:
                return Pair(name, "open", f"{part.name}: {part.text}")
    return pair


def all_pairs() -> list[Pair]:
    """What is known about all pairs, and about what else has a line."""
    names = [name for name in SCRIPTS if name[:2] not in ("01", "02", "03", "09")]
    pairs = [[a[:2], b[:2]] for a, b in itertools.combinations(names, 2) if a not in ancestors(b)]
    found = [verdict(numbers) for numbers in pairs]
    listed = {pair.name for pair in found}
    others = [name for name in known_pairs() if name not in listed]
    return found + [verdict(*parts_of(name)) for name in others]


def table() -> str:
    rows = [f"| {pair.name} | {pair.status} | {pair.text} |" for pair in all_pairs()]
    return "\n".join(["| chapters | | |", "|---|---|---|", *rows]) + "\n"


def lists() -> str:
    """The same for docs/combining.md: pairs with the same reason, or the same flags, together."""
    groups = {"proved": {}, "joins": {}, "wrong": {}, "never": {}, "open": {}}
    for pair in all_pairs():
        if pair.status not in groups:
            continue
        reason = pair.text
        if pair.status == "proved":
            reason = ", ".join(re.findall("`.*?`", pair.text)) or "no more flags"
        groups[pair.status].setdefault(reason, []).append(pair.name)
    text = "## All pairs\n"
    for status, group in groups.items():
        lines = [f"- {', '.join(names)}: {reason}" for reason, names in group.items()]
        if lines:
            options = {"subsequent_indent": "  ", "break_on_hyphens": False}
            wrapped = [textwrap.fill(line, 150, **options) for line in lines]
            text += f"\n**{status}**\n\n" + "\n".join(wrapped) + "\n"
    return text


def parts_of(name: str) -> tuple[list[str], str | None]:
    """The numbers of a name, and the number of the chapter that is left out."""
    chapters, _, without = name.partition("-")
    return chapters.split("+"), without or None


def write_page() -> None:
    """Puts the lists at the end of docs/combining.md."""
    text = PAGE.read_text()
    PAGE.write_text(text[: text.index("## All pairs")] + lists())


def name_of(numbers: list[str], without: str | None = None) -> str:
    """05+17, or 03+17-16 without chapter 16."""
    return "+".join(numbers) + (f"-{without}" if without else "")


# -- Joining texts ---------------------------------------------------------------------------------


def ancestors(name: str) -> list[str]:
    """The chapter, the one that it continues, and so on."""
    found = [name]
    while found[-1] in CONTINUES:
        found.append(CONTINUES[found[-1]])
    return found


def body(name: str) -> str:
    """A chapter without its docstring."""
    text = SCRIPTS[name].read_text()
    end = ast.parse(text).body[0].end_lineno
    return "".join(text.splitlines(keepends=True)[end:])


def joined(names: list[str], without: str | None = None) -> tuple[str, str]:
    """The text of these chapters, with marks where they conflict, and their common chapter."""
    # A chapter that leaves out a part of itself comes last, because it only adds its changes.
    first, *others = sorted(names, key=lambda name: without in ancestors(name))
    text, inside, label = body(first), {*ancestors(first)}, first[:2]
    resolutions = stored_resolutions(names, without)
    common = first
    for name in others:
        line = ancestors(name)
        base = next(chapter for chapter in line if chapter in {*inside, without})
        if base not in line or base == name:
            sys.exit(f"error: {name} has no changes to {base} that could be joined")
        sides = (f"chapter {label}", f"both continue {base}", f"chapter {name[:2]}")
        text = carry.merge_texts(text, body(base), body(name), sides)
        text = carry.CONFLICT.sub(lambda place: join_additions(place, resolutions), text)
        inside |= {*line}
        label += f"+{name[:2]}"
        common = next(chapter for chapter in ancestors(common) if chapter in line)
    for resolution in resolutions:
        text = resolution.edit(text)
    return text, common


def hash_of(names: list[str], without: str | None) -> str:
    """Of the joined code without comments. A row of the record has that of the code it compared."""
    text = without_comments(joined(names, without)[0])
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def without_comments(text: str) -> str:
    """The lines of code, without comments and blank lines."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            lines[line - 1] = lines[line - 1][:column]
    return "\n".join(line.rstrip() for line in lines if line.strip())


def join_additions(conflict: re.Match, resolutions: list["Resolution"]) -> str:
    """The lines of a conflict with the additions of both sides, or by a stored resolution."""
    ours, base, theirs = (conflict[side].splitlines(True) for side in ("ours", "base", "theirs"))
    for resolution in resolutions:
        if resolution.fits(ours, theirs):
            return resolution.lines(ours, theirs)
    if all(is_import(line) for line in ours + base + theirs):
        return join_imports(ours, base, theirs)
    if all(line.lstrip().startswith("#") for line in ours + base + theirs):
        return "".join(ours + theirs)  # both say what they need of the line below
    # Both sides may put the same lines around their additions.
    head = common_length(ours, theirs)
    tail = common_length(ours[head:][::-1], theirs[head:][::-1])
    of_ours, of_theirs = (side[head : len(side) - tail] for side in (ours, theirs))
    are_additions = not base or (head and tail and not {*base} & {*ours, *theirs})
    if are_additions and all(may_come_in_any_order(side) for side in (of_ours, of_theirs)):
        return "".join([*ours[:head], *of_ours, *of_theirs, *theirs[len(theirs) - tail :]])
    return conflict[0]


def common_length(one: list[str], other: list[str]) -> int:
    pairs = zip(one, other, strict=False)
    return len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])


def may_come_in_any_order(lines: list[str]) -> bool:
    """Functions, classes and constants; flags, checks of flags, and entries of lists."""
    code = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not code:
        return not "".join(lines).strip()
    starts_outside = not code[0].startswith(" ")
    return starts_outside or any(UNORDERED.match(line) for line in code)


def is_import(line: str) -> bool:
    return re.match(r"(from \S+ )?import [^(]*$", line) is not None


def join_imports(ours: list[str], base: list[str], theirs: list[str]) -> str:
    """The imports of both sides, without those that one side has removed."""
    names_by_side = [imported_names(lines) for lines in (ours, base, theirs)]
    of_ours, of_base, of_theirs = names_by_side
    kept = (of_ours | of_theirs) - (of_base - of_ours) - (of_base - of_theirs)
    names_by_module = {}
    for module, name in sorted(kept, key=import_order):
        names_by_module.setdefault(module, []).append(name)
    lines = []
    for module, names in names_by_module.items():
        lines.append(f"from {module} import {', '.join(names)}\n" if module else "")
        lines += [f"import {name}\n" for name in names if not module]
    return "".join(lines)


def imported_names(lines: list[str]) -> set[tuple[str, str]]:
    """Module and name; the module is empty in `import name`."""
    found = set()
    for line in lines:
        match = re.match(r"(?:from (\S+) )?import (.*)", line)
        found |= {(match[1] or "", name.strip()) for name in match[2].split(",")}
    return found


def import_order(imported: tuple[str, str]) -> tuple:
    """As Ruff sorts: constants, classes, and then other names of a module."""
    module, name = imported
    kind = 0 if name.isupper() else 1 if name[0].isupper() else 2
    return (module, kind, name)


# -- Stored resolutions ----------------------------------------------------------------------------


@dataclass
class Resolution:
    """What takes the place of a conflict, or of lines that mean something else now.

    In the file of a pair, `=` has a line of a side that stays, `-` of a side that goes, and `+` a
    line in the place of both. `~` has lines outside of conflicts. The line above says why.
    """

    why: str
    known_by: list[tuple[str, str]] = field(default_factory=list)  # the sign, and the line
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)

    def edit(self, text: str) -> str:
        """Replaces the old lines."""
        old, new = ("".join(f"{line}\n" for line in lines) for lines in (self.old, self.new))
        if old and text.count(old) != 1:
            reason = "not one place has these lines, which another resolution may have changed"
            sys.exit(f"error: maintain/joins/: {reason}:\n{old}")
        return text.replace(old, new) if old else text

    def fits(self, ours: list[str], theirs: list[str]) -> bool:
        if not self.known_by:
            return False
        one, other = (line for _, line in self.known_by)
        return (has(ours, one) and has(theirs, other)) or (has(theirs, one) and has(ours, other))

    def lines(self, ours: list[str], theirs: list[str]) -> str:
        if self.new:
            return "".join(f"{line}\n" for line in self.new)
        stay = [line for sign, line in self.known_by if sign == "="]
        sides = [ours if has(ours, line) else theirs for line in stay]
        return "".join(line for side in sides for line in side)


def has(side: list[str], line: str) -> bool:
    """An empty line stands for a side without lines."""
    return line.strip() in [each.strip() for each in side] if line else not side


def stored_resolutions(names: list[str], without: str | None) -> list[Resolution]:
    """Those of the pairs of these chapters, and of three or more of them."""
    numbers = [name[:2] for name in names]
    sizes = range(2, len(numbers) + 1)
    groups = [group for size in sizes for group in itertools.combinations(numbers, size)]
    files = {JOINS / f"{name_of(list(group), without and without[:2])}.txt" for group in groups}
    return [place for file in sorted(files) if file.exists() for place in read_resolutions(file)]


def read_resolutions(file: Path) -> list[Resolution]:
    found = []
    for line in file.read_text().splitlines():
        sign, rest = line[:2], line[2:]
        if sign in ("= ", "- ", "-"):
            found[-1].known_by.append((sign[0], rest))
        elif sign in ("~ ", "~"):
            found[-1].old.append(rest)
        elif sign in ("+ ", "+"):
            found[-1].new.append(rest)
        elif line:
            found.append(Resolution(line))
    return found


# -- The script ------------------------------------------------------------------------------------


def script_of(names: list[str], folder: Path, without: str | None = None) -> tuple[str, str]:
    """The joined script for a folder, and the chapter that all of its chapters continue."""
    text, common = joined(names, without)
    # Both sides may have added the same import, in different places.
    lines = text.splitlines(keepends=True)
    repeated = [n for n, line in enumerate(lines) if is_import(line) and line in lines[:n]]
    text = "".join(line for n, line in enumerate(lines) if n not in repeated)
    # The run of a demo has the name of the folder, of which chapters leave out their number.
    text = text.replace(".resolve().parent.name[3:]", ".resolve().parent.name")
    text = text.replace('  # without "01-"', "", 1)
    if REPOSITORY not in folder.parents:  # a script finds its models in the folders above it
        text = re.sub("^REPOSITORY = .*", f'REPOSITORY = Path("{REPOSITORY}")', text, flags=re.M)
    return docstring(names, folder, text, without) + text, common


def docstring(names: list[str], folder: Path, text: str, without: str | None) -> str:
    """What each chapter adds, in its own words, and commands with the flags of all."""
    numbers = [name[:2] for name in names]
    option = f" --without {without[:2]}" if without else ""
    made_by = f"tools/combine.py {' '.join(numbers)}{option} -o {folder.name}"
    *others, last = (str(int(n)) for n in numbers)
    title = f"Chapters {', '.join(others)} and {last} together, made by {made_by}"
    parts = [textwrap.fill(title, 97, break_on_hyphens=False)]  # beside the quotation marks
    launcher = "torchrun --standalone --nproc-per-node gpu train-llm.py"
    flags = {}
    for name in names:
        words, _, commands = words_of(name).partition("\n\n    ")
        parts.append(words)
        command = commands.replace("\\\n", " ").splitlines()[-1].partition("     #")[0]
        if "launch/run.sh" in command:
            launcher = re.sub(r"\S+ -e .*", folder.name, command.strip())
            launcher = re.sub(r"(\.\./)+launch", "../launch", launcher)
        for flag, value in re.findall(r" (--?[a-z][a-z-]*)((?: [^-\s]\S*)?)", command):
            if f'"{flag}"' in text:  # the joined script has it, too
                flags.setdefault(flag, value)
    flags["-e"] = f" {folder.name}"
    command = f"{launcher} {' '.join(flag + value for flag, value in flags.items())}"
    lines = textwrap.wrap(command, 88, break_long_words=False, break_on_hyphens=False)
    demo = "torchrun --standalone --nproc-per-node 2 train-llm.py --demo"
    parts.append(f"    {demo}\n    " + " \\\n        ".join(lines))
    return '"""' + "\n\n".join(parts) + '\n"""\n'


def words_of(name: str) -> str:
    """The docstring of a chapter, as it stands in the file."""
    return SCRIPTS[name].read_text().split('"""')[1]


def formatted(text: str) -> str:
    """As Ruff writes it, where Ruff is installed: it may sort and wrap imports again."""
    ruff = shutil.which("ruff") or Path(sys.executable).with_name("ruff")
    if not Path(ruff).exists():
        return text
    for command in (["check", "--select", "I", "--fix", "--quiet", "-"], ["format", "-"]):
        config = ["--config", str(REPOSITORY / "pyproject.toml")]
        done = subprocess.run(
            [ruff, *command[:1], *config, *command[1:]], input=text, capture_output=True, text=True
        )
        text = done.stdout
    return text


def write(names: list[str], folder: Path, without: str | None) -> list[int]:
    """Writes the script and its changes. Returns the lines of conflicts."""
    text, common = script_of(names, folder, without)
    places = carry.conflicts(text)
    if not places:
        text = formatted(text)
        compile(text, str(folder / "train-llm.py"), "exec")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train-llm.py").write_text(text)
    sides = [part.splitlines(keepends=True) for part in (SCRIPTS[common].read_text(), text)]
    headings = (f"{common}/train-llm.py", f"{folder.name}/train-llm.py")
    (folder / "changes.diff").write_text("".join(difflib.unified_diff(*sides, *headings)))
    return places


# -- The command -----------------------------------------------------------------------------------


def number_of_chapter(text: str) -> str:
    number = text[:2].zfill(2)
    if number in ("01", "09") or number not in {name[:2] for name in SCRIPTS}:
        raise argparse.ArgumentTypeError(f"there is no chapter {text} that could be joined")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("chapters", nargs="*", type=number_of_chapter, help="such as 05 17")
    parser.add_argument(
        "--without", type=number_of_chapter, help="leaves out this part of the last"
    )
    parser.add_argument("-o", "--output", type=Path, help="a folder, beside the chapters")
    parser.add_argument("--table", action="store_true", help="what is known about all pairs")
    args = parser.parse_args()
    if args.table:
        sys.stdout.write(table())
        return
    numbers = sorted({*args.chapters})
    if len(numbers) < 2 or not args.output:
        parser.error("name two or more chapters, and a folder with -o")
    folder = args.output.resolve()
    if (folder / "README.md").exists():
        parser.error(f"{args.output} is a chapter")
    pair = verdict(numbers, args.without)
    if pair.status in REFUSED:
        sys.exit(f"error: {pair.name} is refused: {pair.text}")
    by_number = {name[:2]: name for name in SCRIPTS}
    names = [by_number[number] for number in numbers]
    places = write(names, folder, by_number.get(args.without))
    if places:
        where = ", ".join(map(str, places))
        sys.exit(
            f"{args.output}/train-llm.py has conflicts at lines {where}: edit them. {pair.text}"
        )
    print(f"{args.output}/train-llm.py, and its changes.diff")
    if pair.status == "proved":
        print(f"{pair.name} is proved: {pair.text}")
        if hash_of(names, by_number.get(args.without)) != proved_rows()[pair.name][-1]:
            print("warning: these chapters have changed since then, so compare losses first")
    else:
        print(f"warning: {pair.name} is not proved, so compare losses first: {pair.text}")


if __name__ == "__main__":
    main()
