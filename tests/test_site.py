"""maintain/write-site.py: its pages, and a real browser that uses the search."""

import functools
import html
import http.server
import re
import threading

import pytest
from conftest import browser_page, in_browser
from runner import REPOSITORY, python

TOOL = REPOSITORY / "maintain" / "write-site.py"
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
