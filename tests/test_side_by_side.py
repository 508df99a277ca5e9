"""tools/side-by-side.py: what the page says, and what a real browser makes of it."""

import re

import pytest
from conftest import browser_page, in_browser
from runner import CHAPTER_1, CHAPTER_2, CHAPTER_3, REPOSITORY, load, python
from test_chapters import SCRIPTS, changes

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
    assert 'id="1-4" data-n="4"' in page
    assert 'id="1-5"' not in page


# -- In a browser ----------------------------------------------------------------------------------


# The places of all lines in view: per column their number (none for a gap), top and left edge.
PLACES = """() => [...document.querySelectorAll(".column:not([hidden])")].map((column) =>
  [...column.querySelectorAll(".line:not([hidden])")].map((line) => {
    const box = line.getBoundingClientRect();
    return [line.dataset.n || null, box.top, box.left];
  }))"""


def assert_in_view(page, element) -> None:
    """Below the title of its column, and in the window."""
    title = "[...document.querySelectorAll('.column > h2')].map((x) => x.getBoundingClientRect())"
    bottom = max(box["bottom"] for box in page.evaluate(f"{title}.map((x) => x.toJSON())"))
    top = element.bounding_box()["y"]
    assert bottom <= top <= page.viewport_size["height"] - 20


def assert_aligned(page) -> list:
    columns = page.evaluate(PLACES)
    tops = [[top for _, top, _ in lines] for lines in columns]
    assert all(other == tops[0] for other in tops)
    assert all(len({left for _, _, left in lines}) == 1 for lines in columns)
    return columns


@pytest.fixture
def page(page_file):
    with browser_page(page_file.as_uri()) as page:
        yield page


@pytest.mark.rest
@in_browser
def test_page_in_a_browser(page):
    # Every change can be reached with a key, in order.
    count = int(re.match(r"(\d+) changes", page.inner_text("#status"))[1])
    assert count > 30
    seen = []
    for number in range(1, count + 1):
        page.keyboard.press("n")
        assert page.inner_text("#status") == f"change {number} of {count}"
        assert_in_view(page, page.query_selector(".column:not([hidden]) .here"))
        seen.append(page.evaluate("scrollY"))
    assert seen == sorted(seen)

    # A fold opens, and so do all. Then each column has the text of its chapter.
    folded = len(assert_aligned(page)[0])
    page.click(".fold >> nth=0")
    assert len(assert_aligned(page)[0]) > folded
    page.keyboard.press("f")
    for column, text in zip(page.query_selector_all(".column"), TEXTS, strict=True):
        words = "(lines) => lines.map((line) => line.textContent).join('')"
        assert column.eval_on_selector_all(".line:not(.gap)", words) == text

    # Without chapter 1, the others are compared, and its own lines leave no gap.
    page.keyboard.press("1")
    page.keyboard.press("f")
    columns = assert_aligned(page)
    assert len(columns) == 2
    assert [None, None] not in [[a[0], b[0]] for a, b in zip(*columns, strict=True)]

    # A marker in the list leads to its line.
    link = page.query_selector("nav [data-column='2'] a")
    link.click()
    line = link.get_attribute("href")[1:]
    assert_in_view(page, page.wait_for_selector(f'[id="{line}"].here'))
