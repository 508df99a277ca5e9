"""tools/side-by-side.py: what the page says, and what a real browser makes of it."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import assert_one_sentence
from runner import CHAPTER_1, CHAPTER_2, CHAPTER_3, REPOSITORY, load
from test_chapters import changes

TOOL = REPOSITORY / "tools" / "side-by-side.py"
CHAPTERS = [CHAPTER_1, CHAPTER_2, CHAPTER_3]
TEXTS = [chapter.read_text() for chapter in CHAPTERS]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
in_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt install chromium")

tool = load(TOOL)

LINES = [text.splitlines() for text in TEXTS]
PARENTS = [None, 0, 1]
ROWS = tool.align(LINES, PARENTS)


def write(folder, *arguments, tool=TOOL, old_encoding=False) -> subprocess.CompletedProcess:
    command = [sys.executable, tool, *arguments]
    old = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"} if old_encoding else {}
    options = {"cwd": folder, "env": os.environ | old, "timeout": 60}
    return subprocess.run(command, capture_output=True, text=True, **options)


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "page.html"
    result = write(file.parent, *CHAPTERS, "-o", "page.html")
    assert (result.returncode, result.stdout) == (0, "wrote page.html\n"), result.stderr
    return file


# What chapters of the future change: a line of the chapter that they continue, and its new text.
# Each is unique there, and both chapters add to the same place.
ANCHOR = "\n\nif __name__ == "
FUTURE = {
    "06-tensor-parallel": {ANCHOR: "\n\n# TP 1: A split. More.\nTP = 1  # TP: a size\n" + ANCHOR},
    "07-pipeline-parallel": {
        ANCHOR: "\n\n# PP 1: A stage.\nPP = 1\nPP2 = 2\n" + ANCHOR,
        "import argparse\n": "import argparse as flags\n",
    },
    "08-gradient-compression": {ANCHOR: "\n\n# COMPRESSION 1: Less.\nX = 1\n" + ANCHOR},
}


@pytest.fixture(scope="module")
def future(tmp_path_factory):
    """The repository with more chapters: 06 and 07 continue 03, 08 continues 02, 09 none."""
    folder = tmp_path_factory.mktemp("future")
    shutil.copytree(TOOL.parent, folder / "tools")
    (folder / "outputs").mkdir()
    texts = {path.parent.name: text for path, text in zip(CHAPTERS, TEXTS, strict=True)}
    for name, edits in FUTURE.items():
        text = texts["02-ddp" if name.startswith("08") else "03-fsdp"]
        for old, new in edits.items():
            assert text.count(old) == 1
            text = text.replace(old, new)
        texts[name] = text
    imports = re.search(r"^import .*?\n\n", TEXTS[0], re.MULTILINE | re.DOTALL)[0]
    texts["09-hf-trainer"] = f"{imports}TRAINER = 1\n"
    for name, text in texts.items():
        (folder / name).mkdir()
        (folder / name / "train-llm.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def future_page(future):
    assert write(future, tool=future / "tools" / "side-by-side.py").returncode == 0
    return future / "outputs" / "side-by-side.html"


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
    # A line that comes back stands beside where it was; another takes the first free row.
    back = tool.align([["a", "b", "c", "d"], ["a", "d"], ["a", "c", "d"]], PARENTS)
    assert back == [(0, 0, 0), (1, None, None), (2, None, 1), (3, 1, 2)]
    other = tool.align([["a", "b", "c", "d"], ["a", "d"], ["a", "x", "d"]], PARENTS)
    assert other == [(0, 0, 0), (1, None, 1), (2, None, None), (3, 1, 2)]
    # Long stretches with nothing in common take no minutes.
    long = [[f"{letter}{n}" for n in range(2000)] for letter in "ab"]
    assert tool.align(long, [None, 0]) == [(n, n) for n in range(2000)]


def test_siblings_stand_side_by_side():
    """Two texts continue the second one: each of their lines beside those of that one."""
    texts = [["a", "z"], ["a", "b", "z"], ["a", "p", "z"], ["a", "b", "q", "z"]]
    parents = [None, 0, 0, 1]
    rows = tool.align(texts, parents)
    assert rows == [(0, 0, 0, 0), (None, 1, 1, 1), (None, None, None, 2), (1, 2, 2, 3)]
    kinds = [tool.versions(row, texts) for row in rows]
    assert kinds == ["0000", "-121", "---3", "0000"]
    assert [tool.bringer(number, kinds[1], parents) for number in (1, 2, 3)] == [1, 2, 1]
    # The same line, brought by two: each brought its own, but it is no difference.
    texts = [["a"], ["a", "x"], ["a", "x"]]
    rows = tool.align(texts, [None, 0, 0])
    assert rows == [(0, 0, 0), (None, 1, 1)]
    assert tool.versions(rows[1], texts) == "-11"
    assert tool.bringer(2, "-11", [None, 0, 0]) == 2
    assert tool.bringer(2, "-11", PARENTS) == 1


def test_which_continues_which(future, tmp_path, monkeypatch):
    """The tree of the chapters that exist; another file continues the one before it."""
    monkeypatch.setattr(tool.tree, "REPOSITORY", future)
    scripts = {path.parent.name[:2]: path for path in tool.tree.chapters()}
    assert tool.continued([*scripts.values()]) == [None, 0, 1, 2, 2, 1, None]
    for names, expected in {
        "01 03 07": [None, 0, 1],
        "06 07": [None, None],
        "03 02": [None, None],
        "02 08 06": [None, 0, 0],
    }.items():
        assert tool.continued([scripts[name] for name in names.split()]) == expected
    mine = [tmp_path / "mine.py", tmp_path / "another.py"]
    assert tool.continued([scripts["02"], *mine, scripts["08"]]) == [None, 0, 1, 0]

    pairs = [(a.parent.name[:2], b.parent.name[:2]) for a, b in tool.tree.pairs()]
    assert pairs == [("01", "02"), ("02", "03"), ("03", "06"), ("03", "07"), ("02", "08")]
    command = [sys.executable, future / "tools" / "diff-chapters.py"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    written = [f"wrote {after.parent.name}/changes.diff" for _, after in tool.tree.pairs()]
    assert result.stdout.splitlines() == written
    assert "\n+PP2 = 2\n" in (future / "07-pipeline-parallel" / "changes.diff").read_text()
    assert not (future / "09-hf-trainer" / "changes.diff").exists()


def test_markers_of_places():
    lines = """\
# DDP 1: About the function below,
# in two lines.
# DDP: another
def f():
    x = "# NOTE: no comment"
    return x  # FSDP: at its end
    # no marker
# DDP 12: of the next one
g = 1""".splitlines()
    assert tool.markers(lines) == [
        (0, "f", "DDP", "1", "About the function below, in two lines."),
        (2, "f", "DDP", "", "another"),
        (5, "f", "FSDP", "", "at its end"),
        (7, "the top", "DDP", "12", "of the next one"),
    ]


def marked(text: str, name: str, kind: str = "( [0-9]+)?") -> list[int]:
    """As grep finds them: line numbers, from 1."""
    lines = enumerate(text.splitlines(), 1)
    return [i for i, line in lines if re.search(f"# {name}{kind}: ", line)]


def test_markers_are_those_of_grep():
    for name, text in zip(("DDP", "FSDP"), TEXTS[1:], strict=True):
        found = [marker for marker in tool.markers(text.splitlines()) if marker[2] == name]
        assert [i + 1 for i, *_ in found] == marked(text, name)
        ideas = [i + 1 for i, _, _, number, _ in found if number]
        assert ideas == marked(text, name, " [0-9]+")
        assert len(ideas) >= 10
        functions = {function for _, function, *_ in found}
        assert {"main", "evaluate", "parse_args"} <= functions


@pytest.mark.rest
def test_other_files(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text('print("<b>&amp;")  # DDP: </script>\n')
    result = write(tmp_path, CHAPTER_2, mine, "-o", "page.html")
    assert result.returncode == 0
    page = (tmp_path / "page.html").read_text()
    assert "mine.py" in page
    assert "<b>&amp;" not in page
    assert page.count("</script>") == 2
    # A byte order mark, a form feed, a separator, a coding cookie; an old encoding all around
    mine.write_bytes("\ufeff# π\n\f\nx = '\u2028'\r\ny = 1\n".encode())
    latin = tmp_path / "latin.py"
    latin.write_bytes("# coding: latin-1\nname = 'Größe'\n".encode("latin-1"))
    (tmp_path / "empty.py").touch()
    result = write(tmp_path, mine, latin, "empty.py", "-o", "page.html", old_encoding=True)
    assert (result.returncode, result.stderr) == (0, "")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "Größe" in page
    assert 'id="1-4" data-n="4"' in page
    assert 'id="1-5"' not in page
    assert "<nav" not in page  # no markers
    mine.write_text("def broken(:\n")
    for arguments, status, part in [
        ([CHAPTER_1], 2, "from two to 16 files"),
        ([CHAPTER_1] * 17, 2, "from two to 16 files"),
        ([CHAPTER_1, tmp_path / "nothing.py"], 1, "nothing.py"),
        ([CHAPTER_1, mine], 1, "mine.py"),
        (["-o", tmp_path / "no" / "folder.html"], 1, "cannot write"),
    ]:
        result = write(tmp_path, *arguments)
        assert result.returncode == status
        assert_one_sentence(result.stderr, part)


# -- In a browser ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, page_file):
    """Opens the page; at the end there must be no error, and no request for anything else."""
    contexts, complaints, requests, files = [], [], [], set()

    def open_page(width=1800, height=1000, color_scheme="light", fragment="", file=page_file):
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=color_scheme
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(file.as_uri() + fragment)
        files.add(file.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert {url.partition("#")[0] for url in requests} == files


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


@pytest.mark.rest
@in_browser
def test_columns_have_the_chapters(open_page):
    page = open_page()
    page.keyboard.press("f")  # unfolds
    for column, text in zip(page.query_selector_all(".column"), TEXTS, strict=True):
        words = "(lines) => lines.map((line) => line.textContent).join('')"
        assert column.eval_on_selector_all(".line:not(.gap)", words) == text


@pytest.mark.rest
@in_browser
def test_keyboard(open_page):
    page = open_page()
    count = int(re.match(r"(\d+) changes", page.inner_text("#status"))[1])
    assert count > 30
    here = ".column:not([hidden]) .here"
    seen = []
    for number in range(1, count + 1):
        page.keyboard.press("n")
        assert page.inner_text("#status") == f"change {number} of {count}"
        assert_in_view(page, page.query_selector(here))
        seen.append(page.evaluate("scrollY"))
    assert seen == sorted(seen)
    page.keyboard.press("p")
    assert page.inner_text("#status") == f"change {count - 1} of {count}"

    # Everything can be reached with Tab, and folds open with Enter
    page.reload()
    for _ in range(200):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.className") == "fold":
            break
    fold = "document.activeElement"
    assert page.evaluate(f"{fold}.getAttribute('aria-expanded')") == "false"
    before = len(page.evaluate(PLACES)[0])
    page.keyboard.press("Enter")
    assert page.evaluate(f"{fold}.getAttribute('aria-expanded')") == "true"
    assert len(assert_aligned(page)[0]) > before
    page.keyboard.press("Enter")
    assert len(page.evaluate(PLACES)[0]) == before

    # One chapter out of view: the others are compared, and what only it has leaves no gap. The
    # reader stays where he is, with what he has unfolded.
    page.keyboard.press("f")
    place = page.query_selector('[id="2-300"]')
    place.evaluate("(line) => scrollBy(0, line.getBoundingClientRect().top - 200)")
    before = place.bounding_box()["y"]
    page.keyboard.press("1")
    assert abs(place.bounding_box()["y"] - before) < 200
    closed = len(page.query_selector_all(".fold[aria-expanded=false]"))
    assert closed / 3 < 3  # those that only now are one
    assert len(page.query_selector_all(".fold")) / 3 > 10
    assert page.get_attribute("button.chapter >> nth=0", "aria-pressed") == "false"
    assert page.get_attribute("button.chapter >> nth=1", "aria-pressed") == "true"
    page.keyboard.press("n")  # from here, not from the top
    assert_in_view(page, page.query_selector(".column:not([hidden]) .here"))
    assert int(page.inner_text("#status").split()[1]) > 10
    page.keyboard.press("f")
    columns = assert_aligned(page)
    assert len(columns) == 2
    assert [None, None] not in [[a[0], b[0]] for a, b in zip(*columns, strict=True)]
    page.keyboard.press("3")
    assert len(assert_aligned(page)) == 1
    page.keyboard.press("2")  # the last one stays
    assert len(page.evaluate(PLACES)) == 1
    page.keyboard.press("3")
    page.keyboard.press("1")
    assert len(page.evaluate(PLACES)) == 3
    page.keyboard.press("c")
    assert not page.is_visible("nav ol")


@pytest.mark.rest
@in_browser
def test_narrow_screen(open_page):
    page = open_page(width=390, height=844)
    assert len(page.evaluate(PLACES)) == 1
    assert not page.is_visible("nav ol")
    page.click("nav summary")
    assert page.is_visible("nav [data-column='1'] a")
    page.click("nav [data-column='2'] > summary")
    page.click("nav [data-column='2'] a")  # a place in the last chapter, which is not in view
    page.wait_for_selector('.column[data-column="2"] .here')
    columns = page.evaluate(PLACES)
    assert len(columns) == 1
    assert 50 < len(columns[0]) < 700  # what is as in the chapter before is folded
    page.click("button.chapter >> nth=0")
    assert len(page.evaluate(PLACES)[0]) == len(TEXTS[0].splitlines())
    page.click("button.chapter >> nth=1")
    page.click("#next")
    assert page.query_selector(".column:not([hidden]) .here").is_visible()


@pytest.mark.rest
@in_browser
def test_tree_of_chapters(open_page, future_page):
    page = open_page(file=future_page)
    names = "(all) => all.map((x) => x.innerText.replace(/^\\d+\\s/, ''))"
    shown = ".chapter[aria-pressed=true]"
    every = page.eval_on_selector_all(".chapter", names)
    assert every[:2] + every[-3:] == [
        "01-single-gpu",
        "02-ddp",
        "07-pipeline-parallel",
        "08-gradient-compression",
        "09-hf-trainer",
    ]
    assert page.eval_on_selector_all(shown, names) == every[:3]

    # Drawn as a tree: right of the one that it continues, and below its siblings
    boxes = [button.bounding_box() for button in page.query_selector_all(".chapter")]
    for child, parent in {1: 0, 2: 1, 3: 2, 4: 2, 5: 1}.items():
        assert boxes[child]["x"] > boxes[parent]["x"] + boxes[parent]["width"]
        assert f"continues {every[parent]}" == page.get_attribute(
            f".chapter >> nth={child}", "title"
        )
    assert boxes[3]["x"] == boxes[4]["x"]
    assert boxes[4]["y"] > boxes[3]["y"] + boxes[3]["height"]
    assert boxes[6]["x"] == boxes[0]["x"]
    assert page.get_attribute(".chapter >> nth=6", "title") is None

    # A fourth takes the place of the one chosen first, with a click, Enter or its key.
    page.click(".chapter >> nth=3")
    assert page.eval_on_selector_all(shown, names) == every[1:4]
    page.focus(".chapter >> nth=4")
    page.keyboard.press("Enter")
    assert page.eval_on_selector_all(shown, names) == every[2:5]
    assert len(assert_aligned(page)) == 3

    # 03 beside 06 and 07: the lines of both in their colours, all else without
    looks = """(all) => all.map((x) => [x.textContent.trim(), getComputedStyle(x).backgroundColor])
      .filter(([text, color]) => text && color !== "rgba(0, 0, 0, 0)")"""
    columns = [
        page.eval_on_selector_all(f".column[data-column='{number}'] .line:not(.gap)", looks)
        for number in (2, 3, 4)
    ]
    texts = [[text for text, _ in column] for column in columns]
    assert set(texts[1]) == {"# TP 1: A split. More.", "TP = 1  # TP: a size"}
    assert set(texts[2]) == {"# PP 1: A stage.", "PP = 1", "PP2 = 2", "import argparse as flags"}
    assert texts[0] == []
    tints = [{tint for _, tint in column} for column in columns]
    assert [len(tint) for tint in tints] == [0, 1, 1]
    assert tints[1] != tints[2]
    # What a chapter in view drops has a red edge in the one that it continues, and only there.
    edged = "(all) => all.map((x) => x.textContent.trim())"
    assert page.eval_on_selector_all(".column:not([hidden]) .leaves", edged) == ["import argparse"]
    # The lines that two siblings add to a place stand beside each other.
    tops = [
        page.locator(".line", has_text=text).last.bounding_box()["y"]
        for text in ("# TP 1: A split.", "# PP 1: A stage.")
    ]
    assert tops[0] == tops[1]

    # Inherited markers are those of the chapter that brought them; it opens when it is in view.
    links = "(all) => all.map((x) => x.textContent)"
    places = page.eval_on_selector_all("nav [data-column='3'] a", links)
    assert places == ["TP 1 A split. the top", "the top a size"]
    assert page.is_visible("nav [data-column='4'] a")
    assert not page.is_visible("nav [data-column='5'] a")
    # A link leads to a chapter that is not in view.
    page.click("nav [data-column='5'] > summary")
    link = page.wait_for_selector("nav [data-column='5'] a")
    line = link.get_attribute("href")[1:]
    link.click()
    assert_in_view(page, page.wait_for_selector(f'[id="{line}"].here'))
    assert page.eval_on_selector_all(shown, names) == every[3:6]
    assert {x[0] for x in page.evaluate(PLACES)[2]} >= {line.partition("-")[2]}
    # 09 continues none, and stands beside the first, of which it has the imports.
    for key in "71":
        page.keyboard.press(key)
    assert page.eval_on_selector_all(shown, names) == [every[0], every[5], every[6]]
    own = page.eval_on_selector_all(".column[data-column='6'] [class*=from-]", links)
    assert own == ["TRAINER = 1\n"]
