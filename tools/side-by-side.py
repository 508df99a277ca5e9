"""Writes the chapters side by side into one HTML page that needs no network.

    python tools/side-by-side.py                                 # all of them
    python tools/side-by-side.py 02-ddp/train-llm.py mine.py     # yours beside a chapter

Equal lines stand next to each other, a changed line next to the one that it replaces, and each line
has the colour of the chapter that brought it. What all have in common is folded. Open the page in
any browser; it says which keys it knows.
"""

import argparse
import ast
import html
import io
import json
import re
import sys
import tokenize
import warnings
from difflib import SequenceMatcher
from itertools import groupby, pairwise, takewhile, zip_longest
from pathlib import Path

from pygments import lex
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES

REPOSITORY = Path(__file__).resolve().parents[1]
TEMPLATE = Path(__file__).with_suffix(".html")
ALIKE = 0.5  # from this ratio on (difflib's, 0 to 1) a line passes for a new version of another
MOST_PAIRS = 20_000  # of lines to compare in a changed stretch: beyond, it would take long


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


def align(texts: list[list[str]]) -> list[tuple[int | None, ...]]:
    """Rows of positions, one per text; None where a text has nothing in that row."""

    def earlier(row: tuple[int | None, ...]) -> list[str]:
        return [text[i] for text, i in zip(texts, row, strict=False) if i is not None]

    rows = [(i,) for i in range(len(texts[0]))]
    for count, (before, after) in enumerate(pairwise(texts), 1):
        old, rows = rows, []
        for i, j in match(before, after):
            if i is None:
                # A new line takes a row that is empty in the text before it: one where an earlier
                # text has the same line, or the first. If there is none, a row of its own.
                free = [*takewhile(lambda row: row[-1] is None, old)]
                same = (n for n, row in enumerate(free) if after[j] in earlier(row))
                for _ in range(next(same, 0)):
                    rows.append((*old.pop(0), None))
                rows.append((*(old.pop(0) if free else (None,) * count), j))
                continue
            while old[0][-1] != i:
                rows.append((*old.pop(0), None))
            rows.append((*old.pop(0), j))
        rows += [(*row, None) for row in old]
    return rows


def versions(row: tuple[int | None, ...], texts: list[list[str]]) -> str:
    """Which text brought the line that each text has in this row, as digits; `-` for none.

    `001`: the second text has the first one's line, the third another one.
    """
    lines = [None if i is None else text[i] for text, i in zip(texts, row, strict=True)]
    return "".join("-" if line is None else str(lines.index(line)) for line in lines)


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


def markers(text: list[str]) -> list[tuple[int, str, str, str]]:
    """The marked places: position, the function around it, the marker's name and its sentence."""
    source = "\n".join(text)
    with warnings.catch_warnings(action="ignore"):
        body = ast.parse(source).body
    tops = [(node.end_lineno, getattr(node, "name", "the top")) for node in body]
    comments = {
        token.start[0] - 1: token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    alone = {i for i in comments if text[i].lstrip().startswith("#")}
    found = []
    for i, comment in comments.items():
        if match := re.match(r"# ([A-Z]{2,}): (.*)", comment):
            sentence, following = [match[2]], i + 1
            while {following - 1, following} <= alone:
                if re.match(r"# [A-Z]{2,}: ", comments[following]):
                    break
                sentence.append(comments[following].lstrip("# "))
                following += 1
            # A marker above a function is about that one: the first that has not ended before.
            name = next((name for end, name in tops if end > i), "the top")
            found.append((i, name, match[1], " ".join(sentence)))
    return found


def column(number: int, title: str, text: list[str], rows, kinds: list[str], texts) -> str:
    """One text as HTML, as many lines high as there are rows."""
    tokens, lines = tokens_of("\n".join(text)), []
    for row, kind in zip(rows, kinds, strict=True):
        i, version = row[number], kind[number]
        if i is None:
            lines.append('<span class="line gap"></span>')
            continue
        classes = ["line"] + ([f"from-{version}"] if version != "0" else [])
        if number + 1 < len(texts) and kind[number + 1] != version:
            classes.append("leaves")
        before = row[number - 1] if number and version == str(number) else None
        old = "" if before is None else texts[number - 1][before]
        code = code_as_html(tokens[i], changed_characters(old, text[i]))
        name = f'id="{number + 1}-{i + 1}" data-n="{i + 1}"'
        lines.append(f'<span class="{" ".join(classes)}" {name}>{code}\n</span>')
    return (
        f'<section class="column" data-column="{number}" aria-label="{title}"><h2>{title}</h2>'
        f'<pre class="scroller" tabindex="0" role="region" aria-label="Code of {title}">'
        f"<code>{''.join(lines)}</code></pre></section>"
    )


def contents(titles: list[str], texts: list[list[str]], rows, kinds: list[str]) -> str:
    """The marked places that each text brings, as links."""
    result = []
    for number, (title, text) in enumerate(zip(titles, texts, strict=True)):
        version = {row[number]: kind[number] for row, kind in zip(rows, kinds, strict=True)}
        new = [marker for marker in markers(text) if version[marker[0]] == str(number)]
        if not new:
            continue
        result.append(f'<h2 class="from-{number}">{title}</h2><ol>')
        for i, name, _, sentence in new:
            link = f'<a href="#{number + 1}-{i + 1}">'
            what = f"<code>{name}</code> {html.escape(sentence)}"
            result.append(f"<li>{link}{what}</a></li>")
        result.append("</ol>")
    summary = "<summary><kbd>c</kbd> Marked places</summary>"
    listed = f"<details open>{summary}{''.join(result)}</details>"
    return f'<nav aria-label="Marked places">{listed}</nav>' if result else ""


def styles() -> str:
    """Pygments' colours for both themes, each under its own attribute of the page."""
    themes = {"light": "xcode", "dark": "github-dark"}
    rules = []
    for theme, style in themes.items():
        formatter = HtmlFormatter(style=style)
        definitions = formatter.get_style_defs(f":root[data-theme={theme}] pre")
        # Of the style only the letters: backgrounds are for what has changed.
        rules += re.findall(r"^:root\S* pre \.\w+ {.*", definitions, re.MULTILINE)
    return re.sub(r"background(-color)?: *[^;}]+;?", "", "\n".join(rules))


def page(titles: list[str], texts: list[list[str]]) -> str:
    rows = align(texts)
    kinds = [versions(row, texts) for row in rows]
    columns = [
        column(number, html.escape(title), text, rows, kinds, texts)
        for number, (title, text) in enumerate(zip(titles, texts, strict=True))
    ]
    folders = [title.rpartition("/")[0] for title in titles]
    names = folders if len({*folders}) == len(titles) and all(folders) else titles
    buttons = [
        f'<button class="chapter from-{number}" data-column="{number}" aria-pressed="true">'
        f"<kbd>{number + 1}</kbd> {html.escape(name)}</button>"
        for number, name in enumerate(names)
    ]
    parts = {
        "TITLE": " · ".join(map(html.escape, titles)),
        "STYLES": styles(),
        "BUTTONS": "".join(buttons),
        "CONTENTS": contents([*map(html.escape, titles)], texts, rows, kinds),
        "COLUMNS": "".join(columns),
        "KINDS": json.dumps(kinds),
    }
    return re.sub(r"@([A-Z]+)@", lambda match: parts[match[1]], TEMPLATE.read_text("utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes scripts side by side into an HTML page.")
    chapters = sorted(REPOSITORY.glob("[0-9][0-9]-*/train-llm.py"))
    parser.add_argument("files", nargs="*", type=Path, help="two or more [the chapters]")
    output = REPOSITORY / "outputs" / "side-by-side.html"
    parser.add_argument("-o", "--output", type=Path, default=output, help=f"[{output}]")
    args = parser.parse_args()
    files = [path.resolve() for path in args.files] or chapters
    if not 2 <= len(files) <= 5:
        parser.error("it takes from two to five files")
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
        args.output.write_text(page(titles, texts), "utf-8")
    except OSError as error:
        sys.exit(f"error: cannot write {args.output}: {error.strerror}")
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
