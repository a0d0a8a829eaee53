"""CUB-200-2011: images.txt joined with image_class_labels.txt by image id; classes 1 to 100 are for
training."""

from __future__ import annotations

from pathlib import Path

from shards.item import Collection, FileItem, ShardError
from shards.sources.layout import need, need_folder, relative, rows

TRAIN_CLASSES = 100


def collect(root: Path) -> Collection:
    need_folder(root)
    images, labels, folder = (
        need(root / name, "the unpacked CUB_200_2011")
        for name in ("images.txt", "image_class_labels.txt", "images")
    )
    class_of = {image: class_id for _, (image, class_id) in rows(labels, columns=2)}
    items = []
    for where, (image, text) in rows(images, columns=2):
        path, class_id = relative(text, where), class_of.get(image, "")
        if not class_id.isdecimal():
            raise ShardError(f"{where}: image {image} has no class number in {labels}")
        items.append(
            FileItem(
                split="train" if int(class_id) <= TRAIN_CLASSES else "test",
                class_name=str(path.parent),
                name=str(path),
                path=folder / path,
            )
        )
    return Collection(items, expected={"train": (100, 5864), "test": (100, 5924)})
