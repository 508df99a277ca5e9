"""maintain/write-site.py: its pages, the stored grid, and a real browser that uses the site."""

import functools
import html
import http.server
import itertools
import json
import random
import re
import shlex
import sys
import threading

import pytest
from conftest import browser_page, in_browser
from runner import REPOSITORY, load, python

TOOL = REPOSITORY / "maintain" / "write-site.py"
PAGES = ["layouts.html", "side-by-side.html"]
MOST_BYTES = 9e6

tool = load(TOOL)
GRID = json.loads(tool.GRID.read_text())
# A process that cannot import these, as where only the packages of the site are installed
WITHOUT_TORCH = """
import runpy, sys
sys.modules |= dict.fromkeys(["torch", "transformers", "numpy", "matplotlib"])
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("zensical")
    folder = tmp_path_factory.mktemp("site")
    result = python("-c", WITHOUT_TORCH, TOOL, "-o", folder)
    assert "No issues found" in result.stdout + result.stderr
    return folder


@pytest.fixture(scope="module")
def site(folder):
    return folder / "site"


# -- Without a browser -----------------------------------------------------------------------------


def test_pages_need_neither_torch_nor_other_hosts(site):
    assert sum((site / name).stat().st_size for name in PAGES) <= MOST_BYTES
    for name in PAGES:
        text = (site / name).read_text()
        assert "default-src 'none'" in text
        assert not re.search(r"@[A-Z_]+@", text)
        for address in re.findall(r"<(?!a )[^>]* (?:src|href)=\"([^\"]*)", text):
            assert address.startswith("data:"), address[:80]
        assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest|\bimport\(", text)


def test_site_has_all_pages_and_no_broken_link(folder, site):
    """Each page is listed, and each link leads to a place of the site or to a file of ours."""
    listed = (REPOSITORY / "maintain" / "mkdocs.yml").read_text()
    pages = [path.relative_to(folder / "pages") for path in (folder / "pages").rglob("*.md")]
    assert len(pages) > 50
    for page in pages:
        assert f"- {page}\n" in listed, f"{page} is not in maintain/mkdocs.yml"
    texts = {path: path.read_text() for path in site.rglob("*.html")}
    names = {path: {*re.findall(r'\bid="?([^"\s>]+)', text)} for path, text in texts.items()}
    count = 0
    for page, text in texts.items():
        if page.name == "404.html":  # its links begin at the top of the host
            continue
        for address in map(html.unescape, re.findall(r'<a [^>]*href="([^"$]+)"', text)):
            if re.match(r"\w+:|#__", address):
                continue
            place, _, anchor = address.partition("#")
            target = (page.parent / place).resolve() if place else page
            assert target.exists(), (page, address)
            assert not anchor or target not in names or anchor in names[target], (page, address)
            count += 1
    assert count > 5000


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
    wanted = keys(GRID)
    assert len(wanted) > 6000
    assert sum(map(len, GRID["cells"].values())) == len(wanted)
    assert all(cell_of(GRID, key) for key in wanted)
    positions = {name: c["max_position_embeddings"] for name, c in GRID["axes"]["models"].items()}
    too_long = {f"{m} {n}" for m in positions for n in tool.LENGTHS if n > positions[m]}
    assert {*GRID["refused"]} == too_long


def test_cells_are_what_the_tool_computes_now():
    seed = random.randrange(10**6)
    draw = random.Random(seed)
    drawn = [key for key in keys(GRID) if not cell_of(GRID, key)[0]]
    for key in draw.sample(drawn, 4):
        name, length, batch, gpu, devices, place = key
        link = tool.links_of(devices)[place]
        found = tool.choices(name, gpu, devices, length, batch, link, trace=False)
        assert unpacked(GRID, cell_of(GRID, key)) == found, (seed, key)
    name, length = max(GRID["refused"]).split()
    assert tool.too_long(name, int(length)) == GRID["refused"][f"{name} {length}"]


# -- In a browser ----------------------------------------------------------------------------------


@pytest.fixture
def page(site):
    with browser_page((site / "layouts.html").as_uri()) as page:
        yield page


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


def layouts_of(printed: str) -> list[list[str]]:
    """The rows of the tool's table of layouts that fit."""
    lines = printed.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("| layout | chapter | samp"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[begin + 2 :])
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def assert_page_has_what_is_printed(page, printed: str) -> None:
    """The page beside the output of the command that it shows."""
    found, rows = cards(page), layouts_of(printed)
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


def printed_by(command: str, monkeypatch, capsys) -> str:
    words = shlex.split(command)
    assert words[:2] == ["python", "tools/estimate-scaling.py"]
    monkeypatch.setattr(sys, "argv", words[1:])
    capsys.readouterr()
    tool.scaling.main()
    return capsys.readouterr().out


@pytest.mark.rest
@in_browser
def test_page_in_a_browser(page, monkeypatch, capsys):
    # The guess comes first.
    assert page.is_visible("#guess")
    assert not page.is_visible("#result")
    page.select_option("#guess-chapter", "2")
    page.fill("#guess-gb", "10")
    page.click("#guess button[type=submit]")
    assert not page.is_visible("#guess")
    best = cards(page)[0]
    gb = best.get("GB per GPU, traced", best["GB per GPU, by formula"])
    verdict = page.inner_text(".verdict")
    assert re.search(r"chapter\s+2\s+3", verdict)
    assert re.search(rf"GB per GPU\s+10\s+{gb}\b", verdict)

    # Then the page has the numbers that the tool prints.
    seed = random.randrange(10**6)
    untraced = [key for key in keys(GRID) if not cell_of(GRID, key)[0]]
    fitting = [key for key in untraced if len(cell_of(GRID, key)) > 3]
    for key in random.Random(seed).sample(fitting, 4):
        choose(page, key)
        command = page.locator("#result .command").last.inner_text()
        assert "--no-trace" in command
        try:
            assert_page_has_what_is_printed(page, printed_by(command, monkeypatch, capsys))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {key}") from error

    # A choice without a layout that fits
    choose(page, ("meta-llama/Llama-3.1-70B", 32768, 2**19, "RTX 4090, 24 GB", 2, 0))
    assert "No layout fits" in page.inner_text("#result")
    choose(page, key)

    # The address has the choice, and opens it again.
    shown = cards(page)
    page.reload()
    assert shown
    assert cards(page) == shown


FIRST = {
    "gradient accumulation": "docs/flags.html",
    "vLLM": "docs/after-training.html",
    "resume": "docs/metrics.html",
    "hangs": "docs/tools.html",
}
# The addresses of the results, in their order. The search lives in a tree of its own.
RESULTS = """() => {
  const found = [];
  const walk = (root) => {
    for (const element of root.querySelectorAll("*")) {
      if (element.shadowRoot) walk(element.shadowRoot);
      if (element.tagName === "A" && element.href.includes("?h=")) found.push(element.href);
    }
  };
  walk(document);
  return found;
}"""


# Whether the field of the search has the focus
TYPES = """() => {
  let element = document.activeElement;
  while (element?.shadowRoot) element = element.shadowRoot.activeElement;
  return element?.tagName === "INPUT";
}"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.mark.rest
@in_browser
def test_search_and_a_narrow_screen(site):
    """Each search leads to the right page first. Nothing comes from another host."""
    handler = functools.partial(Quiet, directory=site)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}/"
    with browser_page(base) as page:
        page.set_default_timeout(120_000)  # on a busy machine, the search takes long to load
        for words, expected in FIRST.items():
            page.goto(base)
            page.locator(".md-search__button").first.click()
            page.wait_for_function(TYPES)  # other keys are commands, such as n for the next page
            page.keyboard.type(words)
            # At first, the results are those of the letters before the last ones.
            address = f"{base}{expected}?h={words.replace(' ', '+')}#"
            page.wait_for_function(f"({RESULTS})()[0]?.startsWith('{address}')")
        page.set_viewport_size({"width": 390, "height": 800})
        for path in sorted(site.rglob("*.html")):
            page.goto(base + str(path.relative_to(site)))
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= 390, (path, width)
    server.shutdown()
