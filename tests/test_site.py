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


def test_links_to_a_host():
    text = tool.index_page("https://host/blob/main/")
    assert 'href="https://host/blob/main/02-ddp/changes.diff"' in text
    assert "../" not in re.sub(r"data:[^\"]*", "", text)


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


def test_only_layouts_that_the_chapters_accept_are_traced(monkeypatch):
    """Chapter 6 has no plan for this mixture, and no layout fits 8 GPUs."""
    _, layouts = tool.tools()
    traced = []

    def trace(choice, devices, args):
        traced.append(choice.layout)
        choice.problem = "needs 99 GB, traced"

    monkeypatch.setattr(layouts, "trace", trace)
    name = "mistralai/Mixtral-8x7B-v0.1"
    found = tool.choices(name, "H100, 80 GB", 8, 8192, 2**22, 400, trace=True)
    assert found["best"] == []
    assert len(traced) == layouts.TRACED
    assert not {layout.chapter for layout in traced} & {6, 7, 13}


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


@pytest.mark.rest
def test_grid_goes_on_where_it_was_stopped(tmp_path):
    """A copy of the tools with a small grid, also with a trace."""
    for path in REPOSITORY.iterdir():
        if re.match(r"\d\d-|docs$|README|in-short$", path.name):
            (tmp_path / path.name).symlink_to(path)
    shutil.copytree(TOOL.parent, tmp_path / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "benchmarks" / "records").mkdir(parents=True)
    script, stored = (tmp_path / "tools" / name for name in ("write-site.py", "models.json"))
    name = "meta-llama/Llama-3.2-1B"
    config = json.loads(stored.read_text())[name] | {"num_hidden_layers": 2}  # for a short trace
    stored.write_text(json.dumps({name: config}))
    text = script.read_text()
    for old, new in {
        "range(11)": "range(2)",
        "TRACED_DEVICES = [8, 64, 256, 1024]": "TRACED_DEVICES = [1]",
        "LENGTHS = [2048, 8192, 32768, 131072]": "LENGTHS = [8192]",
        "BATCHES = [2**19, 2**22]": "BATCHES = [2**22]",
    }.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    script.write_text(text)
    work, grid = (
        tmp_path / name for name in ("outputs/layouts.jsonl", "benchmarks/records/layouts.json")
    )

    def run(*flags) -> list[str]:
        command = [sys.executable, script, "--grid", "--processes", "1", *flags]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert (result.returncode, result.stderr) == (0, "")
        return result.stdout.splitlines()

    output = "\n".join(run("--no-trace"))
    assert "choices: 6 of 6 parts" in output
    assert "0 of 1 choices traced" in output
    first = grid.read_text()
    lines = work.read_text().splitlines(keepends=True)
    work.write_text("".join(lines[:4]) + lines[4][:50])
    assert "choices: 6 of 6 parts" in "\n".join(run("--no-trace"))
    assert grid.read_text() == first
    assert len(work.read_text().splitlines()) == 8  # with the half line
    assert "traces: 1 of 1 parts" in "\n".join(run())
    found = json.loads(grid.read_text())
    cells = [cell for cells in found["cells"].values() for cell in cells if cell[0]]
    assert len(cells) == 1
    assert all(layout["traced"] for layout in unpacked(found, cells[0])["best"])
    assert not [line for line in run() if "parts" in line]


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
def test_a_traced_choice(open_page, monkeypatch, capsys):
    """With a trace, the smallest model on one node."""
    key = (tool.models()[0], 8192, 2**22, "H100, 80 GB", 8, 0)
    if not cell_of(GRID, key)[0]:
        pytest.skip("the stored grid has no trace of this choice")
    page = open_page()
    page.click("#skip")
    choose(page, key)
    command = page.locator("#result .command").last.inner_text()
    assert "--no-trace" not in command
    assert "GB per GPU, traced" in cards(page)[0]
    assert_page_has_what_is_printed(page, printed_by(command, monkeypatch, capsys))


@pytest.mark.rest
@in_browser
def test_a_choice_that_the_tool_refuses(open_page):
    page = open_page()
    page.click("#skip")
    name, length = min(GRID["refused"]).split()
    page.select_option("#model", name)
    page.select_option("#length", length)
    assert GRID["refused"][f"{name} {length}"] in page.inner_text("#result")
    assert page.query_selector(".layout") is None


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
def test_hours_and_price(open_page):
    page = open_page()
    page.click("#skip")
    page.fill("#tokens", "2.5")
    page.fill("#price", "3")
    card = cards(page)[0]
    hours = -(-2.5e9 // 2**22) * float(card["seconds a step"]) / 3600
    for name, value in {"hours": hours, "GPU hours": 64 * hours, "price": 192 * hours}.items():
        digits = 0 if value >= 100 else 1 if value >= 1 else 2
        assert card[name] == f"{value:,.{digits}f}"
    page.fill("#price", "")
    assert cards(page)[0]["price"] == "enter your price"
    page.fill("#tokens", "")
    assert cards(page)[0]["hours"] == "enter the tokens"


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
def test_nothing_fits(open_page):
    page = open_page(state="#model=meta-llama/Llama-3.1-405B&devices=8")
    text = page.inner_text("#result")
    assert "No layout fits 8 GPUs" in text
    assert page.is_visible("#result table")
    assert page.is_disabled("#link")
    page.click("#result button.primary")
    assert page.is_visible(".layout")
    assert page.is_enabled("#link")
    devices = page.input_value("#devices")
    assert int(devices) > 8
    assert f"{int(devices):,} GPUs are enough" in text
    assert f"devices={devices}" in page.url


@pytest.mark.rest
@in_browser
def test_the_bar_has_the_memory(open_page):
    page = open_page(state="#devices=64")
    legend = page.locator(".legend").first.inner_text()
    parts = [float(gb) for gb in re.findall(r": ([\d.]+) GB", legend)]
    assert "limit: 72.0 of 80 GB" in legend
    assert round(sum(parts)) == pytest.approx(int(cards(page)[0]["GB per GPU, by formula"]), abs=1)
    width = page.locator(".bar").first.bounding_box()["width"]
    boxes = "(all) => all.map((x) => x.getBoundingClientRect().width)"
    drawn = page.locator(".bar").first.locator("span:not(.limit)").evaluate_all(boxes)
    assert drawn == pytest.approx([gb / 80 * width for gb in parts], abs=2)


STATES = ["", "#devices=64&price=2", "#model=meta-llama/Llama-3.1-405B&devices=8"]
STATES += ["#model=Qwen/Qwen3-30B-A3B&devices=64", "#model=Qwen/Qwen3-4B&length=131072"]


@pytest.mark.rest
@in_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_pages_are_not_wider_than_the_window(open_page, width):
    for name, states in (("layouts.html", STATES), ("index.html", [""])):
        for state in states:
            page = open_page(name, width=width, height=844, state=state)
            page.evaluate("document.querySelectorAll('details').forEach((x) => x.open = true)")
            assert page.evaluate("document.scrollingElement.scrollWidth") <= width, (name, state)
            outside = "(all) => all.filter((x) => x.getBoundingClientRect().right > innerWidth + 1)"
            for element in ("button", "select", "input", ".layout", ".verdict", "pre", "img"):
                assert not page.eval_on_selector_all(element, f"{outside}.length"), (state, element)


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


@pytest.mark.rest
@in_browser
@pytest.mark.parametrize("name", ["index.html", "layouts.html"])
def test_dark_mode(open_page, name):
    """By the system's setting, and by the button. Texts have a contrast of 4.5 or more."""
    contrast = """() => {
      const light = (text) => {
        const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map((x) => x / 255)
          .map((x) => (x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      const back = (x) => {
        for (; x; x = x.parentElement) {
          const color = getComputedStyle(x).backgroundColor;
          if (!/, 0\\)$/.test(color)) return color;
        }
        return "rgb(255, 255, 255)";
      };
      const texts = "p, li, td, th, dt, dd, a, h1, h2, button, label, select";
      return [...document.querySelectorAll(texts)]
        .filter((x) => x.offsetParent && x.textContent.trim() && !x.disabled).map((x) => {
          const [a, b] = [light(getComputedStyle(x).color), light(back(x))].sort((m, n) => n - m);
          return [(a + 0.05) / (b + 0.05), x.textContent.slice(0, 30)];
        }).sort((m, n) => m[0] - n[0])[0];
    }"""
    background = "getComputedStyle(document.body).backgroundColor"
    state = "#devices=64" if name == "layouts.html" else ""
    page = open_page(name, color_scheme="dark", state=state)
    assert page.evaluate(background) == "rgb(13, 17, 23)"
    worst = page.evaluate(contrast)
    assert worst[0] >= 4.5, worst
    page.click("#theme")
    assert page.evaluate(background) == "rgb(255, 255, 255)"
    worst = page.evaluate(contrast)
    assert worst[0] >= 4.5, worst
    page.reload()
    assert page.evaluate(background) == "rgb(255, 255, 255)"


@pytest.mark.rest
@in_browser
def test_index_leads_to_the_other_pages(open_page, site):
    page = open_page("index.html")
    for image in page.query_selector_all("img"):
        assert image.evaluate("(x) => x.complete && x.naturalWidth > 0")
        assert image.get_attribute("alt")
    assert len(page.query_selector_all("figure")) >= 8
    for name in PAGES[1:]:
        assert page.query_selector(f'nav a[href="{name}"]')
        assert (site / name).exists()
