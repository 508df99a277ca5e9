"""The rules for chapters: what differs between two of them is the technique, and it is marked.

A rule reads a chapter and the one that it continues (`tools/chapters.py`). It gives the number of a
line and what is wrong there, for each wrong line. A marker is read from the chapter: `# DDP: ...`
and `# DDP 1: ...` are new in chapter 2, so DDP is its marker.
"""

import ast
import itertools
import math
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from helpers.chapters import (
    CHAPTERS,
    CONTINUES,
    MARK,
    SCRIPTS,
    TABLES,
    Step,
    changes,
    code_lines,
    markers,
    read,
    step_to,
)
from helpers.runner import FACTS, REPOSITORY, load, python

Complaints = Iterator[tuple[int, str]]


def places(step: Step) -> list[range]:
    """Changed stretches of the new chapter, with at most two unchanged lines between them."""
    found = []
    for _, hunk in changes(step.old, step.new):
        if found and hunk.start - found[-1].stop <= 2:
            found[-1] = range(found[-1].start, hunk.stop)
        else:
            found.append(hunk)
    return found


def parts(text: str) -> dict[str, tuple[int, str]]:
    """Functions, classes and constants by name: the first line and the text."""
    found, lines = {}, text.splitlines()
    for node in ast.parse(text).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else node
        if name := getattr(target, "name", None) or getattr(target, "id", None):
            found[name] = (node.lineno, "\n".join(lines[node.lineno - 1 : node.end_lineno]))
    return found


# -- The rules -------------------------------------------------------------------------------------


def one_marker(step: Step) -> Complaints:
    for number, line in enumerate(step.lines):
        for match in MARK.finditer(line):
            if match[1] in step.own - step.borrowed.keys() - {step.marker}:
                yield number, f"the marker is {match[1]}, but this chapter has {step.marker}"
    if not step.marker:
        yield 1, "no place has a marker"


def changes_are_marked(step: Step) -> Complaints:
    """The docstring and imports need no marker. Lines of a chapter further up may come back."""
    earlier = [CONTINUES.get(step.before), *step.borrowed.values()]
    known = {line for name in earlier if name for line in read(name).splitlines()}
    code = code_lines(step.new)
    imports = [n for n in ast.parse(step.new).body if isinstance(n, ast.Import | ast.ImportFrom)]
    end = imports[-1].end_lineno
    for place in places(step):
        lines = {number: step.lines[number] for number in place}
        if place.start <= end and all("import" in lines[n] for n in code & lines.keys()):
            continue
        returned = known >= set(lines.values()) != {""}
        if not returned and not markers("\n".join(lines.values())) & step.own:
            yield place.start, f"differs from {step.before} without a comment # {step.marker}: why"


def comments_stay(step: Step) -> Complaints:
    """Above code that stays. Where a comment becomes false, a marked one takes its place."""
    old = ["", *step.old.splitlines()]
    code, hunks = code_lines(step.old), changes(step.old, step.new)
    changed = {number for hunk, _ in hunks for number in hunk}
    documentation = TABLES.docstring_lines(step.old)
    for hunk, new in hunks:
        if markers("\n".join(step.lines[n] for n in new)) & step.own:
            continue
        for number in hunk:
            if number in code | documentation or (not old[number] and code & {*hunk}):
                continue
            below = min((n for n in code if n > number), default=None)
            if below not in changed:
                text = old[number].strip() or "a blank line"
                yield new.start, f"here, {step.before} has {text}"


def ideas_are_numbered(step: Step) -> Complaints:
    """From 1 on, and each is one sentence in one line: `grep` prints the lesson."""
    form = re.compile(rf" *# {step.marker} \d+: (?:[A-Z]|torchrun).{{30,}}\.")
    for count, (number, idea) in enumerate(step.ideas, 1):
        if idea != str(count):
            yield number, f"the idea has the number {idea}, but it is number {count}"
        if not form.fullmatch(step.lines[number]):
            yield number, "an idea is one whole sentence in a line of its own"


def ideas_are_in_the_readme(step: Step) -> Complaints:
    page = SCRIPTS[step.after].with_name("README.md").read_text()
    headings = re.findall(r"^### (\d+)\. ", page, re.MULTILINE)
    for number, idea in step.ideas:
        if idea not in headings:
            yield number, f"the README does not explain idea {idea}"
    for idea in {*headings, "1"} - {idea for _, idea in step.ideas}:
        yield 1, f"the README explains idea {idea}, but no line has # {step.marker} {idea}:"


def borrowed_lines_stay(step: Step) -> Complaints:
    """As they are in the chapter of their marker: these lines, and new parts with its names."""
    own, old = parts(step.new), parts(step.old)
    for marker, name in step.borrowed.items():
        theirs = parts(read(name))
        for part in own.keys() & theirs.keys() - old.keys():
            if own[part][1] != theirs[part][1]:
                yield own[part][0], f"{part} differs from {name}"
        for begin, block in blocks(step, marker):
            if block not in read(name):
                yield begin, f"# {marker} here and the lines below differ from {name}"


def blocks(step: Step, marker: str) -> Iterator[tuple[int, str]]:
    """Changed lines from one with this marker to the next marker or blank line."""
    for place in places(step):
        for begin in place:
            if marker in markers(step.lines[begin]):
                rest = step.lines[begin + 1 : place.stop]
                same = itertools.takewhile(lambda line: line and not markers(line), rest)
                yield begin, "\n".join([step.lines[begin], *same])


def nothing_is_imported(step: Step) -> Complaints:
    """Of this project: a chapter is one file."""
    ours = {path.stem for path in REPOSITORY.glob("*/*.py")} | {"importlib", "runpy"}
    for node in ast.walk(ast.parse(step.new)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = ["train-llm" if node.level else node.module]
        for name in names:
            if name.split(".")[0] in ours:
                yield node.lineno, "a chapter imports nothing of this project"


# Set-up, files and logs, where RANK and WORLD_SIZE belong, and helpers of a chapter's technique
WHOLE_JOB = {"join_process_group", "gather", "parse_args", "build_model", "shard_model"}
WHOLE_JOB |= {"describe_run", "save_checkpoint"}
WHOLE_JOB |= {"Compression", "own_chunks", "shard_experts"}  # of chapters 8, 11 and 12
WHOLE_JOB |= {"load_model", "save_layers"}  # of chapter 21


def shares_have_names(step: Step) -> Complaints:
    """What is read, counted or divided uses dp_rank and dp_size, which `main` sets first.

    RANK == 0 says who writes, and messages and names of files may have a number.
    """
    for part in ast.parse(step.new).body:
        if not isinstance(part, ast.FunctionDef | ast.ClassDef) or part.name in WHOLE_JOB:
            continue
        nodes = [*ast.walk(part)]
        writers = {id(n.left) for n in nodes if isinstance(n, ast.Compare)}
        writers |= {id(n.value) for n in nodes if isinstance(n, ast.FormattedValue)}
        names = [n for n in nodes if ast.unparse(n) in ("dp_rank", "dp_size")]
        shares = [n.lineno for n in names if is_stored(n)]
        for node in nodes:
            is_whole = isinstance(node, ast.Name) and node.id in ("RANK", "WORLD_SIZE")
            if is_whole and id(node) not in writers and node.lineno > max(shares, default=0):
                yield node.lineno, f"{node.id} is that of the job: use dp_rank or dp_size"


def is_stored(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Store)


RULES = [one_marker, changes_are_marked, comments_stay, ideas_are_numbered, shares_have_names]
RULES += [ideas_are_in_the_readme, borrowed_lines_stay, nothing_is_imported]


@pytest.mark.parametrize("name", CONTINUES)
def test_rules(name):
    step = step_to(name)
    wrong = sorted(complaint for rule in RULES for complaint in rule(step))
    if wrong:
        number, sentence = wrong[0]
        line = f" ({step.lines[number].strip()})" if number < len(step.lines) else ""
        pytest.fail(f"{name}/train-llm.py:{number}: {sentence}{line}", pytrace=False)


def test_what_a_tool_writes_is_not_written_by_hand():
    """Diffs, limits and the tables of pages are those that the folders give."""
    old = [str(file) for file, text in TABLES.texts().items() if file.read_text() != text]
    assert old == [], "run python maintain/write-tables.py"


def test_a_limit_comes_down_and_never_goes_up(monkeypatch):
    name, changed = "20-float8", TABLES.changed_code_lines("20-float8")
    file = SCRIPTS[name].with_name("chapter.toml")
    for limit, written in ((changed + 9, changed), (changed - 1, changed - 1)):
        monkeypatch.setitem(TABLES.FACTS[name], "changed", limit)
        assert f"\nchanged = {written}\n" in TABLES.texts()[file]


@pytest.mark.parametrize(
    "line",
    [
        "first = state.samples + (micro_step * dp_size + dp_rank) * args.batch_size",
        "for first in range(dp_rank * args.batch_size, samples, dp_size * args.batch_size):",
    ],
)
def test_a_share_of_the_job_is_named(line):
    """In main and in evaluate: the rule says where."""
    text = read("02-ddp")
    assert [*shares_have_names(step_to("02-ddp"))] == []
    for name, whole in (("dp_size", "WORLD_SIZE"), ("dp_rank", "RANK")):
        wrong = text.replace(line, line.replace(name, whole))
        (complaint,) = shares_have_names(Step("01-single-gpu", "02-ddp", "", wrong))
        assert wrong.splitlines()[complaint[0] - 1].strip() == line.replace(name, whole)


# They may only become smaller: a line enters chapter 1 only if another leaves.
LINES = {"01-single-gpu": 633, "02-ddp": 725, "03-fsdp": 816}


@pytest.mark.parametrize("name", CHAPTERS)
def test_chapters_do_not_grow(name):
    assert len(read(name).splitlines()) <= LINES.get(name, math.inf)
    if name in CONTINUES:
        limit = FACTS[name]["changed"]
        assert TABLES.changed_code_lines(name) <= limit, "changed lines: the limit of chapter.toml"


@pytest.fixture(scope="module")
def new_chapter(tmp_path_factory):
    """A copy of the repository with a new chapter, and the list of what is left to do."""
    folder = tmp_path_factory.mktemp("repository")
    load(REPOSITORY / "maintain" / "damages.py").copy_repository(folder)
    done = python(folder / "maintain/new-chapter.py", 99, "two-words", "--continues", "02")
    return folder, done.stdout


def test_a_new_chapter(new_chapter):
    """What a tool writes has it at once, and the tests of its list exist."""
    copy, left = new_chapter
    folder = "../more/99-two-words"
    row = f"| [`99-two-words`]({folder}/README.md) | TODO | 2 | [0]({folder}/changes.diff) |"
    assert row in (copy / "docs" / "chapters.md").read_text()
    assert ", 99 | as in chapter 1 |" in (copy / "docs" / "demos.md").read_text()
    assert python(copy / "maintain" / "write-tables.py").stdout == ""
    for test in re.findall(r"^    test_(\w+\.py::\w+)", left, re.MULTILINE):
        file, _, function = test.partition("::")
        assert f"\ndef {function}(" in (copy / "tests" / f"test_{file}").read_text(), test


@pytest.mark.rest
def test_each_test_of_its_list_asks_for_its_line(new_chapter):
    copy, left = new_chapter
    tests = re.findall(r"^    (test_\S+)$", left.partition("Later")[0], re.MULTILINE)
    assert len(tests) == 6
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", *(f"tests/{t}" for t in tests)]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert {*re.findall(r"^FAILED tests/(\S+)", done.stdout, re.MULTILINE)} == {*tests}


def test_the_tree_has_all_chapters():
    """And each has a test file with its name, but for chapter 1, whose lines all have."""
    for name in [*SCRIPTS][1:]:
        assert (REPOSITORY / "tests" / f"test_{name[3:].replace('-', '_')}.py").exists(), name
    scripts = [*REPOSITORY.glob("[0-9]*/train-llm.py"), *REPOSITORY.glob("more/*/train-llm.py")]
    assert {*scripts} == {*SCRIPTS.values()}, "a chapter has a chapter.toml"
    known = {"for", "continues", "changed", "losses", "needs"}
    assert {fact for facts in FACTS.values() for fact in facts} == known
    assert all(before < name for name, before in CONTINUES.items())
    assert {*CHAPTERS} - {*CONTINUES} == {"01-single-gpu", "09-hf-trainer"}
    trainer = Step("", "09-hf-trainer", "", read("09-hf-trainer"))
    assert [*nothing_is_imported(trainer)] == []
    first = read("01-single-gpu")
    assert markers(first) == set()
    assert "torch.distributed" not in first
