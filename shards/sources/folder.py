"""Your own images: root/SPLIT/CLASS/IMAGE, with splits train and test, or train, query and gallery.
Hidden files are ignored; files without the suffix of an image are left out and reported."""

from __future__ import annotations

import os
from pathlib import Path

from shards.item import Collection, FileItem, Item, ShardError, escaped
from shards.sources.layout import need_folder

SPLITS = (("train", "test"), ("train", "query", "gallery"))
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm"}
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


def collect(root: Path) -> Collection:
    need_folder(root)
    found = {path.name for path in _entries(root, root) if path.is_dir()}
    splits = next((splits for splits in SPLITS if set(splits) == found), None)
    if splits is None:
        raise ShardError(
            f"--root {root} has the folders {', '.join(sorted(found)) or '(none)'}, but it needs "
            "train and test, or train, query and gallery"
        )
    items: list[Item] = []
    left_out: list[str] = [path.name for path in _entries(root, root) if not path.is_dir()]
    for split in splits:
        before = len(items)
        for folder in _entries(root / split, root):
            if not folder.is_dir():
                left_out.append(f"{split}/{folder.name}")
                continue
            for path in _entries(folder, root):
                name = f"{split}/{folder.name}/{path.name}"
                if path.is_dir():
                    raise ShardError(f"{path} is a folder where an image should be")
                if path.suffix.lower() in SUFFIXES and path.is_file():
                    item = FileItem(split=split, class_name=folder.name, name=name, path=path)
                    items.append(item)
                else:
                    left_out.append(name)
        if len(items) == before:
            raise ShardError(f"{root / split} has no images: it should have CLASS/IMAGE inside")
    more = ", ..." if len(left_out) > SHOWN else ""
    names = ", ".join(map(escaped, left_out[:SHOWN]))
    note = f"left out {len(left_out):,} files that are not images: {names}{more}"
    return Collection(items, notes=[note] if left_out else [])
