"""Chromium of the distribution, driven by playwright; a test without it is skipped, in CI it fails."""

import contextlib
import os
import shutil

import pytest


@contextlib.contextmanager
def opened(url, size=(1300, 800)):
    """A page in a headless browser. What it logs to its console, and what it asks other machines for,
    must be nothing."""
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no chromium: make browser")
    complaints, requests = [], []
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": size[0], "height": size[1]})
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(url)
        yield page
        browser.close()
    start = url if url.startswith("file:") else url[: url.index("/", 8)]
    allowed = (
        ("file://", "data:", "blob:") if start.startswith("file:") else (start, "data:", "blob:")
    )
    assert complaints == []
    assert [each for each in requests if not each.startswith(allowed)] == []
