"""Statistics of anchors, t, in the shapes in which they broadcast against a tile.

Shapes: t holds numbers of n anchors, (n,), of their positive pairs, (n, K), and of the batch. A tile
of positives is R x K, one of negatives R x C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dml.gpw.engine.tiles import PositiveSlots
from dml.gpw.grouping import Groups
from dml.gpw.statistics import Scope, Statistics
from dml.gpw.weighting import PairLoss


@dataclass(frozen=True, eq=False)
class AnchorSet:
    """What weights need to know of some anchors.

    t: their statistics. is_anchor: a sample without a positive is no anchor; None: all are, or the loss
    has no anchors (`PairLoss.has_anchors`). share: how much a weight of these anchors counts, if they are
    those of the columns, beside one of the anchors in the rows.
    """

    t: Statistics
    is_anchor: Tensor | None
    share: float = 1.0


def of_batch(loss: PairLoss, t: Statistics, groups: Groups) -> AnchorSet:
    """All samples of a batch, which are compared with each other."""
    every = not loss.has_anchors or bool(groups.host.has_positive.all())
    return AnchorSet(t, None if every else groups.has_positive)


def select(loss: PairLoss, t: Statistics, rows: slice | Tensor) -> Statistics:
    """The statistics of some of the anchors."""
    return {n: x if loss.scopes[n] is Scope.BATCH else x[rows] for n, x in t.items()}


def concatenate(loss: PairLoss, parts: Sequence[Statistics]) -> dict[str, Tensor]:
    """The statistics of all anchors from those of consecutive parts of them."""
    if len(parts) == 1:
        return dict(parts[0])
    return {
        name: torch.stack([t[name] for t in parts]).sum(0)
        if loss.scopes[name] is Scope.BATCH
        else torch.cat([t[name] for t in parts])
        for name in parts[0]
    }


def against_positives(loss: PairLoss, t: Statistics) -> Statistics:
    """Of the anchors in the rows, against R x K: a statistic of positive pairs has that shape."""
    return {n: x.unsqueeze(1) if loss.scopes[n] is Scope.ANCHOR else x for n, x in t.items()}


def against_negatives(loss: PairLoss, t: Statistics) -> Statistics:
    """Of the anchors in the rows, against R x C."""
    return {n: x if loss.scopes[n] is Scope.BATCH else x.unsqueeze(1) for n, x in t.items()}


def of_columns(loss: PairLoss, t: Statistics, columns: slice) -> Statistics:
    """Of the anchors in the columns, against R x C."""
    return {
        n: x if loss.scopes[n] is Scope.BATCH else x[columns].unsqueeze(0) for n, x in t.items()
    }


def of_partners(loss: PairLoss, t: Statistics, slots: PositiveSlots) -> Statistics:
    """Of the anchors in the slots, against R x K."""
    return of_anchors(loss, t, slots.columns, slots.own)


def of_both(loss: PairLoss, t: Statistics, slots: PositiveSlots) -> Statistics:
    """Of the anchors in the rows and of those in the slots, against 2 x R x K."""
    return of_anchors(loss, t, slots.anchors, slots.places)


def of_anchors(loss: PairLoss, t: Statistics, anchors: Tensor, places: Tensor) -> Statistics:
    """places: the slot of the pair among the positives of that anchor."""
    views = {}
    for name, x in t.items():
        if loss.scopes[name] is Scope.BATCH:
            views[name] = x
        elif loss.scopes[name] is Scope.POSITIVE_PAIR:
            views[name] = x[anchors, places]
        else:
            views[name] = x[anchors]
    return views
