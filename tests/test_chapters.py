"""Holds the chapters together: what differs between two of them is the technique, nothing else.

Each rule is a function from the texts of two chapters to complaints. The chapters must give none,
and copies damaged on purpose must give the right one: a rule that cannot fail is no rule.
"""

import ast
import difflib
import importlib.util
import io
import itertools
import re
import tokenize
from dataclasses import dataclass
from functools import lru_cache

import pytest
from runner import REPOSITORY

UPDATE = "python tools/diff-chapters.py"


@dataclass(frozen=True)
class Step:
    """From one chapter to the next: what may differ, and how much of it."""

    before: str
    after: str
    marker: str
    budget: int  # changed lines of code
    may_differ: frozenset  # parts of both: functions, classes, constants
    added: frozenset
    removed: frozenset = frozenset()


def words(text: str) -> frozenset:
    return frozenset(text.split())


STEPS = [
    Step(
        before="01-single-gpu",
        after="02-ddp",
        marker="# DDP: ",
        budget=70,
        may_differ=words(
            """docstring imports main say fail catch_stop_signals read_batches evaluate
            describe_run DEMO parse_args"""
        ),
        added=words("RANK join_process_group gather one_rank_per_cache_first worst_of_ranks"),
    ),
    Step(
        before="02-ddp",
        after="03-fsdp",
        marker="# FSDP: ",
        budget=90,
        may_differ=words(
            """docstring imports main explain find_checkpoint build_model new_folder save_model
            save_checkpoint load_training_state evaluate parse_args"""
        ),
        added=words("AsOnOneDevice weights_of load_weights"),
    ),
]
names = [f"{step.before}→{step.after}" for step in STEPS]
every_step = pytest.mark.parametrize("step", STEPS, ids=names)


def read(chapter: str) -> str:
    return (REPOSITORY / chapter / "train-llm.py").read_text()


# -- Reading a script ------------------------------------------------------------------------------


def name_of(node: ast.stmt) -> str:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return "imports"
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return node.name
    if isinstance(node, (ast.Assign, ast.AugAssign)):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        return target.elts[0].id if isinstance(target, ast.Tuple) else target.id
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return "docstring"
    return ast.unparse(node).partition("\n")[0]  # os.environ.setdefault(...), if __name__ ...


def parts(text: str) -> dict[str, str]:
    """The top-level statements by name, each with the blank lines and comments before it."""
    result, end = {}, 0
    lines = text.splitlines(keepends=True)
    for node in ast.parse(text).body:
        name = name_of(node)
        result[name] = result.get(name, "") + "".join(lines[end : node.end_lineno])
        end = node.end_lineno
    return result | {"end": "".join(lines[end:])}


def docstring_lines(text: str, functions_only: bool = False) -> set[int]:
    """Line numbers, from 1."""
    kinds = (ast.FunctionDef, ast.ClassDef) + (() if functions_only else (ast.Module,))
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    strings = [node.body[0] for node in nodes if ast.get_docstring(node) is not None]
    return {n for s in strings for n in range(s.lineno, s.end_lineno + 1)}


@lru_cache(maxsize=4)
def code_lines(text: str) -> dict[int, list[str]]:
    """Line numbers, from 1, of all but comments, docstrings and blank lines; with their tokens.

    The tokens of a string are one, whatever it says."""
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    texts = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    result = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent | {tokenize.ENDMARKER}:
            for line in range(token.start[0], token.end[0] + 1):
                is_text = token.type in texts
                result.setdefault(line, []).append("text" if is_text else token.string)
    documentation = docstring_lines(text)
    return {line: tokens for line, tokens in result.items() if line not in documentation}


@lru_cache(maxsize=4)
def changes(before: str, after: str) -> list[tuple[range, range]]:
    """The line numbers, from 1, of each changed stretch in both texts."""
    lines = (text.splitlines() for text in (before, after))
    matcher = difflib.SequenceMatcher(None, *lines, autojunk=False)
    opcodes = [opcode for opcode in matcher.get_opcodes() if opcode[0] != "equal"]
    return [(range(a + 1, b + 1), range(c + 1, d + 1)) for _, a, b, c, d in opcodes]


# -- The rules -------------------------------------------------------------------------------------


def parts_outside_the_table(before: str, after: str, step: Step) -> list[str]:
    a, b = parts(before), parts(after)
    found = [f"{name} is new" for name in b.keys() - a.keys() - step.added]
    found += [f"{name} is gone" for name in a.keys() - b.keys() - step.removed]
    common = [name for name in a if name in b]
    if common != [name for name in b if name in a]:
        found.append("the order of the parts has changed")
    found += [f"{name} differs" for name in common if a[name] != b[name]]
    return [line for line in found if line.removesuffix(" differs") not in step.may_differ]


def unused_table_entries(before: str, after: str, step: Step) -> list[str]:
    a, b = parts(before), parts(after)
    same = [name for name in step.may_differ if a.get(name) == b.get(name)]
    return [*same, *(step.added - b.keys()), *(step.added & a.keys()), *(step.removed - a.keys())]


def noise(before: str, after: str, step: Step) -> list[str]:
    """Differences that are no technique."""
    found, hunks = [], changes(before, after)
    a_lines, b_lines = ([None, *text.splitlines()] for text in (before, after))
    a_code, b_code = code_lines(before), code_lines(after)
    a_changed = {line for hunk, _ in hunks for line in hunk}

    removed = {a_lines[i].strip(): n for n, (h, _) in enumerate(hunks) for i in h if i in a_code}
    added = {b_lines[i].strip(): n for n, (_, h) in enumerate(hunks) for i in h if i in b_code}
    for line in removed.keys() & added.keys():
        if removed[line] != added[line] and re.search(r"\w\W+\w", line):  # more than "else:"
            found.append(f"moved: {line}")

    documentation = docstring_lines(before, functions_only=True)
    exempt = parts(before)["docstring"].count("\n") + 1
    for line in sorted(a_changed - a_code.keys()):
        if line <= exempt or not a_lines[line].strip():
            continue
        if line in documentation:
            found.append(f"docstring edited: {a_lines[line].strip()}")
        elif (of := next((n for n in sorted(a_code) if n > line), None)) not in a_changed:
            found.append(f"comment of unchanged code edited: {a_lines[line].strip()} ({of})")

    for a_hunk, b_hunk in hunks:
        for i in a_hunk:
            twins = [
                b_lines[j].strip() for j in b_hunk if i in a_code and b_code.get(j) == a_code[i]
            ]
            if twins and a_lines[i].strip() not in twins:
                found.append(f"only a string or a comment edited: {a_lines[i].strip()}")
    return found


def places_without_marker(before: str, after: str, step: Step) -> list[str]:
    """A place: changed stretches with at most two unchanged lines between them."""
    lines, code, hunks = [None, *after.splitlines()], code_lines(after), changes(before, after)
    free = {"docstring", "imports"}
    begin = sum(text.count("\n") for name, text in parts(after).items() if name in free)
    places = []
    for _, hunk in hunks:
        if places and hunk.start - places[-1].stop <= 2:
            places[-1] = range(places[-1].start, hunk.stop)
        else:
            places.append(hunk)
    found = []
    for place in places:
        if place.start <= begin and all("import" in lines[i] or i not in code for i in place):
            continue
        if not any(step.marker in lines[i] for i in place):
            found.append(f"line {place.start}: {lines[min(place.start, len(lines) - 1)].strip()}")
    return found


def changed_code_lines(before: str, after: str) -> int:
    """A line that takes the place of another counts once."""
    a, b = code_lines(before), code_lines(after)
    hunks = changes(before, after)
    return sum(max(sum(i in a for i in x), sum(i in b for i in y)) for x, y in hunks)


def over_budget(before: str, after: str, step: Step) -> list[str]:
    count = changed_code_lines(before, after)
    return [f"{count} changed lines of code, not {step.budget}"] if count > step.budget else []


def imports_of_this_project(before: str, after: str, step: Step) -> list[str]:
    ours = {path.stem for path in REPOSITORY.glob("*/*.py")} | {"importlib", "runpy"}
    found = []
    for node in ast.walk(ast.parse(after)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in ours]
        if isinstance(node, ast.ImportFrom) and (node.level or node.module.split(".")[0] in ours):
            found.append(node.module)
    return found


RULES = [
    parts_outside_the_table,
    unused_table_entries,
    noise,
    places_without_marker,
    over_budget,
    imports_of_this_project,
]


# -- The chapters keep them ------------------------------------------------------------------------


@every_step
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(step, rule):
    assert rule(read(step.before), read(step.after), step) == []


def test_every_chapter_is_in_the_table():
    scripts = sorted(path.parent.name for path in REPOSITORY.glob("[0-9][0-9]-*/train-llm.py"))
    assert [*itertools.pairwise(scripts)] == [(step.before, step.after) for step in STEPS]


@pytest.fixture(scope="module")
def tool():
    path = REPOSITORY / "tools" / "diff-chapters.py"
    spec = importlib.util.spec_from_file_location("diff_chapters", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@every_step
def test_the_stored_diff_is_that_of_the_chapters(step, tool, tmp_path):
    before, after = (REPOSITORY / name / "train-llm.py" for name in (step.before, step.after))
    stored = after.with_name("changes.diff").read_text()
    assert tool.unified_diff(before, after) == stored, f"update it: {UPDATE}"


# -- And the rules can fail ------------------------------------------------------------------------

# Name: the rule that must notice, a line of the later chapter, and what takes its place.
DAMAGES = {
    "a comment in a function that may not differ": (
        parts_outside_the_table,
        "    # In bf16, the dtype of many checkpoints, most AdamW",
        "    # In bf16, the dtype of most checkpoints, most AdamW",
    ),
    "a blank line between functions": (parts_outside_the_table, "def tokenize(", "\ndef tokenize("),
    "a new function": (
        parts_outside_the_table,
        "def tokenize(",
        "def another():\n    pass\n\n\ndef tokenize(",
    ),
    "a renamed function": (parts_outside_the_table, "def tokenize(", "def encode("),
    "another constant": (parts_outside_the_table, "SCHEDULERS += [", "SCHEDULERS = SCHEDULERS + ["),
    "another end": (
        parts_outside_the_table,
        "interrupted before the first step",
        "interrupted",
    ),
    "a comment reworded, its code unchanged": (
        noise,
        "    # The loop\n",
        "    # The training loop\n",
    ),
    "a comment deleted": (noise, "    # Finished, or told to stop\n", ""),
    "a comment at the end of a line deleted": (noise, "  # e^710 overflows", ""),
    "a message edited": (noise, "the model is in {run_folder", "the model lies in {run_folder"),
    "a help text edited": (noise, 'help="older ones are removed"', 'help="old ones are removed"'),
    "a docstring edited": (noise, "of the order on.", "in the order on."),
    "a line moved": (
        noise,
        "    keep_freed_memory()\n    run_folder = find_run_folder(args)\n",
        "    run_folder = find_run_folder(args)\n    keep_freed_memory()\n",
    ),
    "a marker gone": (places_without_marker, "# DDP: all have read it", "# all have read it"),
    "a change without marker": (
        places_without_marker,
        "    transformers.logging.disable_progress_bar()\n",
        "    transformers.logging.disable_progress_bar()\n    dist.get_rank()\n",
    ),
    "more code": (
        over_budget,
        "    timer = PhaseTimer(device)\n",
        "    timer = PhaseTimer(device)\n" + "    dist.get_rank()  # DDP: no reason\n" * 71,
    ),
    "an import of another chapter's folder": (
        imports_of_this_project,
        "import argparse\n",
        "import argparse\nimport importlib\n",
    ),
    "an import of a shared module": (
        imports_of_this_project,
        "import argparse\n",
        "import argparse\nfrom . import shared\n",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_noticed(damage):
    rule, line, instead = DAMAGES[damage]
    step = STEPS[0]
    after = read(step.after)
    assert after.count(line) == 1
    damaged = after.replace(line, instead)
    compile(damaged, "damaged", "exec")
    complaints = rule(read(step.before), damaged, step)
    assert complaints
    assert complaints != rule(read(step.before), after, step)


@every_step
def test_an_outdated_table_and_diff_are_noticed(step, tool, tmp_path, monkeypatch):
    before = read(step.before)
    assert unused_table_entries(before, before, step)
    copies = []
    for number, name in enumerate((step.before, step.after)):
        copy = tmp_path / name / "train-llm.py"
        copy.parent.mkdir()
        copy.write_text(read(name) + "# damaged\n" * number)
        copies.append(copy)
    monkeypatch.setattr(tool, "REPOSITORY", tmp_path)
    stored = (REPOSITORY / step.after / "changes.diff").read_text()
    assert tool.unified_diff(*copies) != stored
