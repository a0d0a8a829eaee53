"""The batches of two towers: every sample x with its y.

The y of two views is another crop of the same image; that of a folder is the sample with the same row
number in that folder. So both towers have the batches of x, and y only has other places to read from, or
other random numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dml.config.towers import Towers
from dml.data.batches import Rows, TrainBatches
from dml.data.pair import PairSpec
from dml.data.vectors import described, form_in
from dml.errors import LaunchError
from shards.cache import Cache, File
from shards.index import Index, load_index


class PairBatches(TrainBatches):
    """By step: this process's slice of the pairs of the global batch, and b labels, which x and y share.

    by_sample: the labels are the numbers of the samples instead of their classes. A sample that is in a
    batch twice, because its class is small, has the same label there.
    """

    def __init__(self, x: TrainBatches, y: TrainBatches, by_sample: bool) -> None:
        assert not isinstance(x.spec, PairSpec)
        assert not isinstance(y.spec, PairSpec)
        self.x, self.y, self.by_sample, self.spec = x, y, by_sample, PairSpec(x.spec, y.spec)
        self.batches, self.rank, self.size = x.batches, x.rank, x.size
        self.own, self.most = x.own, x.most

    def files(self, rows: Rows) -> list[File]:
        return list(dict.fromkeys([*self.x.files(rows), *self.y.files(rows)]))

    def all_labels(self, step: int) -> Rows:
        return self.batches(step)[0] if self.by_sample else super().all_labels(step)

    def into(self, out: NDArray[Any], step: int, part: range) -> Tensor:
        assert isinstance(self.spec, PairSpec)
        x, y = self.spec.split(out)
        labels = self.x.into(x, step, part)
        self.y.into(y, step, part)
        if not self.by_sample:
            return labels
        return torch.from_numpy(self.batches(step, self.own[part.start : part.stop])[0])


def read_partner(towers: Towers, x: Index, cache: Cache | None) -> Index | None:
    """The index of y; None if it has no shards of its own. LaunchError unless its row i can belong with row
    i of x."""
    if towers.folder is None:
        return None
    y = load_index(towers.folder, cache)
    refuse_strangers(x, y)
    refuse_other_kind(x, y, towers.shared)
    if towers.labels == "sample" and "query" in x.splits:
        raise LaunchError(
            f"towers.labels = sample: the gallery of {x.root} holds no partner of a query; set "
            "towers.labels=class"
        )
    return y


def refuse_strangers(x: Index, y: Index) -> None:
    """LaunchError, with the first row that does not fit, unless both have as many rows, with the same
    splits and classes."""
    again = "build both from the same list, in the same order"
    if len(x.rows) != len(y.rows):
        raise LaunchError(
            f"towers.y: row i of {y.root} must belong with row i of {x.root}, but there are "
            f"{len(y.rows):,} rows instead of {len(x.rows):,}; {again}"
        )
    for what, column, ours, theirs in (
        ("split", "split", x.splits, y.splits),
        ("class", "label", x.class_names, y.class_names),
    ):
        number_of = {name: number for number, name in enumerate(ours)}
        as_ours = np.array([number_of.get(name, -1) for name in theirs])
        other = np.flatnonzero(as_ours[y.rows[column]] != x.rows[column])
        if len(other):
            row = int(other[0])
            found, expected = theirs[y.rows[column][row]], ours[x.rows[column][row]]
            raise LaunchError(
                f"towers.y: row {row} of {y.root} has the {what} {found!r}, but row {row} of {x.root} "
                f"has {expected!r}; {again}"
            )


def refuse_other_kind(x: Index, y: Index, shared: bool) -> None:
    """LaunchError if one holds images and the other vectors, or if one encoder cannot take both."""
    forms = form_in(x), form_in(y)
    if (forms[0] is None) != (forms[1] is None):
        has = f"{x.root} has {described(forms[0])} and {y.root} has {described(forms[1])}"
        raise LaunchError(
            f"towers.y: {has}; both must hold images, or both vectors, which dml embed --features makes "
            "of images"
        )
    sizes = [form.size for form in forms if form is not None]
    if shared and len(set(sizes)) > 1:
        raise LaunchError(
            f"towers.shared = true: one encoder cannot take vectors of {sizes[0]:,} and of {sizes[1]:,} "
            "numbers; set towers.shared=false"
        )
