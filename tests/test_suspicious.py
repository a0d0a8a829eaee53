"""Warnings about set-ups that are probably mistakes, and none about the usual ones."""

import numpy as np
import pytest
from fleet import ROOT
from pictures import as_version_1, encode, make_folder, put, put_index

from dml.config import load
from dml.data import suspicious as module
from dml.data.splits import read_splits
from dml.data.suspicious import suspicious
from shards.build import build
from shards.index import load_index
from shards.sources import folder

ICONS = ROOT / "shards" / "bundled" / "icons-mini"


def warnings(shards, *sets):
    sets = [f"data.shards={shards}", "batch.classes=2", "batch.per_class=3", *sets]
    config = load(ROOT / "configs" / "icons_mini.yaml", sets)
    return suspicious(read_splits(config), config)


@pytest.fixture
def out(tmp_path):
    build(folder.collect(make_folder(tmp_path / "in")), "folder", tmp_path / "out")
    return tmp_path / "out"


def test_the_demo_is_not_suspicious():
    config = load(ROOT / "configs" / "icons_mini.yaml", [f"data.shards={ICONS}"])
    assert suspicious(read_splits(config), config) == []


def test_usual_shards_are_not_suspicious(out):
    assert warnings(out, "data.dataset=folder") == []


def test_more_images_per_class_than_most_classes_have(tmp_path):
    make_folder(tmp_path / "in", classes=5, images=4)
    for c in range(2):
        for i in range(4, 9):
            put(tmp_path / f"in/train/train{c}/{i}.jpg", encode(10_000 + 10 * c + i))
    build(folder.collect(tmp_path / "in"), "folder", tmp_path / "out")
    few = ("data.dataset=folder", "batch.per_class=4")
    assert warnings(tmp_path / "out", *few) == []
    (line,) = warnings(tmp_path / "out", *few, "batch.per_class=5")
    assert line == (
        "warning: batch.per_class is 5, but 3 of 5 classes have fewer images (the median is 4): a batch "
        "holds the same images of a class several times; lower batch.per_class"
    )
    # classes that are held out for validation do not count
    held = warnings(tmp_path / "out", *few, "batch.per_class=5", "eval.validation_classes=0.4")
    assert all(" of 3 classes" in line for line in held)


def test_a_dataset_that_is_not_that_of_the_shards(out):
    (line,) = warnings(out, "data.dataset=sop")
    assert line == (
        f"warning: data.dataset is sop, but {out} was built from folder: Recall@K and reports would be "
        "those of sop; set data.dataset=folder, or other data.shards"
    )
    assert "built from icons" in warnings(ICONS, "data.dataset=cub200")[0]


def copies(tmp_path, count, **options):
    """The first images of the training split are in the test split as well."""
    root = make_folder(tmp_path / "in", **options)
    sources = sorted((root / "train").rglob("*.*"))[:count]
    for i, path in enumerate(sources):
        last = "gallery" if "splits" in options else "test"
        name = "class0" if "splits" in options else "test0"
        put(root / last / name / f"copy{i}{path.suffix}", path.read_bytes())
    build(folder.collect(root), "folder", tmp_path / "out")
    return tmp_path / "out"


def test_test_images_that_are_trained_on(tmp_path):
    (line,) = warnings(copies(tmp_path, 2), "data.dataset=folder")
    assert line == (
        "warning: 2 of 14 test images are in the training split as well (image 00000016 of class "
        "'test0' is image 00000000 of 'train0'): the scores will be too good; remove the copies and "
        "build the shards again"
    )


def test_a_gallery_that_is_trained_on(tmp_path):
    out = copies(tmp_path, 1, splits=("train", "query", "gallery"))
    (line,) = warnings(out, "data.dataset=folder")
    assert "1 of 25 test images" in line


def test_many_copies_are_not_all_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "COMPARED", 3)
    (line,) = warnings(copies(tmp_path, 9), "data.dataset=folder")
    assert "at least 3 of 21 test images" in line


def test_equal_checksums_are_not_enough(out):
    """Two images of one size get the same checksum: the bytes decide."""
    rows, a, b = load_index(out).rows.copy(), 12, 0
    rows["size"] = rows["size"].min()
    rows["crc32"] = np.arange(len(rows))
    rows["crc32"][a] = rows["crc32"][b]
    put_index(out, rows)
    index = load_index(out)
    reader = {a: b"one image", b: b"another"}.__getitem__
    assert list(identical_with(reader, index, np.array([a]), np.array([b]))) == []
    reader = {a: b"one image", b: b"one image"}.__getitem__
    assert list(identical_with(reader, index, np.array([a]), np.array([b]))) == [(a, b)]


def identical_with(read, index, some, others):
    """`identical` with images from memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.ImageReader, "read", lambda self, row: read(row))
        return list(module.identical(index, some, others))


def test_without_checksums_nothing_is_compared(tmp_path):
    out = copies(tmp_path, 2)
    as_version_1(out)
    assert warnings(out, "data.dataset=folder") == []
