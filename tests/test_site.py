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
    listed = (folder / "mkdocs.yml").read_text()
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


# What people type, and how the address of an answer among the first three begins
ANSWERS = {
    "gradient accumulation": "questions.html#does-gradient-accumulation",
    "vLLM": "after-training.html",
    "Kubernetes": "questions.html#kubernetes",
    "NaN": "questions.html#nan-loss",
    "how long does it take": "questions.html#what-does-a-training-cost",
    "A100": "questions.html#how-fast-are-a100s",
    "reward model": "questions.html#a-classifier",
    "7B 24 GB": "questions.html#a-7b-model-on-one-card",
    "70B": "questions.html#a-70b-model",
    "128k context": "questions.html#long-context",
    "rope scaling": "questions.html#a-longer-context",
    "checkpoint size": "questions.html#the-size-of-checkpoints",
    "forgetting": "questions.html#fine-tuning-without-forgetting",
    "mix two datasets": "questions.html#two-corpora",
    "own architecture": "questions.html#my-own-architecture",
    "chinchilla": "questions.html#how-many-tokens",
    "data still arriving": "questions.html#can-training-begin",
    "packed documents": "questions.html#does-attention-cross",
    "add new tokens": "questions.html#how-do-i-add-new-tokens",
    "learning rate": "questions.html#which-learning-rate",
    "gradient noise": "questions.html#how-large-may-the-global-batch",
    "lora rank": "questions.html#lora-rank",
    "z-loss": "questions.html#z-loss",
    "LoRA on two nodes": "questions.html#lora-on-two-nodes",
    "DPO": "questions.html#qlora-ring-attention-dpo",
    "axolotl": "questions.html#trainer-trl-axolotl",
    "loss spike": "questions.html#the-loss-spikes",
    "straggler": "questions.html#one-gpu-is-slow",
    "EFA": "questions.html#infiniband",
    "many short runs": "questions.html#many-short-runs",
    "preemption": "questions.html#spot-machines",
    "no internet": "questions.html#nodes-without-internet",
    "early stopping": "questions.html#best-checkpoint",
    "MMLU": "questions.html#how-do-i-run-a-benchmark",
}
# The addresses of the first results. The search lives in a tree of its own.
RESULTS = """() => {
  const found = [];
  const walk = (root) => {
    for (const element of root.querySelectorAll("*")) {
      if (element.shadowRoot) walk(element.shadowRoot);
      if (element.tagName === "A" && element.href.includes("?h=")) found.push(element.href);
    }
  };
  walk(document);
  return found.slice(0, 3).map((place) => place.replace(/[?]h=[^#]*/, ""));
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
    """Each search finds its answer. Nothing comes from another host."""
    handler = functools.partial(Quiet, directory=site)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}/"
    with browser_page(base) as page:
        page.set_default_timeout(120_000)  # on a busy machine, the search takes long to load
        page.locator(".md-search__button").first.click()
        page.wait_for_function(TYPES)  # other keys are commands, such as n for the next page
        for words, answer in ANSWERS.items():
            page.keyboard.press("Control+a")
            page.keyboard.insert_text(words)
            # At first, the results are those of the words before.
            page.wait_for_function(f"({RESULTS})().some((place) => place.includes('/{answer}'))")
        page.set_viewport_size({"width": 390, "height": 800})
        for path in sorted(site.rglob("*.html")):
            page.goto(base + str(path.relative_to(site)))
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= 390, (path, width)
    server.shutdown()
