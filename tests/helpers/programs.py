"""Programs that only some machines have."""

import os
import shutil
from contextlib import contextmanager

import pytest

# Debian's package of each program that some tests need
PACKAGES = {"shellcheck": "shellcheck", "munged": "munge"}
PACKAGES |= dict.fromkeys(("slurmctld", "slurmd", "sbatch"), "slurm-wlm")


def require(*programs: str) -> None:
    """Skips a test where a program is missing. In CI, which installs them all, it fails."""
    path = f"{os.environ['PATH']}:/usr/sbin"  # where daemons are, which not every PATH has
    for program in programs:
        if not shutil.which(program, path=path):
            missing = pytest.fail if os.environ.get("CI") else pytest.skip
            missing(f"no {program}: apt install {PACKAGES[program]}")


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
in_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt install chromium")


@contextmanager
def browser_page(address: str, below: str = ""):
    """The page in a browser. It asks only for what is below, and there is no error at the end."""
    from playwright.sync_api import sync_playwright

    complaints, requests = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1800, "height": 1000})
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        yield page
        browser.close()
    assert complaints == []
    assert [url for url in requests if not url.startswith((below or address, "data:"))] == []
