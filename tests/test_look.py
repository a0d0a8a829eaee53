"""The page of a run. Oracles: loops over all pairs, planted errors, and Chromium."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from pictures import put
from PIL import Image
from test_search import ICONS, main, make_run, refused, unit

from dml.data.sources import Entry, Files
from dml.look import program
from dml.look.copies import across_classes, across_splits, near_duplicates, numbered
from dml.look.findings import NEIGHBOURS, findings
from dml.look.images import Gallery, gallery_of
from dml.look.layout import layout
from dml.look.sheets import ACROSS, PER_SHEET, THUMB, draw_sheets
from shards.index import ImageReader, load_index


def gallery(labels, queries=None, mutual=True):
    entries = [Entry(f"{i}.png", str(label)) for i, label in enumerate(labels)]
    names = sorted(set(map(str, labels)))
    numbers = np.array([names.index(str(label)) for label in labels])
    return Gallery(
        Files(Path("/")), entries, numbers, names, queries or len(labels), mutual, "test"
    )


# ---- findings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mutual", [True, False])
def test_neighbours_and_ranks_are_those_of_a_loop(mutual):
    X, labels = unit(60, 8, 3), np.random.default_rng(4).integers(0, 12, 60)
    q = 60 if mutual else 20
    shown = gallery(labels.tolist(), q, mutual)
    found = findings(X, shown, [1, 4])
    y, first = shown.labels, 0 if mutual else q
    for i in range(q):
        pairs = [(float(X[i] @ X[j]), j) for j in range(first, 60) if j != i]
        pairs.sort(reverse=True)
        assert found.places[i].tolist() == [j for _, j in pairs[:NEIGHBOURS]]
        assert found.similarities[i] == pytest.approx([s for s, _ in pairs[:NEIGHBOURS]], abs=1e-6)
        right = [rank for rank, (_, j) in enumerate(pairs) if y[j] == y[i]]
        assert found.ahead[i] == (right[0] if right else 60 - first)
        assert found.own[i] == (pairs[right[0]][1] if right else -1)
    hits = [found.ahead[i] < 4 and found.own[i] >= 0 for i in range(q)]
    assert found.scores["recall@4"] == pytest.approx(np.mean(hits))


def test_copies_of_a_query_do_not_hide_that_it_is_left_out():
    X = np.repeat(unit(1, 8, 0), 30, 0)
    found = findings(X, gallery([0, 1] * 15), [1])
    assert found.places.shape == (30, NEIGHBOURS)
    assert not (found.places == np.arange(30)[:, None]).any()


def test_confused_classes_are_counted_in_both_directions():
    X = np.eye(6, dtype=np.float32)
    X = np.concatenate([X, X + 0.01 * unit(6, 6, 1)])
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    # the twins of 0, 1 and 2 are of other classes: a-b twice, a-c once
    labels = ["a", "a", "a", "d", "e", "f", "b", "b", "c", "d", "e", "f"]
    found = findings(X, gallery(labels), [1]).confused
    assert [
        ("abcdef"[a] + "abcdef"[b], each.count) for each in found for a, b in [each.classes]
    ] == [
        ("ab", 4),
        ("ac", 2),
    ]
    assert {frozenset(pair) for pair in found[0].examples} == {frozenset((0, 6)), frozenset((1, 7))}


def test_a_planted_label_error_is_the_first_suspect():
    centres = unit(20, 32, 5)
    X = np.repeat(centres, 6, 0) + 0.1 * unit(120, 32, 6)
    X = (X / np.linalg.norm(X, axis=1, keepdims=True)).astype(np.float32)
    labels = np.repeat(np.arange(20), 6)
    assert findings(X, gallery(labels.tolist()), [1]).suspects == []
    labels[13], labels[77] = 9, 4  # they look like 2 and 12
    shown = gallery(labels.tolist())
    suspects = findings(X, shown, [1]).suspects
    assert {(s.query, shown.class_names[s.other]) for s in suspects} == {(13, "2"), (77, "12")}
    assert all(s.suspicion > 0.3 for s in suspects)


def test_one_neighbour_alone_is_no_suspicion():
    """Nor is an image suspected that is alone in its class: nothing speaks for its label or against it."""
    X = unit(4, 16, 0)
    X[1] = X[0]
    assert findings(X, gallery(["a", "b", "a", "c"]), [1]).suspects == []


# ---- near-duplicates ------------------------------------------------------------------------------


def test_near_duplicates_agree_in_their_pixels():
    rng = np.random.default_rng(0)
    grey = rng.integers(0, 255, (6, 32, 32), dtype=np.uint8)
    grey[3] = np.clip(grey[0] // 2 + 40 + rng.integers(0, 5, (32, 32)), 0, 255)  # paler, some noise
    grey[4:] = 255  # two blank images
    pairs = np.array([(0, 1), (0, 3), (2, 4), (4, 5)])
    found = near_duplicates(grey, pairs)
    assert [copy.images for copy in found] == [(4, 5), (0, 3)]
    expected = np.corrcoef(grey[0].ravel(), grey[3].ravel())[0, 1]
    assert found[1].correlation == pytest.approx(expected, abs=1e-5)


def test_pairs_across_classes_and_splits():
    places = np.array([[1, 2], [0, 2], [1, 0]])
    assert across_classes(places, np.array([0, 0, 1])).tolist() == [[0, 2], [1, 2]]
    X, others = unit(5, 8, 0), unit(9, 8, 1)
    others[7] = X[3]
    pairs = across_splits(X, others)
    assert pairs[0].tolist() == [3, 7]
    assert across_splits(X, others[:0]).shape == (0, 2)
    which, (renamed,) = numbered([pairs], 100)
    assert [which[j - 100] for j in renamed[:, 1]] == pairs[:, 1].tolist()


# ---- map, thumbnails ------------------------------------------------------------------------------


def test_neighbours_are_close_on_the_map():
    """Better than the two principal components, on which 12 classes in 16 dimensions overlap."""
    labels = np.repeat(np.arange(12), 20)
    X = np.repeat(unit(12, 16, 2), 20, 0) + 0.15 * unit(240, 16, 3)
    X = X.astype(np.float32)
    near = np.argsort(-X @ X.T, axis=1)[:, 1:6]
    edges = np.stack([np.repeat(np.arange(240), 5), near.ravel()], 1)
    Y = layout(X, edges)
    assert Y.shape == (240, 2)
    assert (Y.min(), Y.max()) == (0, 1)
    distances = np.linalg.norm(Y[:, None] - Y, axis=2) + 9 * np.eye(240)
    assert (labels[distances.argmin(1)] == labels).mean() > 0.95
    assert np.array_equal(Y, layout(X, edges))


def test_copies_of_one_image_have_a_map():
    assert np.isfinite(layout(np.ones((9, 4), np.float32), np.array([(0, 1), (1, 2)]))).all()


def test_sheets_hold_the_images_in_order(tmp_path):
    colours = [(40 * (i % 6), 3 * (i % 80), i % 250) for i in range(PER_SHEET + 5)]
    names = []
    for i, colour in enumerate(colours):
        Image.new("RGB", (20, 10 + i % 30), colour).save(tmp_path / f"{i}.png")
        names.append(f"{i}.png")
    sheets = draw_sheets(Files(tmp_path), names)
    assert len(sheets.files) == 2
    for number, data in enumerate(sheets.files):
        (tmp_path / "sheet").write_bytes(data)
        with Image.open(tmp_path / "sheet") as sheet:
            for k, colour in enumerate(colours[number * PER_SHEET :][:PER_SHEET]):
                row, column = divmod(k, ACROSS)
                middle = (column * THUMB + THUMB // 2, row * THUMB + THUMB // 2)
                assert np.abs(np.subtract(sheet.convert("RGB").getpixel(middle), colour)).max() < 12


# ---- the program ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Shards' images in folders: three classes of test icons, and a name that is code."""
    root = tmp_path_factory.mktemp("photos")
    index = load_index(ICONS)
    reader = ImageReader(index)
    for n, row in enumerate(index.positions("test")[:24].tolist()):
        name = ("cup", "<img src=x onerror=alert(1)>", "pot")[n // 8]
        put(root / name / f"{n}.png", reader.read(row))
    shutil.copy(root / "cup" / "0.png", root / "pot" / "twin.png")
    put(root / "loose.png", reader.read(0))
    put(root / "a single one" / "0.png", reader.read(1))  # sorted before the others
    return root


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return make_run(folder / "first"), make_run(folder / "second", seed=8)


@pytest.fixture(scope="module")
def page(runs, photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("pages") / "page"
    arguments = [runs[0], "--beside", runs[1], "--images", photos, "--out", out, "--workers", 1]
    assert main(program, *arguments) == 0
    return out


def data_of(page):
    text = (page / "data.js").read_text()
    return json.loads(text.removeprefix("const DATA = ").removesuffix(";\n"))


def test_the_page_has_what_was_found(page, capsys):
    data = data_of(page)
    assert (data["images"], data["queries"], data["split"]) == (26, 26, "all")
    assert [run["name"] for run in data["runs"]] == ["first", "second"]
    twins = {data["names"].index("cup/0.png"), data["names"].index("pot/twin.png")}
    assert any({a, b} == twins for a, b, _ in data["runs"][0]["copies"])
    assert sorted(path.name for path in page.iterdir()) == sorted(
        [
            *("data.js", "images.js", "index.html", "look.css", "look.js", "map.js"),
            *("photo.js", "rows.js", "sheets"),
        ]
    )


def test_no_request_goes_anywhere(page):
    """Nothing but relative names in the page's own files."""
    for path in page.iterdir():
        if path.suffix in (".html", ".css", ".js") and path.name != "data.js":
            assert not re.findall(r"https?:|//[a-z]+\.", path.read_text()), path.name


def test_shards_with_other_splits(runs, tmp_path):
    """The scores are those of dml.recall on the test split; train images that are copies are shown."""
    out = tmp_path / "page"
    assert main(program, runs[0], "--images", ICONS, "--out", out) == 0
    data = data_of(out)
    assert (data["images"], data["split"]) == (1000, "test")
    assert set(data["otherSplits"]) <= {"train"}
    assert data["thumbnails"] == len(data["names"]) == 1000 + len(data["otherSplits"])


def test_queries_that_search_a_gallery(runs, tmp_path):
    from test_shards_sources import make_inshop

    from shards import build

    make_inshop(tmp_path / "inshop")
    words = ["inshop", "--root", tmp_path / "inshop", "--out", tmp_path / "shards"]
    words += ["--allow-counts", "--allow-singles", "--workers", "1"]
    assert build.main([str(word) for word in words]) == 0
    shown = gallery_of(tmp_path / "shards", "test")
    index = load_index(tmp_path / "shards")
    assert shown.queries == len(index.positions("query"))
    assert len(shown.entries) == shown.queries + len(index.positions("gallery"))
    assert not shown.mutual
    words = [runs[0], "--images", tmp_path / "shards", "--out", tmp_path / "page"]
    assert main(program, *words) == 0


def test_mistakes_are_explained(runs, photos, page, tmp_path, capsys):
    def sentence(*arguments):
        said = refused(capsys, program, runs[0], *arguments)
        assert not (tmp_path / "out").exists()
        return said

    out = ("--out", tmp_path / "out")
    assert "is not there" in sentence(*out)  # the shards of the run
    assert "images of 0 classes" in sentence("--images", photos / "cup", *out)
    assert "--split query" in sentence("--images", ICONS, "--split", "query", *out)
    assert "holds a page already" in sentence("--images", photos, "--out", page)
    assert "not what dml look wrote" in sentence("--images", photos, "--out", photos)
    assert "is no address" in sentence("--images", photos, *out, "--serve", "here")
    (tmp_path / "bad" / "a").mkdir(parents=True)
    put(tmp_path / "bad" / "a" / "1.png", "text")
    shutil.copytree(photos / "cup", tmp_path / "bad" / "b")
    assert "1.png cannot be read as an image" in sentence("--images", tmp_path / "bad", *out)
