"""tools/side-by-side.py: what the page says, and what a real browser makes of it."""

import itertools
import re

import pytest
from helpers.chapters import SCRIPTS, changes
from helpers.programs import browser_page, in_browser
from helpers.runner import CHAPTER_1, CHAPTER_2, CHAPTER_3, REPOSITORY, load, python

TOOL = REPOSITORY / "tools" / "side-by-side.py"
CHAPTERS = [CHAPTER_1, CHAPTER_2, CHAPTER_3]
TEXTS = [chapter.read_text() for chapter in CHAPTERS]

tool = load(TOOL)

LINES = [text.splitlines() for text in TEXTS]
PARENTS = [None, 0, 1]
ROWS = tool.align(LINES, PARENTS)


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "page.html"
    result = python(TOOL, *CHAPTERS, "-o", "page.html", cwd=file.parent)
    assert result.stdout == "wrote page.html\n"
    return file


# -- Without a browser -----------------------------------------------------------------------------


def test_alignment():
    """Every line of every text once and in order; equal lines of two chapters in one row."""
    for number, text in enumerate(LINES):
        assert [row[number] for row in ROWS if row[number] is not None] == [*range(len(text))]
    for number, pair in enumerate([TEXTS[:2], TEXTS[1:]]):
        changed = {line for _, after in changes(*pair) for line in after}
        beside = {row[number + 1]: row[number] for row in ROWS}
        for i, line in enumerate(LINES[number + 1]):
            if i + 1 not in changed:
                assert LINES[number][beside[i]] == line


def test_alike_lines_stand_side_by_side():
    one = ["a = 1", "loss = model(x)", "print(loss)", "end()"]
    two = ["a = 1", "import torch", "loss = ddp_model(x)", "end()"]
    rows = tool.align([one, two], [None, 0])
    assert rows == [(0, 0), (None, 1), (1, 2), (2, None), (3, 3)]
    kinds = [tool.versions(row, [one, two]) for row in rows]
    assert kinds == ["00", "-1", "01", "0-", "00"]
    assert tool.changed_characters(one[1], two[2]) == {*range(7, 16)}
    # Long stretches with nothing in common take no minutes.
    long = [[f"{letter}{n}" for n in range(2000)] for letter in "ab"]
    assert tool.align(long, [None, 0]) == [(n, n) for n in range(2000)]


def test_each_column_has_a_colour_of_its_own():
    hues = re.findall(r"^\.from-(\d+) { --hue: (.*); }$", tool.styles(), re.MULTILINE)
    assert [int(number) for number, _ in hues] == [*range(1, tool.MOST_FILES)]
    assert len(SCRIPTS) <= tool.MOST_FILES
    hues = sorted(float(hue) for _, hue in hues)
    assert min(b - a for a, b in zip(hues, [*hues[1:], hues[0] + 360], strict=True)) > 4


@pytest.mark.rest
def test_other_files(tmp_path):
    """Text is no HTML; a byte order mark, separators inside lines and other encodings are text."""
    mine, latin = tmp_path / "mine.py", tmp_path / "latin.py"
    mine.write_bytes("\ufeff# <b>&amp; </script>\n\f\nx = '\u2028'\r\ny = 1\n".encode())
    latin.write_bytes("# coding: latin-1\nname = 'Größe'\n".encode("latin-1"))
    assert python(TOOL, mine, latin, "-o", "page.html", cwd=tmp_path).stderr == ""
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "Größe" in page
    assert "<b>&amp;" not in page
    assert page.count("</script>") == 2
    assert page.split('aria-label="latin.py"')[0].count('data-n="') == 4


# -- In a browser ----------------------------------------------------------------------------------


# The places of all lines in view: per column their number (none for a gap), edges and height.
PLACES = """() => [...document.querySelectorAll(".column:not([hidden])")].map((column) =>
  [...column.querySelectorAll(".line:not([hidden])")].map((line) => {
    const box = line.getBoundingClientRect();
    return [line.dataset.n || null, box.top, box.left, box.height];
  }))"""
# Lines of which a part is beyond the right edge of their column
CUT = """() => [...document.querySelectorAll(".column:not([hidden]) .line:not([hidden])")]
  .filter((line) => line.scrollWidth > line.clientWidth + 1).map((line) => line.textContent)"""


def assert_in_view(page, element) -> None:
    """Below the title of its column, and in the window."""
    title = "[...document.querySelectorAll('.column > h2')].map((x) => x.getBoundingClientRect())"
    bottom = max(box["bottom"] for box in page.evaluate(f"{title}.map((x) => x.toJSON())"))
    top = element.bounding_box()["y"]
    assert bottom <= top <= page.viewport_size["height"] - 20


def assert_aligned(page) -> list:
    """All lines are whole, and those of a row stand beside each other."""
    columns = page.evaluate(PLACES)
    places = [[(top, height) for _, top, _, height in lines] for lines in columns]
    assert len(places[0]) > 10
    assert all(other == places[0] for other in places)
    assert all(len({left for _, _, left, _ in lines}) == 1 for lines in columns)
    assert page.evaluate(CUT) == []
    return columns


def idea_in_view(page) -> tuple[str, str, str]:
    """The address, the text beside the code, and the line: all of the open idea."""
    line = page.query_selector_all(".column:not([hidden]) .here.idea")[-1]
    assert_in_view(page, line)
    text = page.inner_text("nav details[open]")
    return page.evaluate("decodeURIComponent(location.hash)"), text, line.inner_text()


@pytest.fixture
def page(page_file):
    with browser_page(page_file.as_uri()) as page:
        page.set_viewport_size({"width": 1500, "height": 900})
        yield page


@pytest.mark.rest
@in_browser
def test_page_in_a_browser(page):
    # Chapters 1 and 2, and one line above them
    assert page.locator("#files summary").inner_text() == "01-single-gpu → 02-ddp"
    assert page.locator("header").bounding_box()["height"] < 50
    folded = len(assert_aligned(page)[0])

    # Every idea can be reached with a key, in order, each with its text from the README.
    page.keyboard.press("p")
    page.keyboard.press("p")  # from the first one to the last of all
    marks = [*(("02-ddp", "DDP", n + 1) for n in range(10))]
    marks += [("03-fsdp", "FSDP", n + 1) for n in range(11)]
    for chapter, mark, number in marks:
        page.keyboard.press("n")
        address, text, line = idea_in_view(page)
        assert address == f"#{chapter}/{mark}-{number}"
        assert line.strip().startswith(f"# {mark} {number}: ")
        readme = (REPOSITORY / chapter / "README.md").read_text()
        title = re.search(rf"^### {number}\. (.*)", readme, re.MULTILINE)[1].replace("`", "")
        assert text.startswith(f"{mark} {number} {title}\n")
    assert page.locator("#files summary").inner_text() == "02-ddp → 03-fsdp"

    # So can the address of one.
    page.goto(page.url.split("#")[0] + "#02-ddp/DDP-4")
    page.get_by_text("DDP 4 of 10").wait_for()
    assert "Without the wrapper each rank would train" in idea_in_view(page)[1]

    # A fold opens, and so do all. Then each column has the text of its chapter.
    page.click(".fold:visible >> nth=0")
    assert len(assert_aligned(page)[0]) > folded
    page.keyboard.press("f")
    assert_aligned(page)
    columns = page.locator(".column:visible").all()
    for column, text in zip(columns, TEXTS[:2], strict=True):
        words = "(lines) => lines.map((line) => line.textContent).join('')"
        assert column.locator(".line:not(.gap)").evaluate_all(words) == text

    # Without chapter 1, the others are compared, and its own lines leave no gap.
    page.keyboard.press("c")
    page.click("button.chapter >> nth=2", modifiers=["Shift"])
    assert len(assert_aligned(page)) == 3
    page.click("button.chapter >> nth=0", modifiers=["Shift"])
    columns = assert_aligned(page)
    assert len(columns) == 2
    assert [None, None] not in [[a[0], b[0]] for a, b in zip(*columns, strict=True)]


@pytest.mark.rest
@in_browser
def test_a_phone(page):
    """One column, in which marks say what the chapter changes; the text below it."""
    page.set_viewport_size({"width": 400, "height": 800})
    page.locator(".column >> nth=0").wait_for(state="hidden")
    assert len(assert_aligned(page)) == 1
    marks = page.locator(".line:visible").evaluate_all("(x) => x.map((y) => y.dataset.mark)")
    # As in the diff with chapter 1, where a changed line is a new version of one or replaces it
    changed = {line for _, after in changes(*TEXTS[:2]) for line in after}
    assert sum(mark != "" for mark in marks) == len(changed)
    both = [row[:2] for row in ROWS if row[:2] != (None, None)]
    below = [j for (_, i), (_, j) in itertools.pairwise(both) if i is None and j is not None]
    cuts = page.locator(".cut:visible").evaluate_all("(x) => x.map((y) => Number(y.dataset.n) - 1)")
    assert cuts == below != []
    page.click("#next")
    page.click("#next")
    assert idea_in_view(page)[0] == "#02-ddp/DDP-2"
    box = page.locator("nav details[open]").bounding_box()
    assert 400 < box["y"] < 800
    assert page.evaluate("document.documentElement.scrollWidth") == 400
