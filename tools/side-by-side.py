"""Writes the chapters side by side into one HTML page that needs no network.

    python tools/side-by-side.py                                 # all of them
    python tools/side-by-side.py in-short                        # the short scripts
    python tools/side-by-side.py 02-ddp/train-llm.py mine.py     # yours beside a chapter

The page shows a chapter beside the one that it continues. Equal lines stand next to each other, a
changed line next to the one that it replaces, and each line has the colour of the chapter that
brought it. Lines that all have in common are folded. The keys n and p walk through the ideas, each
beside the text of the README about it. Every idea has an address: side-by-side.html#02-ddp/DDP-4
"""

import argparse
import ast
import html
import io
import json
import re
import string
import sys
import tokenize
import warnings
from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import groupby, takewhile, zip_longest
from pathlib import Path

try:
    from markdown import markdown
    from pygments import lex
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer
    from pygments.token import STANDARD_TYPES
except ImportError:
    sys.exit(
        'error: this tool needs markdown and pygments: pip install -c constraints.txt ".[tools]"'
    )

from chapters import CONTINUES, REPOSITORY, SCRIPTS, short_scripts

TEMPLATE = Path(__file__).with_name("side-by-side-template.html")
ALIKE = 0.5  # from this ratio on (difflib's, 0 to 1) a line passes for a new version of another
MOST_PAIRS = 20_000  # of lines to compare in a changed stretch: beyond, it would take long
SHORT_LINE = 40  # characters: such a line is never wrapped
DIGITS = string.digits + string.ascii_lowercase  # a character for each file
MOST_FILES = len(DIGITS)
KEYS = "1234567890"  # of the first files, on the keyboard
MARKER = r"# ([A-Z]{2,}|[1-9]D) (\d+): (.*)"  # its name, the number of the idea, the text

IN_SHORT = REPOSITORY / "learn" / "in-short"
SHORT = short_scripts()

# -- Which text continues which --------------------------------------------------------------------


def continued(files: list[Path]) -> list[int | None]:
    """For each file the number of the one that it continues, None if there is none.

    A chapter continues its nearest ancestor among the files before it, and so does a script of
    learn/in-short/. Another file continues the file before it.
    """
    names = {script: name for name, script in SCRIPTS.items()}
    names |= {IN_SHORT / f"{name}.py": name for name in SHORT}
    continues = CONTINUES | SHORT
    numbers, result = {}, []
    for number, path in enumerate(files):
        if path in names:
            name = continues.get(names[path])
            while name and name not in numbers:
                name = continues.get(name)
            result.append(numbers.get(name))
            numbers[names[path]] = number
        else:
            result.append(number - 1 if number else None)
    return result


def ancestors(number: int, parents: list[int | None]) -> Iterator[int]:
    """From the nearest on. A text that continues none is compared with the first, too."""
    while number:
        number = parents[number] or 0
        yield number


# -- Which line stands beside which ----------------------------------------------------------------


def likeness(a: str, b: str) -> float:
    a, b = a.strip(), b.strip()
    return SequenceMatcher(None, a, b, autojunk=False).ratio() if a and b else 0.0


def pair(before: list[str], after: list[str]) -> list[tuple[int | None, int | None]]:
    """Positions in two versions of a changed stretch, alike lines together, in order.

    The sum of likenesses is the largest that is possible in order (dynamic programming); lines
    between two such pairs stand beside each other as they come, None where one side has fewer.
    """
    n, m = len(before), len(after)
    if n * m > MOST_PAIRS:
        return [*zip_longest(range(n), range(m))]
    best = [[0.0] * (m + 1) for _ in range(n + 1)]
    alike = [[likeness(a, b) for b in after] for a in before]
    for i in reversed(range(n)):
        for j in reversed(range(m)):
            together = alike[i][j] + best[i + 1][j + 1] if alike[i][j] >= ALIKE else 0.0
            best[i][j] = max(best[i + 1][j], best[i][j + 1], together)
    pairs, begin, i, j = [], (0, 0), 0, 0
    while i < n and j < m:
        if alike[i][j] >= ALIKE and best[i][j] == alike[i][j] + best[i + 1][j + 1]:
            pairs += [*zip_longest(range(begin[0], i), range(begin[1], j)), (i, j)]
            i, j = begin = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return [*pairs, *zip_longest(range(begin[0], n), range(begin[1], m))]


def match(before: list[str], after: list[str]) -> list[tuple[int | None, int | None]]:
    """Positions in two texts, equal lines and alike lines together, in order."""
    result = []
    matcher = SequenceMatcher(None, before, after, autojunk=False)
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind == "equal":
            result += zip(range(a, b), range(c, d), strict=True)
        else:
            for i, j in pair(before[a:b], after[c:d]):
                result.append((None if i is None else a + i, None if j is None else c + j))
    return result


def align(texts: list[list[str]], parents: list[int | None]) -> list[tuple[int | None, ...]]:
    """Rows of positions, one per text; None where a text has nothing in that row."""

    def earlier(row: tuple[int | None, ...]) -> list[str]:
        return [text[i] for text, i in zip(texts, row, strict=False) if i is not None]

    rows = [(i,) for i in range(len(texts[0]))]
    for count, after in enumerate(texts[1:], 1):
        parent = parents[count] or 0
        old, rows = rows, []
        for i, j in match(texts[parent], after):
            if i is None:
                # A new line takes a row that is empty in the text that this one continues: one
                # where an earlier text has the same line, or the first. If there is none, a row
                # of its own.
                free = [*takewhile(lambda row, of=parent: row[of] is None, old)]
                same = (n for n, row in enumerate(free) if after[j] in earlier(row))
                for _ in range(next(same, 0)):
                    rows.append((*old.pop(0), None))
                rows.append((*(old.pop(0) if free else (None,) * count), j))
                continue
            while old[0][parent] != i:
                rows.append((*old.pop(0), None))
            rows.append((*old.pop(0), j))
        rows += [(*row, None) for row in old]
    return rows


def versions(row: tuple[int | None, ...], texts: list[list[str]]) -> str:
    """The first text that has the same line in this row, a character per text; `-` for no line.

    `001`: the second text has the first one's line, the third another one.
    """
    lines = [None if i is None else text[i] for text, i in zip(texts, row, strict=True)]
    return "".join("-" if line is None else DIGITS[lines.index(line)] for line in lines)


def bringer(number: int, kind: str, parents: list[int | None]) -> int:
    """The text that brought a line: the furthest ancestor that has the same one in its row."""
    same = [n for n in ancestors(number, parents) if kind[n] == kind[number]]
    return same[-1] if same else number


# -- What the page shows ---------------------------------------------------------------------------


def tokens_of(text: str) -> list[list[tuple[str, str]]]:
    """For each line its pieces: the class that Pygments gives them, and what they say."""
    lines = [[]]
    for token, value in lex(text, PythonLexer(stripnl=False, ensurenl=False)):
        while token not in STANDARD_TYPES:
            token = token.parent
        for number, piece in enumerate(value.split("\n")):
            if number:
                lines.append([])
            if piece:
                lines[-1].append((STANDARD_TYPES[token], piece))
    return lines


def changed_characters(before: str, after: str) -> set[int]:
    """Where `after` says something else than `before`, of which it is a new version."""
    if likeness(before, after) < ALIKE:
        return set()
    words = [re.findall(r"\w+|\s+|.", line) for line in (before, after)]
    ends = [0]
    for word in words[1]:
        ends.append(ends[-1] + len(word))
    opcodes = SequenceMatcher(None, *words, autojunk=False).get_opcodes()
    changed = [range(ends[c], ends[d]) for kind, _, _, c, d in opcodes if kind != "equal"]
    return {position for stretch in changed for position in stretch}


def code_as_html(tokens: list[tuple[str, str]], changed: set[int]) -> str:
    pieces, begin = [], 0
    for name, text in tokens:
        characters = zip(text, range(begin, begin + len(text)), strict=True)
        for is_new, group in groupby(characters, lambda item: item[1] in changed):
            piece = html.escape("".join(character for character, _ in group), quote=False)
            piece = f'<span class="{name}">{piece}</span>' if name else piece
            pieces.append(f"<mark>{piece}</mark>" if is_new else piece)
        begin += len(text)
    return "".join(pieces)


def ideas_of(text: list[str]) -> list[tuple[int, str, str, str]]:
    """The numbered comments: position, the marker's name, its number and the sentence."""
    tokens = tokenize.generate_tokens(io.StringIO("\n".join(text)).readline)
    comments = {t.start[0] - 1: t.string for t in tokens if t.type == tokenize.COMMENT}
    matches = {i: re.match(MARKER, comment) for i, comment in comments.items()}
    return [(i, *match.groups()) for i, match in matches.items() if match]


def explanations(script: Path) -> dict[str, tuple[str, str]]:
    """For the number of each idea: its heading and its text in the script's README, as HTML.

    The code of the README is on the page already. Its links to other pages would lead nowhere.
    """
    readme = script.with_name("README.md")
    if script.name != "train-llm.py" or not readme.exists():
        return {}
    text = re.sub(r"^```.*?^```\n", "", readme.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\[([^]]+)\]\((?!https:)[^)]*\)", r"\1", text)
    ideas = re.findall(r"^### (\d+)\. (.*)\n((?:(?!##).*\n)*)", text, re.MULTILINE)
    return {number: (markdown(title)[3:-4], markdown(body)) for number, title, body in ideas}


def column(number: int, title: str, texts, rows, kinds: list[str], parents) -> str:
    """One text as HTML, as many lines high as there are rows."""
    text, lines = texts[number], []
    tokens = tokens_of("\n".join(text))
    ideas = {i for i, *_ in ideas_of(text)}
    for row, kind in zip(rows, kinds, strict=True):
        i = row[number]
        if i is None:
            lines.append('<span class="line gap"></span>')
            continue
        brought_by, parent = bringer(number, kind, parents), parents[number] or 0
        classes = ["line"] + ([f"from-{brought_by}"] if brought_by else [])
        if i in ideas:
            classes.append("idea")
        before = row[parent] if number and brought_by == number else None
        old = "" if before is None else texts[parent][before]
        code = code_as_html(tokens[i], changed_characters(old, text[i]))
        indent = len(text[i]) - len(text[i].lstrip())  # of what a narrow column wraps
        style = f' style="--indent: {indent}"' if indent and len(text[i]) > SHORT_LINE else ""
        lines.append(f'<span class="{" ".join(classes)}" data-n="{i + 1}"{style}>{code}\n</span>')
    return (
        f'<section class="column" aria-label="{title}"><h2>{title}</h2>'
        f"<pre>{''.join(lines)}</pre></section>"
    )


def contents(names: list[str], texts, parents, explained: list[dict]) -> str:
    """The ideas that each text brings, folded, with what its README says about them."""
    result = []
    for number, (name, text) in enumerate(zip(names, texts, strict=True)):
        older = {idea[1:3] for n in ancestors(number, parents) for idea in ideas_of(texts[n])}
        ideas = [idea for idea in ideas_of(text) if idea[1:3] not in older]
        if not ideas:
            continue
        result.append(f'<section class="from-{number}" data-column="{number}"><h2>{name}</h2>')
        for i, marker, idea, sentence in sorted(ideas, key=lambda found: int(found[2])):
            title, body = explained[number].get(idea, (html.escape(sentence), ""))
            address = f"{name.removeprefix('more/')}/{marker}-{idea}"
            result.append(
                f'<details id="{address}" name="idea" data-n="{i + 1}">'
                f"<summary><b>{marker} {idea}</b> {title}</summary>{body}</details>"
            )
        result.append("</section>")
    return f'<nav aria-label="Ideas">{"".join(result)}</nav>' if result else ""


def buttons(names: list[str], parents: list[int | None]) -> str:
    """The tree: each text to the right of the one that it continues, or below its siblings."""
    places, result = [], []
    for number, (name, parent) in enumerate(zip(names, parents, strict=True)):
        beside, depth = (1, 0) if parent is None else places[parent]
        row = max([beside, *(row + 1 for row, taken in places if taken == depth + 1)])
        places.append((row, depth + 1))
        title = "" if parent is None else f' title="continues {names[parent]}"'
        classes = f"chapter from-{number}" + " parent" * (number in parents)
        classes += " child" * (parent is not None)
        key = f"<kbd>{KEYS[number]}</kbd> " if number < len(KEYS) else ""
        result.append(
            f'<button class="{classes}"{title} aria-pressed="true"'
            f' style="grid-area: {row} / {depth + 1}; --depth: {depth}; --up: {row - beside}">'
            f"<span>{key}{name}</span></button>"
        )
    return "".join(result)


def styles() -> str:
    """Pygments' colours for both themes, each under its own attribute of the page."""
    themes = {"light": "xcode", "dark": "github-dark"}
    red, green = "#C41A16", "#1B6A2E"  # texts of xcode: red would look like what a diff deletes
    rules = []
    for theme, style in themes.items():
        formatter = HtmlFormatter(style=style)
        definitions = formatter.get_style_defs(f":root[data-theme={theme}] pre")
        # Of the style only the letters: backgrounds are for what has changed.
        rules += re.findall(r"^:root\S* pre \.\w+ {.*", definitions, re.MULTILINE)
    # All files but the first have a hue. Steps of the golden angle keep any number of them apart.
    rules += [f".from-{n} {{ --hue: {(76.5 + 137.5 * n) % 360}; }}" for n in range(1, MOST_FILES)]
    return re.sub(r"background(-color)?: *[^;}]+;?", "", "\n".join(rules)).replace(red, green)


def page(titles: list[str], texts: list[list[str]], parents, explained: list[dict]) -> str:
    rows = align(texts, parents)
    kinds = [versions(row, texts) for row in rows]
    folders = [title.rpartition("/")[0] for title in titles]
    names = folders if len({*folders}) == len(titles) and all(folders) else titles
    titles, names = [*map(html.escape, titles)], [*map(html.escape, names)]
    columns = [
        column(number, title, texts, rows, kinds, parents) for number, title in enumerate(titles)
    ]
    parts = {
        "TITLE": " · ".join(titles),
        "STYLES": styles(),
        "BUTTONS": buttons(names, parents),
        "CONTENTS": contents(names, texts, parents, explained),
        "COLUMNS": "".join(columns),
        "KINDS": json.dumps(kinds),
        "PARENTS": json.dumps([parent or 0 for parent in parents]),
    }
    return re.sub(r"@([A-Z]+)@", lambda match: parts[match[1]], TEMPLATE.read_text("utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes scripts side by side into an HTML page.")
    parser.add_argument("files", nargs="*", type=Path, help="two or more [the chapters]")
    output = REPOSITORY / "outputs" / "side-by-side.html"
    parser.add_argument("-o", "--output", type=Path, default=output, help=f"[{output}]")
    args = parser.parse_args()
    files = [path.resolve() for path in args.files] or [*SCRIPTS.values()]
    if files == [IN_SHORT]:
        files = [IN_SHORT / f"{name}.py" for name in SHORT]
    if not 2 <= len(files) <= MOST_FILES:
        parser.error(f"it takes 2 to {MOST_FILES} files")
    names = [path.name for path in files]
    titles, texts = [], []
    for path in files:
        if path.is_relative_to(REPOSITORY):
            titles.append(str(path.relative_to(REPOSITORY)))
        else:
            titles.append(path.name if names.count(path.name) == 1 else str(path))
        try:
            with tokenize.open(path) as file, warnings.catch_warnings(action="ignore"):
                texts.append(file.read().removesuffix("\n").split("\n"))
                ast.parse("\n".join(texts[-1]))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            sys.exit(f"error: cannot read {path} as Python: {error or type(error).__name__}")
    try:
        explained = [*map(explanations, files)]
        args.output.write_text(page(titles, texts, continued(files), explained), "utf-8")
    except OSError as error:
        sys.exit(f"error: cannot write {args.output}: {error.strerror}")
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
