"""The icons that the project brings along, small enough for its repository: `shards/bundled/icons-mini`.

A part of the icons source with the same split, so that a model trained on one can be tested on the
other. Only of sets whose licence lets them be passed on with a notice, and only of concepts that
many families draw, whose labels are the surest."""

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
PIXELS, AFAR = 32, 8
SURE = 5  # images under these licences
CLASSES = 500  # a split
# An image costs 3 KB of tar, five sixths of it headers and padding: 8 MB hold 2,500
IMAGES = {"train": 3, "test": 2}


def collect(root: Path, seed: int = 0) -> Collection:
    full = icons.collect(root, PIXELS, seed)
    classes: defaultdict[tuple[str, str], list[icons.IconItem]] = defaultdict(list)
    for item in full.items:
        if isinstance(item, icons.IconItem) and item.extra["licence"] in LICENCES:
            classes[item.split, item.class_name].append(item)
    draw, items = random.Random(seed), list[Item]()
    for split, images in IMAGES.items():
        sure = [each for each in classes if each[0] == split and len(classes[each]) >= SURE]
        if len(sure) < CLASSES:
            raise ShardError(f"{root}: {len(sure)} {split} classes of {SURE}, {CLASSES} are needed")
        for each in sorted(draw.sample(sure, CLASSES)):
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
    """The half (three or more) that looks most like the rest, seen from afar: leaves out the cube
    among the faces, and whatever else shares but a name."""
    x = standardised(np.stack([ink(item.svg, AFAR) for item in items]))
    likeness = (x @ x.T).sum(1)
    best = np.argsort(-likeness, kind="stable")[: max(3, len(items) // 2)]
    return [items[i] for i in sorted(best.tolist())]
