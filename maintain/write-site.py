"""Builds the site: all pages with a search, and the chapters side by side.

    python maintain/write-site.py            # outputs/site/site/

Zensical (maintain/mkdocs.yml) makes the site from our Markdown pages as they are. Links to scripts
and to other files lead to the repository. This script adds `side-by-side.html`, which has the
chapters in columns.
"""

import argparse
import html
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SITE = REPOSITORY / "outputs" / "site"
PICTURES = (".png", ".svg", ".webp")


def read_git(*arguments: str) -> list[str]:
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def with_links(text: str, name: str, known: set[str], link: Callable[[str], str]) -> str:
    """The page `name` with links that the site has: to pages, to pictures, or by `link`."""

    def linked(match) -> str:
        place, _, anchor = match[1].partition("#")
        if "://" in place or place.startswith("mailto:") or not place:
            return match[0]
        target = os.path.normpath(os.path.join(os.path.dirname(name), place))
        if f"{target}/README.md" in known:  # GitHub shows the README of a folder
            place = f"{place.rstrip('/')}/README.md"
        elif target == "tools/side-by-side.py" and anchor:  # an idea on the page of this tool
            place = os.path.relpath("side-by-side.html", os.path.dirname(name))
        elif target not in known:
            place = link(target)
        return f"]({place}{'#' if anchor else ''}{anchor})"

    text = re.sub(r"\]\(([^)\s]+)\)", linked, text)
    # GitHub reads Markdown inside of folds. This Markdown wants to be told.
    return text.replace("<details>", '<details markdown="1">')


def copy_pages(folder: Path, site: Path, links: str | None) -> None:
    """Our Markdown pages and their pictures, with the links of a site."""
    names = read_git("ls-files", "--cached", "--others", "--exclude-standard")
    # models/ has data, whose pages a tool has written.
    own = [name for name in names if name.endswith(".md") and not name.startswith("models/")]
    pages = [name for name in own if (REPOSITORY / name).exists()]
    pictures = [name for name in names if name.endswith(PICTURES)]
    for name in (*pages, *pictures):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if name in pictures:
            shutil.copy(REPOSITORY / name, file)
            continue
        here = (site / name).parent

        def link(target: str, here=here) -> str:
            return links + target if links else os.path.relpath(REPOSITORY / target, here)

        text = (REPOSITORY / name).read_text("utf-8")
        file.write_text(with_links(text, name, {*pages, *pictures}, link), "utf-8")


def with_pages(settings: str) -> str:
    """A line with a star becomes one line for each page that it matches."""

    def lines(match: re.Match) -> str:
        pages = sorted(str(path.relative_to(REPOSITORY)) for path in REPOSITORY.glob(match[2]))
        return "\n".join(match[1] + page for page in pages)

    return re.sub(r"^( +- )(\S*\*\S*)$", lines, settings, flags=re.MULTILINE)


def sections(page: Path, site: Path) -> Iterator[dict[str, str]]:
    """What the search knows of a page: its sections, and each row of a table of its own."""

    def words(markup: str) -> str:
        text = re.sub(r"<thead>.*?</thead>", "", markup, flags=re.DOTALL)
        text = re.sub(r"</?(a|code|em|strong|span)\b[^>]*>", "", text)
        return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())

    article = re.search(r"<article.*?>(.*)</article>", page.read_text("utf-8"), re.DOTALL)
    if not article or page.name == "404.html":
        return
    text = re.sub(r'<a class="headerlink".*?</a>', "", article[1])
    parts = re.split(r'<h[1-6] id="([^"]+)">(.*?)</h[1-6]>', text, flags=re.DOTALL)
    place, name = page.relative_to(site).as_posix(), words(parts[2])
    row = r"<tr>\s*<td[^>]*>(.*?)</td>(.*?)</tr>"
    for anchor, title, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        within = {"place": f"{place}#{anchor}", "page": name}
        text = re.sub(row, "", body, flags=re.DOTALL)
        yield within | {"title": words(title), "text": words(text)}
        within["page"] += f" · {words(title)}"
        for first, others in re.findall(row, body, re.DOTALL):
            yield within | {"title": words(first), "text": words(others)}


def write_site(folder: Path, links: str | None) -> None:
    """The pages in `folder`/pages, and the site that Zensical makes of them in `folder`/site."""
    pages, site = folder / "pages", folder / "site"
    shutil.rmtree(pages, ignore_errors=True)
    copy_pages(pages, site, links)
    side_by_side = [REPOSITORY / "tools" / "side-by-side.py", "-o", pages / "side-by-side.html"]
    subprocess.run([sys.executable, *side_by_side], check=True)
    settings = (REPOSITORY / "maintain" / "mkdocs.yml").read_text("utf-8")
    (folder / "mkdocs.yml").write_text(with_pages(settings), "utf-8")
    if importlib.util.find_spec("zensical") is None:
        sys.exit('error: the site needs Zensical: pip install -c constraints.txt ".[site]"')
    shutil.copytree(REPOSITORY / "maintain" / "theme", folder / "theme", dirs_exist_ok=True)
    subprocess.run([sys.executable, "-m", "zensical", "build", "--clean"], cwd=folder, check=True)
    found = [part for page in site.rglob("*.html") for part in sections(page, site)]
    (site / "assets" / "sections.js").write_text(f"const SECTIONS = {json.dumps(found)};", "utf-8")
    (site / "search.json").unlink()  # of Zensical's search
    print(f"wrote {site}/index.html")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, default=SITE, help=f"the folder [{SITE}]")
    prefix = "of links to scripts, with a / at its end [the files of this folder]"
    parser.add_argument("--links", help=prefix)
    args = parser.parse_args()
    write_site(args.output.resolve(), args.links)


if __name__ == "__main__":
    main()
