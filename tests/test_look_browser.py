"""The page in a real browser: opened from files, clicked, filtered, with 60,000 images; and served."""

import io
import json
import math
import re
import threading
import time

import numpy as np
import pytest
from browser import opened
from PIL import Image
from test_look import page, photos, runs  # noqa: F401  fixtures

from dml.data.sources import Entry, Files
from dml.inference.trained import load_trained
from dml.look.copies import Copy
from dml.look.findings import NEIGHBOURS, Confused, Findings, Suspect
from dml.look.images import Gallery
from dml.look.page import Looked, data_of, write_page
from dml.look.serve import Server
from dml.look.sheets import ACROSS, PER_SHEET, THUMB

pytestmark = pytest.mark.slow


def test_everything_can_be_clicked(page):  # noqa: F811
    """Two runs side by side, opened from files; a class name that is code stays text."""
    with opened(f"file://{page}/index.html") as browser:
        assert browser.inner_text("h1") == "first beside second"
        assert browser.inner_text("#count") == "26 found"
        assert browser.locator("#scores tr").count() == 3
        first = browser.locator(".row").first
        assert first.locator(".run").count() == 2
        assert first.locator(".run").first.locator("figure").count() == 5
        for order in browser.locator("#order option").all_inner_texts():
            browser.select_option("#order", order)
            assert browser.locator(".row").count() > 3
            assert browser.locator(".row .note b").first.inner_text() != "a single one"
        browser.fill("#class", "POT")
        assert browser.inner_text("#count") == "9 found"
        names = browser.locator(".row .note b").all_inner_texts()
        assert set(names) == {"pot"}
        browser.fill("#class", "")
        for tab in ("Confused classes", "Near-duplicates", "Suspicious labels"):
            browser.click(f"button:text('{tab}')")
            assert browser.locator("button[aria-selected=true]").inner_text() == tab
            assert browser.locator(".row").count() > 0
        browser.click("button:text('Confused classes')")
        captions = browser.locator(".row .wrong figcaption").all_inner_texts()
        assert all(re.search(r"\n-?[01]\.\d{3}$", text) for text in captions), captions
        browser.click("button:text('Near-duplicates')")
        browser.locator("figure").first.click()
        assert browser.locator("dialog[open] .row").count() == 2
        browser.click("dialog button:text('only')")
        assert browser.locator("dialog[open]").count() == 0
        assert browser.input_value("#class") in ("cup", "pot")
        browser.fill("#class", "nothing has this name")
        assert browser.inner_text("#count") == "0 found"
        assert browser.inner_text("main") == "Nothing was found."


def test_the_map_shows_what_is_under_the_mouse(page):  # noqa: F811
    with opened(f"file://{page}/index.html") as browser:
        browser.click("button:text('Map')")
        assert browser.locator("canvas").count() == 2
        at = browser.evaluate(
            "() => { const r = DATA.runs[0].map, c = document.querySelector('canvas');"
            "const b = c.getBoundingClientRect();"
            "return [b.x + 11 + r[8] / 65535 * (c.width - 20), b.y + 11 + r[9] / 65535 * (c.height - 20)]; }"
        )
        browser.mouse.move(*at)
        shown = browser.locator(".hover figcaption").inner_text()
        assert shown in ("cup", "pot", "<img src=x onerror=alert(1)>")
        browser.mouse.down()
        browser.mouse.move(at[0] + 40, at[1] + 30)
        browser.mouse.up()
        assert browser.locator("dialog[open]").count() == 0  # a drag is no click
        browser.mouse.move(at[0] + 40, at[1] + 30)
        assert browser.locator(".hover figcaption").inner_text() == shown
        browser.mouse.down()
        browser.mouse.up()
        assert browser.locator("dialog[open] b").inner_text() == shown
        browser.keyboard.press("Escape")
        browser.mouse.wheel(0, -300)
        browser.mouse.move(1, 1)
        assert browser.locator(".hover").is_hidden()


def made_up(folder, n, classes=11_000):
    """A page of so many images, whose neighbours lie anywhere: the worst case for the sheets."""
    rng = np.random.default_rng(0)
    labels = np.sort(rng.integers(0, classes, n))
    names = [f"class {c}" for c in range(classes)]
    entries = [Entry(f"{i:08d}", names[c]) for i, c in enumerate(labels)]
    gallery = Gallery(Files(folder), entries, labels, names, n, True, "test")
    S = -np.sort(-rng.random((n, NEIGHBOURS)).astype(np.float32), 1)
    found = Findings(
        {"recall@1": 0.5},
        rng.integers(0, n, (n, NEIGHBOURS)),
        S,
        rng.integers(0, n, n),
        rng.integers(0, n, n),
        S[:, 0],
        [Confused((i, i + 1), 5, [(i, i + 1)] * 5) for i in range(1000)],
        [Suspect(i, 3, 0.5) for i in range(1000)],
    )
    file = io.BytesIO()
    noise = rng.integers(0, 255, (ACROSS * 8, ACROSS * 8, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((ACROSS * THUMB, ACROSS * THUMB)).save(file, "WEBP", quality=80)
    sheets = [file.getvalue()] * math.ceil(n / PER_SHEET)
    looked = Looked("large", found, [Copy((0, 1), 0.99)], rng.random((n, 2)).astype(np.float32))
    write_page(folder / "page", data_of(gallery, [], n, [looked]), sheets)
    return folder / "page"


def test_a_page_of_60000_images_opens_and_scrolls(tmp_path):
    """In seconds, and with a few rows in the page at a time. The bound is generous: machines differ."""
    n = 60_000
    folder = made_up(tmp_path, n)
    started = time.monotonic()
    with opened(f"file://{folder}/index.html") as browser:
        assert browser.inner_text("#count") == "60,000 found"
        taken = time.monotonic() - started
        timing = browser.evaluate(
            "() => performance.getEntriesByType('navigation')[0].loadEventEnd"
        )
        print(f"browser started and page opened in {taken:.1f} s, page alone {timing / 1000:.2f} s")
        assert timing < 20_000
        for share in (0.3, 0.7, 1.0):
            rows = browser.evaluate(
                "async (share) => { const m = document.querySelector('main');"
                "m.scrollTop = share * m.scrollHeight; await new Promise(requestAnimationFrame);"
                "await new Promise(requestAnimationFrame);"
                "return document.querySelectorAll('.row').length; }",
                share,
            )
            assert 3 <= rows < 20
        browser.fill("#class", "class 77")
        assert browser.locator(".row .note b").first.inner_text().startswith("class 77")
        browser.fill("#class", "")
        browser.click("button:text('Map')")
        assert browser.inner_text("#count") == "60,000 images"


@pytest.fixture
def server(page, runs):  # noqa: F811
    model = load_trained(runs[0])
    data = json.loads((page / "data.js").read_text()[len("const DATA = ") : -2])
    X = np.random.default_rng(0).normal(size=(data["images"], 16)).astype(np.float32)
    with Server(("127.0.0.1", 0)) as served:
        served.show(page, model, X, 0)
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield served
        served.shutdown()


def test_a_dropped_photo_finds_its_neighbours(server, photos, tmp_path):  # noqa: F811
    with opened(server.url) as browser:
        assert browser.is_visible("#photo")
        browser.set_input_files("#photo input", photos / "cup" / "0.png")
        browser.wait_for_selector("#answer figure")
        assert browser.locator("#answer figure").count() == NEIGHBOURS
        data = list((photos / "cup" / "1.png").read_bytes())
        browser.evaluate(
            "(bytes) => { const transfer = new DataTransfer();"
            "transfer.items.add(new File([new Uint8Array(bytes)], 'a.png', {type: 'image/png'}));"
            "document.dispatchEvent(new DragEvent('drop', {dataTransfer: transfer})); }",
            data,
        )
        browser.wait_for_selector("#answer figure:nth-of-type(10)")
        assert browser.locator("#answer img").count() == 1


def test_a_page_from_files_has_no_field(page):  # noqa: F811
    with opened(f"file://{page}/index.html") as browser:
        assert not browser.is_visible("#photo")
