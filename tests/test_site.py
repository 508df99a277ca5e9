"""tools/write-site.py: its pages, the stored grid, and a real browser that uses the pages."""

import json
import random
import re
import shlex
import shutil
import subprocess
import sys
import time

import pytest
from conftest import assert_one_sentence
from runner import REPOSITORY, load

TOOL = REPOSITORY / "tools" / "write-site.py"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
in_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt install chromium")
PAGES = ["index.html", "layouts.html", "side-by-side.html"]
MOST_BYTES = 5e6

tool = load(TOOL)
GRID = json.loads(tool.GRID.read_text())
# A process that cannot import these, as where only pygments is installed
WITHOUT_TORCH = """
import runpy, sys
sys.modules |= dict.fromkeys(["torch", "transformers", "numpy", "matplotlib"])
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def write(folder, *arguments, script=TOOL) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", WITHOUT_TORCH, script, "-o", folder, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    result = write(folder)
    assert (result.returncode, result.stderr) == (0, "")
    return folder


# -- Without a browser -----------------------------------------------------------------------------


def test_site_needs_neither_torch_nor_other_hosts(site):
    assert sorted(path.name for path in site.iterdir()) == PAGES
    assert sum(path.stat().st_size for path in site.iterdir()) <= MOST_BYTES
    for name in PAGES:
        text = (site / name).read_text()
        assert "default-src 'none'" in text
        assert not re.search(r"@[A-Z_]+@", text)
        for address in re.findall(r"<(?!a )[^>]* (?:src|href)=\"([^\"]*)", text):
            assert address.startswith("data:"), address[:80]
        if name != "side-by-side.html":  # HTML of a page is not shown as text
            assert not re.search(r"&lt;/?(details|summary)", text)
        assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest|\bimport\(", text)


def test_pages_have_what_the_repository_says(site):
    index, layouts = ((site / name).read_text() for name in PAGES[:2])
    for path in REPOSITORY.glob("[0-9][0-9]-*"):
        assert index.count(f'/{path.name}/README.md"') >= 2, "in the tree and in the table"
    # All links to files of the repository lead to a file.
    for text in (index, layouts):
        for place in re.findall(r'<a href="(?!http|#)([^"]+)"', text):
            assert (site / place.partition("#")[0]).exists(), place
    table = re.findall(r"^\|.*\|$", (REPOSITORY / "docs/scaling.md").read_text(), re.MULTILINE)
    (row,) = [row for row in table if row.startswith("| torchtitan, 70B, Float8 | 256")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) in layouts
    assert 'href="https://arxiv.org/abs/2104.04473"' in layouts


def test_markdown():
    text = "a `x < 1`, **b**, *c*\n\n- one\n  [two](../x/y.md#z)\n- [t](https://a/b)\n\n"
    text += "| h |\n|---|\n| 1 |\n\n```text\n<a>\n```\n"
    assert tool.markdown(text, "docs", "../").splitlines() == [
        "<p>a <code>x &lt; 1</code>, <strong>b</strong>, <em>c</em></p>",
        '<ul><li>one\n  <a href="../x/y.md#z">two</a>\n</li>'.splitlines()[0],
        '  <a href="../x/y.md#z">two</a>',
        '</li><li><a href="https://a/b">t</a></li></ul>',
        "<table><thead><tr><th>h</th></tr></thead><tbody><tr><td>1</td></tr></tbody></table>",
        "<pre>&lt;a&gt;</pre>",
    ]


def keys(grid: dict) -> list[tuple]:
    """The choices that the grid must have, with the number of the link."""
    return [
        (*part, place)
        for part in tool.untraced_parts()
        for place in range(len(tool.links_of(part[4])))
        if f"{part[0]} {part[1]}" not in grid["refused"]
    ]


def cell_of(grid: dict, part: tuple) -> list:
    name, length, batch, gpu, devices, place = part
    return grid["cells"][f"{name} {length} {batch} {gpu.split(',')[0]} {devices}"][place]


def unpacked(grid: dict, cell: list) -> dict:
    """A cell as `choices()` gives it."""
    _, more, reasons, *numbers = cell
    best = []
    for place in range(0, len(numbers), 4):
        layout, step, efficiency, bubble = numbers[place : place + 4]
        name, *facts, command = grid["layouts"][layout]
        names = ["chapter", "samples", "micro-batches", "checkpointing", "GB", "parts", "traced"]
        values = {"name": grid["strings"][name], **dict(zip(names, facts, strict=True))}
        values |= {"command": grid["strings"][command]}
        best.append(values | {"step": step, "efficiency": efficiency, "bubble": bubble})
    listed = [grid["problems"][number] for number in grid["reasons"][reasons]]
    out = [[*listed[place], listed[place + 1]] for place in range(0, len(listed), 2)]
    return {"best": best, "more": more, "out": out}


def test_stored_grid_has_the_axes_of_the_tool():
    assert GRID["axes"] == json.loads(json.dumps(tool.axes()))
    wanted = {(key[:5], key[5]) for key in keys(GRID)}
    assert sum(map(len, GRID["cells"].values())) == len(wanted)
    cells = [cell_of(GRID, key) for key in keys(GRID)]
    assert len(cells) > 6000
    assert sum(cell[0] for cell in cells) <= 500
    assert tool.GRID.stat().st_size < 1.6e6
    positions = {name: c["max_position_embeddings"] for name, c in GRID["axes"]["models"].items()}
    too_long = {f"{m} {n}" for m in positions for n in tool.LENGTHS if n > positions[m]}
    assert {*GRID["refused"]} == too_long


def test_cells_are_what_the_tool_computes_now():
    seed = random.randrange(10**6)
    draw = random.Random(seed)
    drawn = [key for key in keys(GRID) if not cell_of(GRID, key)[0]]
    for key in draw.sample(drawn, 8):
        name, length, batch, gpu, devices, place = key
        link = tool.links_of(devices)[place]
        found = tool.choices(name, gpu, devices, length, batch, link, trace=False)
        assert unpacked(GRID, cell_of(GRID, key)) == found, (seed, key)
    name, length = max(GRID["refused"]).split()
    assert tool.too_long(name, int(length)) == GRID["refused"][f"{name} {length}"]


def test_other_grids_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "WORK", tmp_path / "work.jsonl")
    assert tool.read_work(tool.WORK) == {}
    done = {"part": ["x", 8], "cells": []}
    with tool.WORK.open("a") as file:
        file.write(json.dumps(done) + '\n{"part": ["x"')  # stopped in a line
    assert tool.read_work(tool.WORK) == {("x", 8): done}
    assert tool.WORK.read_text().endswith('["x"\n'), "the next part has a line of its own"
    monkeypatch.setattr(tool, "LINKS", [1])
    with pytest.raises(SystemExit) as error:
        tool.read_work(tool.WORK)
    assert_one_sentence(str(error.value) + "\n", "delete it")
    with pytest.raises(SystemExit) as error:
        tool.read_grid(tool.GRID)
    assert_one_sentence(str(error.value) + "\n", "--grid")
    with pytest.raises(SystemExit) as error:
        tool.read_grid(tmp_path / "nothing.json")
    assert_one_sentence(str(error.value) + "\n", "--grid")


# -- In a browser ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, site):
    """Opens a page. At the end there must be no error, and no request for another file."""
    contexts, complaints, requests, files = [], [], [], set()

    def open_page(name="layouts.html", width=1280, height=900, color_scheme="light", state=""):
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=color_scheme
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        address = (site / name).as_uri()
        files.add(address)
        page.goto(address + state)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert {url.partition("#")[0] for url in requests if not url.startswith("data:")} <= files


def wait_until(page, condition: str) -> None:
    """Playwright's own way, `wait_for_function`, is what the page's security policy forbids."""
    end = time.monotonic() + 10
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(20)


def choose(page, key: tuple) -> None:
    name, length, batch, gpu, devices, place = key
    values = {"model": name, "length": length, "batch": batch, "gpu": gpu.split(",")[0]}
    for field, value in (values | {"devices": devices}).items():
        page.select_option(f"#{field}", str(value))
    if devices > tool.PER_NODE:
        page.select_option("#link", str(tool.LINKS[place]))


def cards(page) -> list[dict]:
    """The layouts of the page, each with its title, figures and command."""
    found = []
    for card in page.query_selector_all(".layout"):
        names = [x.inner_text() for x in card.query_selector_all("dt")]
        values = [x.inner_text() for x in card.query_selector_all("dd")]
        figures = dict(zip(names, values, strict=True))
        command = card.query_selector(".command").inner_text()
        found.append({"title": card.query_selector("h3").inner_text(), "command": command})
        found[-1] |= figures
    return found


def rows_of(text: str, first: str) -> list[list[str]]:
    """The rows of a table that the tool prints."""
    lines = text.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(f"| {first}"))
    rows = []
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def assert_page_has_what_is_printed(page, printed: str) -> None:
    """The page beside the output of the command that it shows."""
    text = page.inner_text("#result")
    cells = "(rows) => rows.map((row) => [...row.cells].map((cell) => cell.textContent))"
    reasons = page.eval_on_selector_all("#result details tbody tr", cells)
    has_reasons = "| why not |" in printed
    assert reasons == (rows_of(printed, "layout | chapter | why") if has_reasons else [])
    if "No layout fits" in printed:
        assert "No layout fits" in text
        enough = re.search(r"^(\d+) devices are enough: (.*), (\d+ GB)", printed, re.MULTILINE)
        if enough and int(enough[1]) <= max(tool.DEVICES):
            devices, layout, gb = enough.groups()
            assert f"{int(devices):,} GPUs are enough: {layout}, {gb} per GPU" in text
        else:
            assert "No larger number of GPUs on this page fits" in text
        return
    found = cards(page)
    rows = rows_of(printed, "layout | chapter | samples")
    assert len(found) == min(3, len(rows))
    for number, (card, row) in enumerate(zip(found, rows, strict=False), 1):
        name, chapter, samples, checkpointing, gb, traced, bubble, *_, step, efficiency = row
        assert card["title"] == f"{number}. {name}, chapter {chapter}"
        assert card["samples × micro-batches"] == samples
        assert card["activation checkpointing"] == checkpointing
        assert card["GB per GPU, by formula"] == gb
        assert card.get("GB per GPU, traced", "") == traced
        assert card.get("bubble", "").replace(" ", "") == bubble
        assert card["seconds a step"] == step
        assert card["efficiency"].replace(" ", "") == efficiency
    assert found[0]["command"] in printed.splitlines()
    slower = re.search(r"^(\d+) slower layouts fit, too", printed, re.MULTILINE)
    others = len(rows) - len(found) + (int(slower[1]) if slower else 0)
    sentences = re.findall(r"(\d+) slower layouts? fits?, too", text)
    assert sentences == ([str(others)] if others else [])


def printed_by(command: str, monkeypatch, capsys) -> str:
    words = shlex.split(command)
    assert words[:2] == ["python", "tools/estimate-scaling.py"]
    monkeypatch.setattr(sys, "argv", words[1:])
    capsys.readouterr()
    tool.tools()[0].main()
    return capsys.readouterr().out


@pytest.mark.rest
@in_browser
def test_page_has_the_numbers_that_the_tool_prints(open_page, monkeypatch, capsys):
    """Ten choices at random, of which six have layouts that fit; and few devices for more nodes."""
    seed = random.randrange(10**6)
    draw = random.Random(seed)
    untraced = [key for key in keys(GRID) if not cell_of(GRID, key)[0]]
    fitting = [key for key in untraced if len(cell_of(GRID, key)) > 3]
    page = open_page()
    page.click("#skip")
    few = ("meta-llama/Llama-3.1-70B", 32768, 2**19, "RTX 4090, 24 GB", 2, 0)
    for key in [few, *draw.sample(fitting, 6), *draw.sample(untraced, 4)]:
        choose(page, key)
        command = page.locator("#result .command").last.inner_text()
        assert "--no-trace" in command
        try:
            assert_page_has_what_is_printed(page, printed_by(command, monkeypatch, capsys))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {key}") from error


@pytest.mark.rest
@in_browser
def test_guess_comes_first(open_page):
    page = open_page()
    assert page.is_visible("#guess")
    assert not page.is_visible("#result")
    assert "s a step" not in page.inner_text("#answer")
    page.click("#guess button[type=submit]")  # nothing guessed
    assert "or skip the guess" in page.inner_text("#note")
    assert not page.is_visible("#result")
    page.select_option("#devices", "8")  # does not show anything, either
    assert not page.is_visible("#result")
    assert "#" not in page.url
    page.select_option("#guess-chapter", "2")
    page.fill("#guess-gb", "10")
    page.click("#guess button[type=submit]")
    assert not page.is_visible("#guess")
    verdict = page.inner_text(".verdict")
    best = cards(page)[0]
    assert re.search(r"chapter\s+2\s+3", verdict)
    gb = best.get("GB per GPU, traced", best["GB per GPU, by formula"])
    assert re.search(rf"GB per GPU\s+10\s+{gb}\b", verdict)
    assert "DDP does not fit: needs" in verdict
    # From now on, a choice shows its estimate at once, and the address has it.
    page.select_option("#devices", "256")
    assert "devices=256" in page.url
    assert cards(page)[0] != best
    page.click("#again")
    assert page.is_visible("#guess")
    assert not page.is_visible("#result")
    assert "#" not in page.url
    assert page.input_value("#devices") == "256"
    page.select_option("#guess-chapter", "none")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert "There are layouts that fit" in page.inner_text(".verdict")


@pytest.mark.rest
@in_browser
def test_a_link_opens_its_state(open_page):
    state = "#model=Qwen/Qwen3-14B&gpu=H200&devices=128&link=10&length=2048&batch=524288"
    state += "&tokens=7.5&price=2"
    page = open_page(state=state)
    assert page.is_visible("#result")
    assert not page.is_visible("#guess")
    for name, value in re.findall(r"(\w+)=([^&]+)", state):
        assert page.input_value(f"#{name}") == value
    assert page.url.endswith(state)
    other = open_page()
    other.click("#skip")
    assert cards(page) != cards(other)
    for name in ("model", "gpu", "devices", "link", "length", "batch"):
        other.select_option(f"#{name}", page.input_value(f"#{name}"))
    other.fill("#tokens", "7.5")
    other.fill("#price", "2")
    assert cards(page) == cards(other)
    assert other.url == page.url
    # Another link in the same window
    page.evaluate("location.hash = '#devices=1024&model=meta-llama/Llama-3.1-405B'")
    wait_until(page, "document.querySelector('#devices').value === '1024'")
    assert page.input_value("#gpu") == "H200"
    # Values that the page does not know
    page = open_page(state="#model=<b>x&devices=64&price=-1")
    assert "does not know model=<b>x, price=-1" in page.inner_text("#answer")
    assert page.input_value("#price") == ""
    assert page.is_visible(".layout")
    page = open_page(state="#section")
    assert page.is_visible("#guess")


@pytest.mark.rest
@in_browser
def test_with_the_keyboard_alone(open_page):
    page = open_page()
    focus = "document.activeElement.id"

    def tab_to(name: str) -> None:
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate(focus) == name:
                return
        raise AssertionError(f"Tab does not reach {name}")

    tab_to("model")
    page.keyboard.type("Qwen3-14B")
    assert page.input_value("#model") == "Qwen/Qwen3-14B"
    tab_to("devices")
    page.keyboard.press("ArrowUp")
    assert page.input_value("#devices") == "32"
    tab_to("guess-chapter")
    page.keyboard.type("3")
    assert page.input_value("#guess-chapter") == "3"
    tab_to("guess-gb")
    page.keyboard.type("40")
    page.keyboard.press("Enter")
    assert page.is_visible("#result")
    assert page.evaluate(focus) == "result-title"
    wait_until(page, "document.querySelector('#status').textContent.startsWith('First choice')")
    tab_to("again")
    page.keyboard.press("Enter")
    assert page.evaluate(focus) == "guess-chapter"
    tab_to("skip")
    page.keyboard.press("Space")
    assert page.evaluate(focus) == "result-title"
    # Everything that takes the focus shows it, and every field has a label.
    page.keyboard.press("Tab")
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(outline) == "solid"
    labels = "(all) => all.map((x) => x.labels.length)"
    assert {*page.eval_on_selector_all("select, input", labels)} == {1}
