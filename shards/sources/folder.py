"""Your own images:

    root/SPLIT/CLASS/IMAGE      with splits train and test, or train, query and gallery
    root/CLASS/IMAGE            a share of the classes is held out as test
    root.csv or root.parquet    columns path, label and perhaps split; paths are below the file's folder

Hidden files are ignored; files without the suffix of an image are left out and reported.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from shards.item import Collection, FileItem, Item, ShardError, escaped
from shards.photo import SUFFIXES
from shards.sources.layout import need_folder
from shards.sources.tables import SPLITS, collect_table, is_table

SHOWN = 5  # so many of the files that were left out are named


def _entries(folder: Path, root: Path) -> list[Path]:
    """The content of a folder, sorted; links must stay below the root."""
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise ShardError(f"{folder} cannot be read: {error.strerror}") from None
    for path in (folder / name for name in names):
        # realpath, unlike Path.resolve, does not mind a link to itself; it is left out as no image
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root.resolve()):
            raise ShardError(f"{path} is a link that leads outside {root}: copy the images instead")
    return [folder / name for name in names]


def collect(root: Path, test_classes: float | None = None, seed: int = 0) -> Collection:
    """test_classes: the share of the classes to hold out where there are no splits."""
    if is_table(root):
        collection = collect_table(root)
    else:
        need_folder(root)
        collection = _collect_folder(root)
    if all(item.split for item in collection.items):
        if test_classes is not None:
            raise ShardError(f"--test-classes is for images without splits, but {root} has splits")
        return collection
    return hold_out(collection, 0.5 if test_classes is None else test_classes, seed)


def hold_out(collection: Collection, share: float, seed: int) -> Collection:
    """A share of the classes becomes the test split; which ones depends on their names and the seed."""

    def draw(name: str) -> bytes:
        return hashlib.sha256(f"{seed} {name}".encode("utf-8", "surrogateescape")).digest()

    classes = sorted({item.class_name for item in collection.items}, key=draw)
    count = min(max(1, round(share * len(classes))), len(classes) - 1)
    if len(classes) < 2:
        raise ShardError("there is a single class: to train and to test takes at least two")
    test = set(classes[:count])
    items = [
        replace(item, split="test" if item.class_name in test else "train")
        for item in collection.items
    ]
    note = f"held out {count:,} of {len(classes):,} classes as test (share {share}, seed {seed})"
    return replace(collection, items=items, notes=[*collection.notes, note])


def _collect_folder(root: Path) -> Collection:
    found = {path.name for path in _entries(root, root) if path.is_dir()}
    splits: Sequence[str] | None = next((each for each in SPLITS if set(each) == found), None)
    if splits is None and found & {"train", "test", "query", "gallery"}:
        raise ShardError(
            f"--root {root} has the folders {', '.join(sorted(found))}, but it needs train and test, "
            "or train, query and gallery, or else one folder per class"
        )
    items: list[Item] = []
    left_out = [path.name for path in _entries(root, root) if not path.is_dir()]
    for split in splits or ("",):
        before = len(items)
        for path, item in _images(root / split, root, split):
            if item is None:
                left_out.append(path.relative_to(root).as_posix())
            else:
                items.append(item)
        if len(items) == before:
            raise ShardError(
                f"--root {root / split} has no images: it should have CLASS/IMAGE inside"
            )
    more = ", ..." if len(left_out) > SHOWN else ""
    names = ", ".join(map(escaped, left_out[:SHOWN]))
    note = f"left out {len(left_out):,} files that are not images: {names}{more}"
    return Collection(items, notes=[note] if left_out else [])


def _images(top: Path, root: Path, split: str) -> Iterator[tuple[Path, Item | None]]:
    """Every file of top/CLASS, with its item if it is an image."""
    for folder in _entries(top, root):
        if not folder.is_dir():
            if split:
                yield folder, None
            continue
        for path in _entries(folder, root):
            if path.is_dir():
                raise ShardError(f"{path} is a folder where an image should be")
            name, is_image = path.relative_to(root).as_posix(), path.suffix.lower() in SUFFIXES
            item = FileItem(split=split, class_name=folder.name, name=name, path=path)
            yield path, item if is_image and path.is_file() else None
