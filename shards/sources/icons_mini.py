"""The icons that come with the project in `shards/bundled/icons-mini`, small enough for a repository.

They are a part of the icons source with the same split, so that a model trained on one can be tested
on the other. They come only from sets whose licence allows redistribution with a notice, and only
from concepts that many families draw, because their labels are the most reliable."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import numpy as np

from shards.item import Collection, Item, ShardError
from shards.sources import icons
from shards.sources.icons_drawing import ink
from shards.sources.icons_twins import standardised

LICENCES = frozenset(["MIT", "Apache-2.0", "ISC", "CC0-1.0"])
PIXELS, COARSE_PIXELS = 32, 8
RELIABLE = 5  # images under these licences that a class needs
CLASSES = 500  # per split
# An image takes 3 KB of tar, five sixths of it headers and padding, so 8 MB hold 2,500 images.
IMAGES = {"train": 3, "test": 2}


def collect(root: Path, seed: int = 0) -> Collection:
    full = icons.collect(root, PIXELS, seed)
    classes: defaultdict[tuple[str, str], list[icons.IconItem]] = defaultdict(list)
    for item in full.items:
        if isinstance(item, icons.IconItem) and item.extra["licence"] in LICENCES:
            classes[item.split, item.class_name].append(item)
    draw, items = random.Random(seed), list[Item]()
    for split, images in IMAGES.items():
        found = [each for each in classes if each[0] == split and len(classes[each]) >= RELIABLE]
        if len(found) < CLASSES:
            raise ShardError(
                f"{root}: only {len(found)} {split} classes have {RELIABLE} images, but {CLASSES} are "
                "needed; give the whole package"
            )
        for each in sorted(draw.sample(found, CLASSES)):
            agreed = agreeing(classes[each])
            items += [agreed[i] for i in sorted(draw.sample(range(len(agreed)), images))]
    return Collection(
        items,
        notes=[
            *full.notes,
            f"of these {len(items):,} images, {PIXELS} px, under {', '.join(sorted(LICENCES))}",
        ],
    )


def agreeing(items: list[icons.IconItem]) -> list[icons.IconItem]:
    """The half (at least three) that looks most like the others at a coarse resolution. This leaves
    out drawings that share only a name, such as a cube among faces."""
    x = standardised(np.stack([ink(item.svg, COARSE_PIXELS) for item in items]))
    likeness = (x @ x.T).sum(1)
    best = np.argsort(-likeness, kind="stable")[: max(3, len(items) // 2)]
    return [items[i] for i in sorted(best.tolist())]
