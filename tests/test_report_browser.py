"""The page of a report in a real browser, opened from a file."""

import csv
import xml.etree.ElementTree as ET

import pytest
from browser import opened
from test_report import report, runs, scored  # noqa: F401  fixtures

pytestmark = pytest.mark.slow


@pytest.fixture
def page(runs, report, tmp_path):  # noqa: F811
    """A report of two batch sizes with curves, and of a map."""
    for size, final in ((4, 0.5), (8, 0.6)):
        curve = [
            {"step": t, "split": "test", "recall@1": final * t / 100} for t in range(0, 101, 10)
        ]
        for seed in (0, 1):
            sets = [f"batch.classes={size}", f"run.seed={seed}"]
            root = runs(f"bs{5 * size}-seed{seed}", sets, scored(final + seed / 10), curve)
    report(root)
    with opened(f"file://{tmp_path}/out/report.html", (1200, 900)) as shown:
        yield shown


def figure_of(page, title):
    found = page.locator("figure", has_text=title)
    found.scroll_into_view_if_needed()
    return found


def download(page, figure, kind):
    with page.expect_download() as saved:
        figure.locator("button", has_text=kind).click()
    return saved.value.path().read_text()


def test_values_zoom_and_files(page):
    figure = figure_of(page, "against images seen")
    svg = figure.locator("svg").first
    points = [p.bounding_box() for p in figure.locator("circle").all()]
    last = points[-1]  # of the second batch size: 100 steps of 40 images
    page.mouse.move(last["x"] + 2, last["y"] + 2)
    assert (
        figure.locator("output").inner_text() == "bs40, step 100, 4,000 images: 60% ± 0.00, n = 2"
    )
    box = svg.bounding_box()
    middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] - 5, box["y"] + 5)
    page.mouse.down()
    page.mouse.move(*middle)
    page.mouse.up()
    ticks = figure.locator(".ticks text.end").all_text_contents()
    assert all(30 <= float(text.rstrip("%")) <= 62 for text in ticks)
    there = figure.locator("circle").nth(len(points) - 1).bounding_box()
    page.mouse.move(there["x"] + 2, there["y"] + 2)  # the same point shows the same value
    assert figure.locator("output").inner_text().startswith("bs40, step 100, 4,000 images: 60%")
    drawn = ET.fromstring(download(page, figure, "SVG"))
    assert drawn.tag.endswith("svg")
    assert {"bs20", "bs40"} <= {"".join(each.itertext()) for each in drawn}
    figure.locator("button", has_text="reset zoom").click()
    assert [p.bounding_box() for p in figure.locator("circle").all()] == points
    rows = list(csv.DictReader(download(page, figure, "CSV").splitlines()))
    assert len(rows) == len(points) == 22
    assert rows[-1] == {
        "series": "bs40",
        "images": "4000",
        "mean": "0.6",
        "low": "0.6",
        "high": "0.6",
    }
