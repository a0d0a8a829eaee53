"""Which images a page shows, and who searches whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dml.data.sources import Entry, Rows, Source, find_images, in_shards
from dml.errors import RunError

Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Gallery:
    """The images of a page. The first `queries` of them search: each other if `mutual`, else those that
    follow. others: images of other splits, each with its split; they are only compared with these."""

    source: Source
    entries: Sequence[Entry]
    labels: Labels  # numbers of class_names
    class_names: Sequence[str]
    queries: int
    mutual: bool
    split: str
    others: Sequence[tuple[Entry, str]] = ()
    without_class: int = 0

    @property
    def searched(self) -> slice:
        """Where the images lie that queries find."""
        return slice(0 if self.mutual else self.queries, len(self.entries))


def gallery_of(images: Path, split: str) -> Gallery:
    """The images of a split of shards, or of a folder of photos, which has no splits."""
    source, every = find_images(images, None)
    if not isinstance(source, Rows):
        return _gallery(source, every, "all", None, ())
    index = source.reader.index
    if split == "test" and "query" in index.splits:  # In-Shop: queries search a gallery
        parts = ["query", "gallery"]
    elif split in (*index.splits, "all"):
        parts = [split]
    else:
        raise RunError(
            f"--split {split}: {images} has no such images; give one of "
            f"{', '.join((*index.splits, 'all'))}"
        )
    chosen = [in_shards(index, part)[1] for part in parts]
    rest = [name for name in index.splits if split != "all" and name not in parts]
    others = [(entry, name) for name in rest for entry in in_shards(index, name)[1]]
    queries = len(chosen[0]) if len(parts) == 2 else None
    return _gallery(source, [entry for part in chosen for entry in part], split, queries, others)


def _gallery(
    source: Source,
    every: Sequence[Entry],
    split: str,
    queries: int | None,
    others: Sequence[tuple[Entry, str]],
) -> Gallery:
    entries = [entry for entry in every if entry.class_name is not None]
    names = sorted({entry.class_name or "" for entry in entries})
    if len(names) < 2:
        raise RunError(
            f"{source.root} has images of {len(names)} classes, and look compares classes: give "
            "shards, or a folder with a sub-folder per class"
        )
    number = {name: i for i, name in enumerate(names)}
    return Gallery(
        source,
        entries,
        np.array([number[entry.class_name or ""] for entry in entries], np.int64),
        names,
        len(entries) if queries is None else queries,
        queries is None,
        split,
        others,
        len(every) - len(entries),
    )
