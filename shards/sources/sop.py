"""Stanford Online Products: Ebay_train.txt and Ebay_test.txt beside the folders of images."""

from __future__ import annotations

from pathlib import Path

from shards.item import Collection, FileItem
from shards.sources.layout import need, need_folder, relative, rows


def collect(root: Path) -> Collection:
    need_folder(root)
    items = []
    for split in ("train", "test"):
        listing = need(root / f"Ebay_{split}.txt", "the unpacked Stanford_Online_Products")
        # the columns: image_id class_id super_class_id path
        for where, (_, class_id, super_class_id, text) in rows(listing, columns=4, header=1):
            path = relative(text, where)
            items.append(
                FileItem(
                    split=split,
                    class_name=class_id,
                    name=str(path),
                    path=root / path,
                    extra={"super_class_id": super_class_id},
                    super_class=super_class_id,
                )
            )
    return Collection(items, expected={"train": (11318, 59551), "test": (11316, 60502)})
