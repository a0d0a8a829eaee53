"""Cutting S: blocks of whole rows, tiles of them, and the slots of the positive pairs.

Shapes: m samples, R rows (anchors) of a block, C columns of a tile, K slots (largest class).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from dml.gpw.grouping import Groups


def spans(n: int, width: int) -> list[slice]:
    """[0, n) in equal spans of at most `width`. With a narrow rest, another matrix kernel would
    multiply it, with other rounding, and the two sides of a pair could be mined differently."""
    count = -(-n // width)
    edges = [n * i // count for i in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def row_parts(S: Tensor, pairs: int | None) -> list[slice]:
    """The rows of a tile in parts of about `pairs` pairs; None: in one part."""
    if pairs is None:
        return [slice(0, len(S))]
    return spans(len(S), max(1, pairs // S.shape[1]))


class PositiveSlots:
    """For some rows, the columns of their classes: R x K slots.

    columns: of every slot; that of the row itself where its class is smaller than K. So no two slots
    of a row write different values to a place. valid: which slots hold a positive pair.
    anchors: both samples of the pair in a slot, the row and the column, 2 x R x K. places: the slots in
    which these have the pair. A row is in slot number row - start of each of its partners.
    """

    def __init__(self, groups: Groups, rows: Tensor, where: slice | Tensor) -> None:
        start, end = groups.start[where, None], groups.end[where, None]
        self.own = rows[:, None] - start  # the slot of the row itself
        column = start + torch.arange(groups.K, device=rows.device)
        inside = column < end
        self.rows, self.columns = rows, torch.where(inside, column, rows[:, None])
        self.valid = inside & (column != rows[:, None])

    @cached_property
    def anchors(self) -> Tensor:
        return torch.stack([self.rows[:, None].expand_as(self.columns), self.columns])

    @cached_property
    def places(self) -> Tensor:
        slot = torch.arange(self.columns.shape[1], device=self.columns.device)
        return torch.stack([x.expand_as(self.columns) for x in (slot, self.own)])

    @staticmethod
    @lru_cache(maxsize=1)
    def of_blocks(groups: Groups, first: int, count: int, width: int) -> list[PositiveSlots]:
        """Of `count` consecutive rows, for blocks of at most `width` of them. The last are cached: batches
        of P classes x M images are all grouped alike."""
        rows = [slice(first + s.start, first + s.stop) for s in spans(count, width)]
        return [PositiveSlots(groups, groups.order[where], where) for where in rows]


@dataclass(frozen=True)
class Tile:
    """Some columns of a block, and which of its pairs are negative; None: all above -inf."""

    columns: slice
    S: Tensor
    keep: Tensor | None


class RowBlock:
    """The similarities of some rows, ascending grouped positions, with all m columns.

    With `erase_positives`, all that is not a negative pair becomes -inf in S, which serves losses that
    ignore it. Without, tiles that hold such entries come with a mask. on_host: the rows, on the CPU.
    where: the rows as a slice, if they are consecutive. slots: of the rows; None: not yet known.
    """

    def __init__(
        self,
        S: Tensor,
        rows: Tensor,
        groups: Groups,
        erase_positives: bool,
        on_host: Tensor,
        where: slice | Tensor,
        slots: PositiveSlots | None = None,
    ) -> None:
        self.S, self.rows, self.groups, self.erased = S, rows, groups, erase_positives
        self.where = where
        # between these columns lie all classes of the rows
        self.first, self.last = (
            int(groups.host.start[on_host[0]]),
            int(groups.host.end[on_host[-1]]),
        )
        self.slots = slots or PositiveSlots(groups, rows, where)
        self.S_pos = S.gather(1, self.slots.columns)
        if erase_positives:
            S.scatter_(1, self.slots.columns, -torch.inf)

    def tiles(self, width: int) -> Iterator[Tile]:
        """Tiles of at most `width` columns."""
        columns_of_tiles = spans(self.groups.m, width)
        if self.erased:
            yield from (Tile(columns, self.S[:, columns], None) for columns in columns_of_tiles)
            return
        start = self.groups.start  # of the class, which is another one for a negative pair
        for columns in columns_of_tiles:
            S = self.S[:, columns]
            if columns.stop <= self.first or columns.start >= self.last:
                yield Tile(columns, S, None)
            else:
                yield Tile(columns, S, start[self.where, None] != start[columns])
