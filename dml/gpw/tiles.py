"""How a batch lies in memory: grouped by class, and cut into blocks of rows.

With the samples of a class side by side, the positives of an anchor are one interval of columns:
they are read by index into K slots, and a tile that meets no such interval holds negatives only and
needs no mask. A batch of P classes x M images comes grouped already.

Shapes: m samples, R rows (anchors) of a block, C columns of a tile, K slots (largest class).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from dml.gpw.algebra import Scope, Side, Statistics, masked
from dml.gpw.pair_loss import PairLoss
from dml.precision import NotFiniteError


def problem_of(embeddings: Tensor, labels: Tensor) -> str | None:
    """What keeps these from being a batch, in a sentence; None if nothing does."""
    if not (isinstance(embeddings, Tensor) and isinstance(labels, Tensor)):
        what = f"{type(embeddings).__name__} and {type(labels).__name__}"
        return f"embeddings and labels must be tensors, not {what}"
    if embeddings.ndim != 2 or labels.ndim != 1 or len(embeddings) != len(labels):
        return (
            "embeddings must be m x d and labels of length m, but their shapes are "
            f"{tuple(embeddings.shape)} and {tuple(labels.shape)}"
        )
    if len(labels) == 0:
        return "the batch is empty (m = 0); a loss needs at least one sample"
    if not embeddings.is_floating_point():
        return f"embeddings must be floating point, not {embeddings.dtype}"
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        return f"labels must be integers (such as torch.int64), not {labels.dtype}"
    if labels.device != embeddings.device:
        return (
            f"embeddings are on {embeddings.device} but labels on {labels.device}; "
            "move them to the same device"
        )
    return None


def check_finite(embeddings: Tensor, processes: int = 1) -> None:
    """Raise NotFiniteError if a row of the global batch holds NaN or infinity, or overflows in S."""
    finite = embeddings.detach().square().sum(dim=1).isfinite()
    if not finite.all():
        bad = (~finite).nonzero().flatten().tolist()
        process, row = divmod(bad[0], len(finite) // processes)
        of = f" of process {process}" if processes > 1 else ""
        raise NotFiniteError(
            f"{len(bad)} of {len(finite)} embeddings hold NaN or infinity, or are too large (first in "
            f"row {row}{of}); the model has diverged or its input is damaged"
        )


def check_batch(embeddings: Tensor, labels: Tensor) -> None:
    problem = problem_of(embeddings, labels)
    if problem is not None:
        raise ValueError(problem)
    check_finite(embeddings)


@dataclass(frozen=True)
class Groups:
    """A batch grouped by class, in order of first appearance.

    order: the grouped position -> the position in the batch.
    start, end: for every grouped position, the interval of its class.
    K: the size of the largest class.
    """

    order: Tensor
    start: Tensor
    end: Tensor
    K: int

    @staticmethod
    def of(labels: Tensor) -> Groups:
        _, label, size = torch.unique(labels, return_inverse=True, return_counts=True)
        m = len(labels)
        position = torch.arange(m, device=labels.device)
        first = torch.full_like(size, m).scatter_reduce(0, label, position, "amin")
        order = first[label].argsort(stable=True)
        start = torch.empty_like(first)
        by_appearance = first.argsort()
        start[by_appearance] = size[by_appearance].cumsum(0) - size[by_appearance]
        label = label[order]
        return Groups(order, start[label], (start + size)[label], int(size.max()))

    @property
    def m(self) -> int:
        return len(self.order)

    def anchors(self, loss: PairLoss) -> Tensor | None:
        """Which samples are anchors, by grouped position; None: all. One without a positive is not,
        unless the loss is of the whole batch and has no anchors."""
        has_positive = self.end - self.start > 1
        return None if loss.of_batch or has_positive.all() else has_positive


@dataclass(frozen=True)
class Block:
    """The similarities of some rows, ascending grouped positions, with all m columns."""

    S: Tensor
    rows: Tensor
    groups: Groups

    @cached_property
    def slots(self) -> Tensor:
        """R x K: the columns of each row's class. A smaller class leaves slots over, which run into
        the next class or stay at the last column; they are not valid."""
        K = torch.arange(self.groups.K, device=self.rows.device)
        return (self.groups.start[self.rows, None] + K).clamp(max=self.groups.m - 1)

    def positives(self) -> tuple[Tensor, Tensor]:
        """R x K similarities, and which of the slots hold a positive pair."""
        rows = self.rows[:, None]
        size = (self.groups.end - self.groups.start)[rows]
        slot = torch.arange(self.groups.K, device=self.rows.device)
        return self.S.gather(1, self.slots), (slot < size) & (self.slots != rows)

    def negatives(self, width: int) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Tiles of at most `width` columns: where, similarities, which are negative (None: all)."""
        start, end = self.groups.start[self.rows, None], self.groups.end[self.rows, None]
        band = int(start[0]), int(end[-1])
        for columns in spans(self.groups.m, width):
            S = self.S[:, columns]
            if columns.stop <= band[0] or columns.start >= band[1]:
                yield columns, S, None
            else:
                c = torch.arange(columns.start, columns.stop, device=S.device)
                yield columns, S, (c < start) | (c >= end)


def spans(n: int, width: int) -> list[slice]:
    """[0, n) in equal parts of at most `width`: a sliver would be multiplied by another kernel,
    with other rounding, and the two sides of a pair could then be mined differently."""
    parts = -(-n // width)
    edges = [n * i // parts for i in range(parts + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def of_rows(loss: PairLoss, t: Statistics, side: Side) -> Statistics:
    """The statistics of a block's own rows, to broadcast against R x K or R x C similarities."""
    views = {}
    for name, x in t.items():
        if loss.scopes[name] is Scope.BATCH:
            views[name] = x
        elif loss.scopes[name] is Scope.POSITIVE_PAIR and side is Side.POSITIVE:
            views[name] = x  # its slots are the pairs
        else:
            views[name] = x.unsqueeze(1)
    return views


def of_columns(loss: PairLoss, t: Statistics, columns: slice) -> Statistics:
    """The statistics of the anchors in these columns, against R x C similarities."""
    return {
        name: x if loss.scopes[name] is Scope.BATCH else x[columns].unsqueeze(0)
        for name, x in t.items()
    }


def of_partners(loss: PairLoss, t: Statistics, block: Block) -> Statistics:
    """The statistics of the anchors in a block's slots, against R x K similarities.

    Row i lies in its partners' slot number i - start: the class is the same.
    """
    own_slot = (block.rows - block.groups.start[block.rows])[:, None]
    views = {}
    for name, x in t.items():
        if loss.scopes[name] is Scope.BATCH:
            views[name] = x
        elif loss.scopes[name] is Scope.POSITIVE_PAIR:
            views[name] = x[block.slots, own_slot]
        else:
            views[name] = x[block.slots]
    return views


def block_statistics(loss: PairLoss, block: Block, width: int) -> dict[str, Tensor]:
    """All statistics of a block's rows: stage after stage, tile after tile."""
    t: dict[str, Tensor] = {}
    for side, statistics in loss.stages:
        known = of_rows(loss, t, side)
        states = None
        for S, keep in tiles(block, side, width):
            new = {name: s.of(S, keep, known) for name, s in statistics.items()}
            if states is None:
                states = new
            else:
                states = {n: s.merge(states[n], new[n]) for n, s in statistics.items()}
        assert states is not None
        t |= {name: s.finish(states[name]) for name, s in statistics.items()}
    return t


def weigh_negatives(
    loss: PairLoss, S: Tensor, t: Statistics, keep: Tensor | None, anchors: Tensor | None
) -> Tensor:
    """The weights of a tile's negative pairs; zero for what is not one, or not of an anchor."""
    return masked(masked(loss.negative_weight(S, t), keep, 0), anchors, 0)


def tiles(block: Block, side: Side, width: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    if side is Side.POSITIVE:
        yield block.positives()
    else:
        for _, S, keep in block.negatives(width):
            yield S, keep
