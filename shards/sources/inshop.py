"""In-Shop Clothes Retrieval: list_eval_partition.txt; query and gallery share their classes."""

from __future__ import annotations

from pathlib import Path

from shards.item import Collection, FileItem, ShardError
from shards.sources.layout import need, need_folder, relative, rows

SPLITS = {"train": (3997, 25882), "query": (3985, 14218), "gallery": (3985, 12612)}


def collect(root: Path) -> Collection:
    need_folder(root)
    what = "the In-shop Clothes Retrieval Benchmark with img.zip unpacked"
    lists = [root / "Eval" / "list_eval_partition.txt", root / "list_eval_partition.txt"]
    listing = need(next((path for path in lists if path.exists()), lists[0]), what)
    # img.zip is published inside Img/ and unpacked there or beside it
    base = next((base for base in (root, root / "Img") if (base / "img").is_dir()), root)
    need(base / "img", what)
    items = []
    # the header: a line with the count, then image_name item_id evaluation_status
    for where, (text, item_id, split) in rows(listing, columns=3, header=2):
        path = relative(text, where)
        if split not in SPLITS:
            raise ShardError(f"{where}: the split {split!r} is none of {', '.join(SPLITS)}")
        items.append(FileItem(split=split, class_name=item_id, name=str(path), path=base / path))
    with listing.open(encoding="utf-8") as file:
        announced = file.readline().strip()
    if announced != str(len(items)):
        raise ShardError(f"{listing} announces {announced!r} images but lists {len(items)}")
    return Collection(items, expected=SPLITS)
