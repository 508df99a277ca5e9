"""Holds the chapters together: what differs between two of them is the technique, nothing else.

Each rule is a function from the texts of two chapters to complaints. The chapters must give none,
and copies damaged on purpose must give the right one: a rule that cannot fail is no rule.
"""

import ast
import difflib
import io
import re
import tokenize
from dataclasses import dataclass, field, replace
from functools import lru_cache

import pytest
from runner import REPOSITORY, load

UPDATE = "python tools/diff-chapters.py"


TREE = load(REPOSITORY / "tools" / "diff-chapters.py")
CONTINUES = TREE.CONTINUES


@dataclass(frozen=True)
class Step:
    """From a chapter to one that continues it: what may differ, and how much of it."""

    after: str
    marker: str  # of comments: "# DDP: ..." and, for the numbered ideas, "# DDP 1: ..."
    ideas: int
    tokens: int  # added tokens of code, at most
    lines: int  # added lines of code, at most
    may_differ: set  # parts of both: functions, classes, constants
    added: set
    removed: set = field(default_factory=set)
    rewritten: set = field(default_factory=set)  # parts of both that have only the name in common
    sentences: set = field(default_factory=set)  # lines in which a string alone may differ
    # First words of comments that the technique makes false. Comments of the chapter replace them.
    replaced_comments: set = field(default_factory=set)
    # A second chapter, of which this one takes marked lines over as they are
    second: str | None = None

    @property
    def before(self) -> str:
        return CONTINUES[self.after]


STEPS = [
    Step(
        after="02-ddp",
        marker="DDP",
        ideas=10,
        tokens=630,
        lines=72,
        may_differ={"docstring", "imports", "CONSOLE", "main", "evaluate", "describe_run", "DEMO"}
        | {"parse_args"},
        added={"RANK", "WORLD_SIZE", "join_process_group", "gather", "of_all_ranks"},
    ),
    Step(
        after="03-fsdp",
        marker="FSDP",
        ideas=11,
        tokens=1_220,
        lines=115,
        may_differ={"docstring", "imports", "main", "build_model", "evaluate", "new_folder"}
        | {"save_model", "save_checkpoint", "open_run", "load_training_state", "explain"}
        | {"parse_args", "if __name__ == '__main__':"},
        added={"sharded_state", "init_weights", "AsOnOneDevice", "weights_of", "load_weights"}
        | {"save_weights"},
        sentences={"if unknown or (newest /", 'fail(f"out of GPU memory'},
    ),
    Step(
        after="04-streaming",
        marker="STREAM",
        ideas=12,
        tokens=1_970,
        lines=230,
        may_differ={"docstring", "imports", "main", "load_documents", "load_samples", "evaluate"}
        | {"LASTING", "RunState", "DEMO", "parse_args"},
        added={"time_limits", "load_eval_samples", "to_rows", "Stream", "START", "text_windows"}
        | {"windows_of_pass", "gather_numbers"},
        removed={"PackedSamples", "permutation", "sample_order"},
        rewritten={"load_samples"},
        sentences={'say(f"{args.dataset_name}: ', 'fail(f"{args.dataset_name} is too small'},
        replaced_comments={"Sample n is the same in each run", "DDP 6: Each rank reads other"},
    ),
    Step(
        after="05-multi-node",
        marker="NODES",
        ideas=10,
        tokens=1_560,
        lines=185,
        may_differ={"docstring", "imports", "main", "build_model", "new_folder", "save_checkpoint"}
        | {"open_run", "load_training_state", "save_weights", "parse_args"},
        added={"RANK_FOLDER", "to_rank_0", "own_shards", "copy_to_cpu", "THREAD", "UNFINISHED"}
        | {
            "writer_group",
            "wait_for_checkpoint",
            "write_checkpoint",
            "check_shared",
            "newest_checkpoint",
        }
        | {"of_this_rank", "read_state", "reading_together"},
        sentences={'fail(f"{newest} is'},
    ),
    Step(
        after="06-tensor-parallel",
        marker="TP",
        ideas=11,
        tokens=850,
        lines=102,
        may_differ={"docstring", "imports", "main", "build_model", "evaluate", "DEMO"}
        | {"parse_args"},
        added={"TOKENS", "WHOLE", "PLAN", "HEAD_NORMS", "PLANS", "loss_of", "check_plan"}
        | {"check_groups", "refuse"},
        replaced_comments={
            "DDP 9: Average the loss",
            "Compile each layer",
            "model that is compiled",
        },
    ),
    Step(
        after="07-pipeline-parallel",
        marker="PP",
        ideas=11,
        tokens=2_450,
        lines=270,
        may_differ={"docstring", "imports", "main", "build_model", "AsOnOneDevice", "load_weights"}
        | {"load_config_and_tokenizer", "evaluate", "sharded_state", "parse_args"},
        added={"SCHEDULES", "SEVERAL_STAGES", "FAMILIES", "Elsewhere", "part_of", "StageModule"}
        | {"TiedHead", "make_stages", "check_groups", "numbers"},
        sentences={'with timer("backward")'},
        replaced_comments={"Several small passes need less memory", "DDP 9: Average the loss"},
    ),
    Step(
        after="08-gradient-compression",
        marker="COMPRESSION",
        ideas=10,
        tokens=1_430,
        lines=152,
        may_differ={"docstring", "imports", "main", "save_checkpoint", "parse_args"},
        added={"CASTS", "WITH_RESIDUALS", "METHODS", "CHUNK", "LAST_SIX_BITS", "Compression"},
    ),
    Step(
        after="10-mds-shards",
        marker="MDS",
        ideas=9,
        tokens=2_000,
        lines=200,
        may_differ={"docstring", "imports", "main", "load_documents", "load_samples", "permutation"}
        | {"evaluate", "LASTING", "RunState", "DEMO", "parse_args"},
        added={"MdsRows", "check", "open_cache", "PARTS", "RowOrder", "read_step"},
        removed={"PackedSamples", "sample_order"},
        rewritten={"load_samples"},
        sentences={'add("-d", "--dataset-name"', '"dataset_name": ', "descriptions = gather("}
        | {'say(f"{args.dataset_name}: ', 'fail(f"{args.dataset_name} is too small'},
    ),
    Step(
        after="11-context-parallel",
        marker="CP",
        ideas=11,
        tokens=1_350,
        lines=132,
        may_differ={"docstring", "imports", "main", "build_model", "evaluate", "DEMO"}
        | {"parse_args"},
        added={"share_attention", "exchange_heads", "mask_of_all_tokens", "exchange_tokens"}
        | {"no_mask", "own_chunks", "loss_of", "FAMILIES", "check_split", "refuse"},
        replaced_comments={"DDP 9: Average the loss"},
    ),
    Step(
        after="12-expert-parallel",
        marker="EP",
        ideas=10,
        tokens=1_270,
        lines=129,
        may_differ={"docstring", "imports", "main", "build_model", "DEMO", "parse_args"},
        added={"expert_parallel", "ExpertsOfRank", "experts_of", "load_metrics", "clip_gradients"}
        | {"NUMBER_OF_EXPERTS", "check_experts", "refuse"},
        sentences={'"model_name": f"{REPOSITORY}'},
        replaced_comments={"`.item()` waits", "script reads no number"}
        | {"Compile each layer", "model that is compiled"},
    ),
    Step(
        after="13-3d-parallel",
        marker="3D",
        ideas=9,
        tokens=940,
        lines=108,
        may_differ={"docstring", "imports", "main", "StageModule", "TiedHead", "make_stages"}
        | {"build_model", "load_config_and_tokenizer", "evaluate", "save_checkpoint"}
        | {"check_groups", "DEMO", "parse_args"},
        added={"TOKENS", "WHOLE", "PLAN", "HEAD_NORMS", "PLANS", "check_plan", "refuse"},
        removed={"FAMILIES"},
        sentences={'fail(f"--pipeline-parallel'},
        replaced_comments={"Compile each layer", "model that is compiled"}
        | {"The other ranks of the pipeline"},
        second="06-tensor-parallel",
    ),
    Step(
        after="14-sparse-low-rank",
        marker="SL",
        ideas=9,
        tokens=1_580,
        lines=137,
        may_differ={"docstring", "imports", "main", "build_model", "parameter_groups", "LASTING"}
        | {"save_model", "save_checkpoint", "open_run", "DEMO", "parse_args"},
        added={"FAMILIES", "replace_layers", "set_weights", "number_of_parameters"}
        | {"sparse_layers"}
        | {"SparseLinear", "random_places", "SparsePlusLowRank", "dense_weight"}
        | {"merged_weights"},
        removed={"from_files"},
        sentences={"if unknown or (newest /", '"""The model on `device`, with'},
    ),
]
every_step = pytest.mark.parametrize("step", STEPS, ids=lambda step: step.after)


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
def tokens(text: str) -> dict[int, int]:
    """How many tokens of code begin on each line. An f-string is one token, whatever it says."""
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    documentation, result, depth = docstring_lines(text), {}, 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        name = tokenize.tok_name[token.type]
        counts = depth == 0 and token.type not in silent | {tokenize.ENDMARKER}
        depth += (name == "FSTRING_START") - (name == "FSTRING_END")  # since Python 3.12
        if counts and token.start[0] not in documentation:
            result[token.start[0]] = result.get(token.start[0], 0) + 1
    return result


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
    found = [name for name in step.may_differ if a.get(name) == b.get(name)]
    found += [*(step.added - b.keys()), *(step.added & a.keys()), *(step.removed - a.keys())]
    edited = [comment for _, comment, _ in edited_comments(before, after, step)]
    unused = [s for s in step.replaced_comments if not any(c.startswith(f"# {s}") for c in edited)]
    return found + unused


def lines_of(text: str, names: set) -> set[int]:
    """The numbers of the lines of these parts."""
    found = set()
    for name in names:
        part = parts(text)[name]
        first = text[: text.index(part)].count("\n") + 1
        found |= set(range(first, first + part.rstrip("\n").count("\n") + 1))
    return found


def edited_comments(before: str, after: str, step: Step) -> list[tuple[int, str, bool]]:
    """Comments that differ above code that does not.

    Of each its line number, its text, and whether a comment of the chapter is in its place."""
    a_lines, b_lines = ([None, *text.splitlines()] for text in (before, after))
    a_code, hunks = code_lines(before), changes(before, after)
    gone = lines_of(before, step.removed | step.rewritten)
    documentation = docstring_lines(before)
    a_changed = {line for hunk, _ in hunks for line in hunk} - gone
    markers = "|".join(s.marker for s in STEPS if s.after in (step.after, step.second))
    found = []
    for a_hunk, b_hunk in hunks:
        own = any(re.match(rf" *# ({markers})( \d+)?: ", b_lines[j]) for j in b_hunk)
        for line in sorted(a_changed & {*a_hunk} - a_code.keys() - documentation):
            of = next((n for n in sorted(a_code) if n > line), None)
            if a_lines[line].strip() and of not in a_changed:
                found.append((line, a_lines[line].strip(), own))
    return found


def noise(before: str, after: str, step: Step) -> list[str]:
    """Differences that are no technique."""
    found, hunks = [], changes(before, after)
    a_lines, b_lines = ([None, *text.splitlines()] for text in (before, after))
    a_code, b_code = code_lines(before), code_lines(after)
    gone = lines_of(before, step.removed | step.rewritten)
    a_changed = {line for hunk, _ in hunks for line in hunk} - gone
    kept = a_code.keys() - gone

    removed = {a_lines[i].strip(): n for n, (h, _) in enumerate(hunks) for i in h if i in kept}
    added = {b_lines[i].strip(): n for n, (_, h) in enumerate(hunks) for i in h if i in b_code}
    for line in removed.keys() & added.keys():
        if removed[line] != added[line] and re.search(r"\w\W+\w", line):  # more than "else:"
            found.append(f"moved: {line}")

    documentation = docstring_lines(before, functions_only=True)
    for line in sorted(a_changed & documentation):
        text = a_lines[line].strip()
        if text and not text.startswith(tuple(step.sentences)):
            found.append(f"docstring edited: {text}")
    allowed = tuple(f"# {words}" for words in step.replaced_comments)
    for line, comment, is_replaced in edited_comments(before, after, step):
        if not (is_replaced and comment.startswith(allowed)):
            found.append(f"comment of unchanged code edited: {comment} ({line})")

    for a_hunk, b_hunk in hunks:
        for i in a_hunk:
            twins = [
                b_lines[j].strip() for j in b_hunk if i in a_code and b_code.get(j) == a_code[i]
            ]
            line = a_lines[i].strip()
            if twins and line not in twins and not line.startswith(tuple(step.sentences)):
                found.append(f"only a string or a comment edited: {line}")
    return found


MARK = r" *# ([A-Z]+|3D)( \d+)?: "  # of a comment on a line of its own


def places(before: str, after: str) -> list[range]:
    """Changed stretches, and at most two unchanged lines between them."""
    found = []
    for _, hunk in changes(before, after):
        if found and hunk.start - found[-1].stop <= 2:
            found[-1] = range(found[-1].start, hunk.stop)
        else:
            found.append(hunk)
    return found


def marked_blocks(before: str, after: str, marker: str) -> list[list[str]]:
    """The changed lines from each line with this marker to the next one, or to a blank line."""
    lines = [None, *after.splitlines()]
    changed = places(before, after)
    blocks = []
    for place in changed:
        block = []
        for i in place:
            if re.search(rf"# {marker}( \d+)?: ", lines[i]):
                block = []
                blocks.append(block)
            elif re.match(MARK, lines[i]) or not lines[i]:
                block = []
            if blocks and block is blocks[-1]:
                block.append(lines[i])
    return blocks


def changed_lines_of_the_second(before: str, after: str, step: Step) -> list[str]:
    """What a chapter takes over from a second one is there as it is, comments and markers included.

    These are the parts that the first chapter lacks, and the marked lines of other parts.
    """
    if step.second is None:
        return []
    second = read(step.second)
    a, b, theirs = parts(before), parts(after), parts(second)
    heading = re.compile(r"^# -- .*$", re.MULTILINE)  # above the first part of a section
    found = []
    for name in b:
        taken = name in theirs and name not in a
        if taken and heading.sub("", b[name]).strip() != heading.sub("", theirs[name]).strip():
            found.append(f"{name} differs")

    (origin,) = [other for other in STEPS if other.after == step.second]
    blocks = marked_blocks(read(origin.before), second, origin.marker)
    first_lines = [block[0] for block in blocks]
    lines = [None, *after.splitlines()]
    for _, hunk in changes(before, after):
        for i in hunk:
            if not re.search(rf"# {origin.marker}( \d+)?: ", lines[i]):
                continue
            if lines[i] not in first_lines:
                found.append(f"not in {step.second}: {lines[i].strip()}")
                continue
            block = blocks[first_lines.index(lines[i])]
            if lines[i : i + len(block)] != block:
                found.append(f"goes on in another way: {lines[i].strip()}")

    def is_comment(line):
        return line.strip().startswith("#")

    code = "\n".join(line for line in after.splitlines() if not is_comment(line))
    for block in blocks:
        block_code = "\n".join(line for line in block if not is_comment(line))
        if block_code and f"\n{block_code}\n" in code and block[0] not in lines:
            found.append(f"without its comment: {block[0].strip()}")
    return found


def places_without_marker(before: str, after: str, step: Step) -> list[str]:
    """Needs none: what only goes, what is again as it was in the chapter before the last, and what
    is as in the second chapter."""
    lines, code = [None, *after.splitlines()], code_lines(after)
    earlier = read(CONTINUES[step.before]).splitlines() if step.before in CONTINUES else []
    if step.second is not None:
        earlier += read(step.second).splitlines()
    free = {"docstring", "imports"}
    begin = max(node.end_lineno for node in ast.parse(after).body if name_of(node) in free)
    found = []
    for place in places(before, after):
        if place.start <= begin and all("import" in lines[i] or i not in code for i in place):
            continue
        if all(lines[i] in earlier for i in place):
            continue
        if not any(re.search(rf"# {step.marker}( \d+)?: ", lines[i]) for i in place):
            found.append(f"line {place.start}: {lines[min(place.start, len(lines) - 1)].strip()}")
    return found


def ideas_out_of_form(before: str, after: str, step: Step) -> list[str]:
    """The numbers rise from top to bottom; each first line is a whole sentence of its own."""
    pattern = rf"^.*# {step.marker} (\d+):.*$"
    found = [(int(m[1]), m[0]) for m in re.finditer(pattern, after, re.MULTILINE)]
    complaints = []
    if [number for number, _ in found] != [*range(1, step.ideas + 1)]:
        complaints.append(f"the ideas are numbered {[number for number, _ in found]}")
    form = re.compile(rf" *# {step.marker} \d+: (?:[A-Z]|torchrun).{{30,}}\.")
    return complaints + [line for _, line in found if len(line) > 100 or not form.fullmatch(line)]


def added_code(before: str, after: str) -> tuple[int, int]:
    """Lines and tokens of code in the stretches that are new in the later chapter."""
    counts = tokens(after)
    new = [i for _, hunk in changes(before, after) for i in hunk if i in counts]
    return len(new), sum(counts[i] for i in new)


def changed_code_lines(before: str, after: str) -> int:
    """A line that takes the place of another counts once."""
    a, b = code_lines(before), code_lines(after)
    hunks = changes(before, after)
    return sum(max(sum(i in a for i in x), sum(i in b for i in y)) for x, y in hunks)


def over_budget(before: str, after: str, step: Step) -> list[str]:
    lines, count = added_code(before, after)
    found = [f"{lines} added lines of code, not {step.lines}"] if lines > step.lines else []
    return found + ([f"{count} tokens, not {step.tokens}"] if count > step.tokens else [])


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
    changed_lines_of_the_second,
    ideas_out_of_form,
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
    assert [name for name in scripts if name in CONTINUES] == [step.after for step in STEPS]
    assert {*scripts} - {*CONTINUES} == {"01-single-gpu", "09-hf-trainer"}
    pairs = [(before.parent.name, after.parent.name) for before, after in TREE.pairs()]
    assert pairs == [(step.before, step.after) for step in STEPS]


# What a reader of chapter 1 has to read at most
FIGURES = {"tokens": 5_600, "lines": 870, "tokens per line of code": 10.5}
COMMENTS = 0.22  # lines with comments or docstrings per line of code, at least


def figures(text: str) -> dict[str, float]:
    counts = tokens(text)
    return {
        "tokens": sum(counts.values()),
        "lines": text.count("\n"),
        "tokens per line of code": sum(counts.values()) / len(counts),
    }


def comments_per_line_of_code(text: str) -> float:
    comments = len(docstring_lines(text)) + sum("#" in line for line in text.splitlines())
    return comments / len(tokens(text))


def test_chapter_1_is_read_in_one_sitting():
    text = read("01-single-gpu")
    found = figures(text)
    assert {name for name, limit in FIGURES.items() if found[name] > limit} == set(), found
    assert comments_per_line_of_code(text) >= COMMENTS
    # Words hidden in strings and code in strings would not count; a single device knows no ranks
    for trick in (".split()", " exec(", " eval(", "__doc__", "torch.distributed", "rank"):
        assert trick not in text.lower(), trick
    longer = text.replace(
        "    model.train()", "    more = [1, 2, 3, 4, 5, 6, 7, 8]\n    model.train()", 1
    )
    assert figures(longer)["tokens"] == found["tokens"] + 19


def test_sharding_comes_early():
    lines = read("03-fsdp").splitlines()
    assert next(n for n, line in enumerate(lines, 1) if "fully_shard(" in line) < 280


# Chapters 3 to 7 adapt Transformers to shards in one place.
ADAPTING = ["init_weights", "AsOnOneDevice", "weights_of", "load_weights", "save_weights"]
ORDER = ["docstring", "imports", "main", "build_model", "load_documents", "evaluate"]
ORDER += ["save_checkpoint", *ADAPTING, "PhaseTimer", "RunLog", "say", "parse_args"]


@pytest.mark.parametrize("chapter", ["01-single-gpu", *(step.after for step in STEPS)])
def test_order_of_a_chapter(chapter):
    names = [name for name in parts(read(chapter)) if name in ORDER]
    unsharded = ("01-single-gpu", "02-ddp", "08-gradient-compression", "14-sparse-low-rank")
    assert names == [name for name in ORDER if chapter not in unsharded or name not in ADAPTING]


def test_chapter_9_imports_nothing_of_this_project():
    assert imports_of_this_project("", read("09-hf-trainer"), STEPS[0]) == []


@every_step
def test_the_stored_diff_is_that_of_the_chapters(step):
    before, after = (REPOSITORY / name / "train-llm.py" for name in (step.before, step.after))
    stored = after.with_name("changes.diff").read_text()
    assert TREE.unified_diff(before, after) == stored, f"update it: {UPDATE}"


# -- And the rules can fail ------------------------------------------------------------------------

# Name: the rule that must notice, a line of chapter 2, and what takes its place.
DAMAGES = {
    "a comment in a function that may not differ": (
        parts_outside_the_table,
        "    # Weights in fp32, whatever the files have",
        "    # Weights in fp32, whatever the file has",
    ),
    "a blank line between functions": (parts_outside_the_table, "def tokenize(", "\ndef tokenize("),
    "a new function": (
        parts_outside_the_table,
        "def tokenize(",
        "def another():\n    pass\n\n\ndef tokenize(",
    ),
    "a renamed function": (parts_outside_the_table, "def tokenize(", "def encode("),
    "another constant": (parts_outside_the_table, "FORMATS |= {", "FORMATS = FORMATS | {"),
    "another end": (parts_outside_the_table, "out of GPU memory", "out of memory"),
    "a comment reworded, its code unchanged": (
        noise,
        "    # The training loop.\n",
        "    # The loop.\n",
    ),
    "a comment deleted": (noise, "    # The training loop.\n", ""),
    "a comment at the end of a line deleted": (noise, "  # of this step, for the log", ""),
    "a message edited": (noise, "the model is in {run_folder", "the model lies in {run_folder"),
    "a help text edited": (noise, 'help="older ones are removed"', 'help="old ones are removed"'),
    "a docstring edited": (noise, "in nats per token.", "in nats a token."),
    "a line moved": (
        noise,
        "    state.train_samples = len(train_samples)\n",
        "",
    ),
    "a marker gone": (places_without_marker, "# DDP: the fullest device", "# the fullest device"),
    "a change without marker": (
        places_without_marker,
        "        progress.update()\n",
        "        progress.update()\n        dist.get_rank()\n",
    ),
    "an idea without its number": (ideas_out_of_form, "# DDP 4: ", "# DDP: "),
    "ideas out of order": (ideas_out_of_form, "# DDP 4: ", "# DDP 11: "),
    "an idea that goes on in the next line": (
        ideas_out_of_form,
        "all ranks make the same update.\n",
        "all ranks make\n    # the same update.\n",
    ),
    "more tokens": (
        over_budget,
        "    logged_step = state.step\n    #",
        f"    logged_step = state.step\n    dist.get_rank({'1, ' * 99})  # DDP: no reason\n    #",
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
# A line that moves also has to come back somewhere else.
MOVED_TO = "    # The training loop.\n"


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_noticed(damage):
    rule, line, instead = DAMAGES[damage]
    step = STEPS[0]
    after = read(step.after)
    assert after.count(line) == 1
    damaged = after.replace(line, instead)
    if damage == "a line moved":
        damaged = damaged.replace(MOVED_TO, line + MOVED_TO)
    compile(damaged, "damaged", "exec")
    complaints = rule(read(step.before), damaged, step)
    assert complaints
    assert complaints != rule(read(step.before), after, step)


def test_only_false_comments_are_replaced():
    """By comments of the chapter, and only the comments of the table."""
    (step,) = [step for step in STEPS if step.after == "07-pipeline-parallel"]
    before, after = read(step.before), read(step.after)
    words = "Several small passes need less memory"
    assert words in step.replaced_comments
    others = replace(step, replaced_comments=step.replaced_comments - {words})
    (complaint,) = noise(before, after, others)
    assert complaint.startswith(f"comment of unchanged code edited: # {words}")
    more = replace(step, replaced_comments=step.replaced_comments | {"The training loop"})
    assert unused_table_entries(before, after, more) == ["The training loop"]
    (own,) = re.findall(r"\n +# PP: The schedule gets all micro-batches.*", after)
    without = after.replace(own, "").replace("        batches = []\n", "")
    (complaint,) = noise(before, without, step)
    assert complaint.startswith(f"comment of unchanged code edited: # {words}")


# A line of chapter 13 that is chapter 6's, what takes its place, and what is complained of
TP_9 = (
    "# TP 9: FSDP works along the columns: it shards the parts again, and averages gradients there."
)
TAKEN = {
    "a plan": (
        'tp.ColwiseParallel(),\n    "model.layers.*.mlp.up',
        'None,\n    "model.layers.*.mlp.up',
        "PLAN",
    ),
    "a marker": ("# TP 4: ", "# TP 5: ", "TOKENS"),
    "a numbered comment": ("# TP 8: Tie the embeddings again", "# TP 8: Tie them again", "# TP 8"),
    "code below it": ("    model.tie_weights()\n    layer_names", "    layer_names", "# TP 8"),
    "a comment gone": (f"    {TP_9}\n", "", "# TP 9"),
    "code further below it": ("            layer.mlp.compile()\n", "", "# TP 10"),
    "a comment without a number": ("# TP: All N ranks of", "# TP: All ranks of", "# TP: All"),
    "a comment at the end of a line": ("# TP: on all ranks at once", "# TP: at once", "check_plan"),
    "a function without a marker": ("sys.exit(1)", "sys.exit(2)", "refuse"),
}


@pytest.mark.parametrize("damage", TAKEN)
def test_lines_of_a_second_chapter_stay_as_they_are(damage):
    (step,) = [step for step in STEPS if step.after == "13-3d-parallel"]
    line, instead, complaint = TAKEN[damage]
    before, after = read(step.before), read(step.after)
    assert after.count(line) == 1
    assert changed_lines_of_the_second(before, after, step) == []
    found = changed_lines_of_the_second(before, after.replace(line, instead), step)
    assert any(complaint in text for text in found), found


@every_step
def test_an_outdated_table_and_diff_are_noticed(step, tmp_path, monkeypatch):
    before = read(step.before)
    assert unused_table_entries(before, before, step)
    copies = []
    for number, name in enumerate((step.before, step.after)):
        copy = tmp_path / name / "train-llm.py"
        copy.parent.mkdir()
        copy.write_text(read(name) + "# damaged\n" * number)
        copies.append(copy)
    monkeypatch.setattr(TREE, "REPOSITORY", tmp_path)
    stored = (REPOSITORY / step.after / "changes.diff").read_text()
    assert TREE.unified_diff(*copies) != stored
