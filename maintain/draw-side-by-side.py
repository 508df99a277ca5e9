"""Draws docs/side-by-side.webp: idea 6 of chapter 2 on the page side by side, in Chromium.

python maintain/draw-side-by-side.py
"""

import base64
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "outputs" / "side-by-side.html"
SIZE = {"width": 1500, "height": 820}

subprocess.run([sys.executable, REPOSITORY / "tools" / "side-by-side.py", "-o", PAGE], check=True)
with sync_playwright() as playwright:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
    page = browser.new_page(viewport=SIZE)
    page.goto(f"{PAGE.as_uri()}#02-ddp/DDP-6")
    chromium = page.context.new_cdp_session(page)  # Playwright's own screenshots are PNG and JPEG
    picture = chromium.send("Page.captureScreenshot", {"format": "webp", "quality": 80})
    (REPOSITORY / "docs" / "side-by-side.webp").write_bytes(base64.b64decode(picture["data"]))
    browser.close()
