"""Icons from the npm package `@iconify/json`, with many classes of few images like Stanford Online
Products: a class is a concept, and its images are that concept as different icon families draw it
(docs/icons.md)."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shards.item import Collection, Item, ShardError
from shards.sources.icons_drawing import ink, png
from shards.sources.icons_names import Language, Words
from shards.sources.icons_package import Icon, read
from shards.sources.icons_twins import Twins, synonyms, twins

PIXELS = 64
TWIN_PIXELS = 32
# A drawing needs PIXELS_DARK of 32 x 32 pixels that are at least DARK; hairlines are too faint to see.
DARK, PIXELS_DARK = 128, 12
PER_CLASS = 12


@dataclass(frozen=True, kw_only=True)
class IconItem(Item):
    svg: str
    pixels: int

    def encoded(self) -> bytes:
        return png(self.svg, self.pixels)


@dataclass(frozen=True)
class Drawing:
    concept: str
    icon: Icon
    ink: NDArray[np.uint8]


def collect(root: Path, pixels: int = PIXELS, seed: int = 0) -> Collection:
    """The concepts that at least two families draw; half of them are for training."""
    icons = read(root)
    drawings, refused = one_per_family(icons)
    if not drawings:
        raise ShardError(f"{root}: no two families of icons draw the same concept")
    found = twins(np.stack([each.ink for each in drawings]))
    families = [each.icon.family for each in drawings]
    names = synonyms([each.concept for each in drawings], families, found)
    drawings = [replace(each, concept=names.get(each.concept, each.concept)) for each in drawings]
    classes, copies, contradictions = without_twins(drawings, found)
    classes, rest = chosen(classes, random.Random(seed))

    order = sorted(classes)
    random.Random(seed).shuffle(order)
    items = [
        IconItem(
            split=part,
            class_name=concept,
            name=each.icon.name,
            extra=each.icon.extra,
            svg=each.icon.svg,
            pixels=pixels,
        )
        for part, half in (("train", order[::2]), ("test", order[1::2]))
        for concept in sorted(half)
        for each in classes[concept]
    ]
    notes = (
        f"{len(icons):,} icons, {len(drawings):,} drawings of one concept by different families",
        f"refused as unsafe, animated or too faint: {refused:,}",
        f"synonyms: {len(names):,} concepts merged into others that share their drawings",
        f"drawn alike in one concept, or by one family, and kept once: {copies:,} dropped",
        f"drawn alike in different concepts: {contradictions:,} dropped",
        f"beyond {PER_CLASS} per concept, or too few for one: {rest:,} dropped",
    )
    return Collection(items, notes=notes)


def one_per_family(icons: Sequence[Icon]) -> tuple[list[Drawing], int]:
    """The plainest drawing of each family for every concept that at least two families draw, and the
    number of drawings that were tried and refused."""
    names: defaultdict[str, list[Words]] = defaultdict(list)
    for icon in icons:
        names[icon.family].append(icon.words)
    language = Language(names)
    concepts: defaultdict[str, defaultdict[str, list[Icon]]]
    concepts = defaultdict(lambda: defaultdict(list))
    for icon in icons:
        concepts[language.concept(icon.words)][icon.family].append(icon)

    drawings, refused = [], 0
    for concept, families in sorted(concepts.items()):
        if len(families) < 2:
            continue
        for _, variants in sorted(families.items()):
            # the shortest name has the fewest style words, the lowest number and no plural
            for icon in sorted(variants, key=lambda icon: (len(icon.extra["icon"]), icon.name)):
                try:
                    drawn = ink(icon.svg, TWIN_PIXELS)
                except ShardError:
                    drawn = np.zeros(1, np.uint8)
                if np.count_nonzero(drawn >= DARK) >= PIXELS_DARK:
                    drawings.append(Drawing(concept, icon, drawn))
                    break
                refused += 1
    return drawings, refused


def without_twins(
    drawings: Sequence[Drawing], found: Twins
) -> tuple[dict[str, list[Drawing]], int, int]:
    """The classes without twins, and the numbers of drawings dropped within and across classes.

    Of twins in one class, and of drawings of one family that a merge put in one class, the first is
    kept. Of twins in two classes none is kept.
    """
    inside, across = defaultdict[int, set[int]](set), []
    for i, j, _ in found:
        if drawings[i].concept == drawings[j].concept:
            inside[j].add(i)
        else:
            across.append((i, j))
    seen, first = set[tuple[str, str]](), set[int]()
    for i, each in enumerate(drawings):
        if (each.concept, each.icon.family) not in seen and first.isdisjoint(inside[i]):
            seen.add((each.concept, each.icon.family))
            first.add(i)
    twice = {k for i, j in across if i in first and j in first for k in (i, j)}
    classes: defaultdict[str, list[Drawing]] = defaultdict(list)
    for i in sorted(first - twice):
        classes[drawings[i].concept].append(drawings[i])
    return classes, len(drawings) - len(first), len(twice)


def chosen(
    classes: Mapping[str, list[Drawing]], draw: random.Random
) -> tuple[dict[str, list[Drawing]], int]:
    """At most PER_CLASS drawings of each class, and the number of drawings dropped.

    A class needs two drawings, or three if its name is a single word. Checked by eye, half of the
    single words that only two families draw show two different things (turkey, stiletto), but only
    a tenth of the names with more words.
    """
    kept = {}
    for concept, drawings in sorted(classes.items()):
        if len(drawings) > 2 or (len(drawings) == 2 and " " in concept):
            some = draw.sample(range(len(drawings)), min(len(drawings), PER_CLASS))
            kept[concept] = [drawings[i] for i in sorted(some)]
    return kept, sum(map(len, classes.values())) - sum(map(len, kept.values()))
