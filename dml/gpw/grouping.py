"""The global batch: gathered from all processes and grouped by class.

With the samples of a class side by side, the positives of an anchor are one interval of columns of S.
They are found by index, and a tile that meets no such interval holds only negatives and needs no
mask. A batch of P classes x M images usually arrives grouped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dml.distributed.collectives import Wire
from dml.gpw.checks import largest_similarity


@dataclass(frozen=True, eq=False)
class Groups:
    """The order that groups a batch by class, classes in order of first appearance.

    order: for every grouped position, the position in the batch.
    start, end: for every grouped position, the interval of its class.
    K: the size of the largest class.
    first: the position of the first sample of every class; None unless the batch arrived grouped.
    """

    order: Tensor
    start: Tensor
    end: Tensor
    K: int
    first: Tensor | None = None

    @staticmethod
    def of(labels: Tensor, last: Groups | None = None) -> Groups:
        """Return `last` if the labels have the same runs, so that what was cached for it stays valid."""
        if last is not None and last.match(labels):
            return last
        m = len(labels)
        run, size = torch.unique_consecutive(labels, return_counts=True)
        if distinct(run):  # the batch arrived grouped
            end = size.cumsum(0)
            first = end - size
            order = torch.arange(m, device=labels.device)
            start, end = ((x.repeat_interleave(size, output_size=m)) for x in (first, end))
            return Groups(order, start, end, int(size.max()), first)
        _, label, size = torch.unique(labels, return_inverse=True, return_counts=True)
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

    @property
    def arrived_grouped(self) -> bool:
        return self.first is not None

    def match(self, labels: Tensor) -> bool:
        """Whether another batch arrives in the same groups."""
        return (
            self.first is not None
            and len(labels) == self.m
            and torch.equal(labels, labels.index_select(0, self.start))
            and distinct(labels.index_select(0, self.first))
        )

    @property
    def has_positive(self) -> Tensor:
        """Which samples have a positive, by grouped position."""
        return self.end - self.start > 1


def distinct(labels: Tensor) -> bool:
    return bool(labels.sort().values.diff().all())


class GlobalBatch:
    """The embeddings of all processes grouped by class, and where each process's rows are in them.

    X: m x d, grouped. rows: W x b, the grouped positions of every process's samples, ascending.
    largest_similarity: an upper bound of S.
    """

    def __init__(
        self, embeddings: Tensor, labels: Tensor, wire: Wire, last: Groups | None = None
    ) -> None:
        X, y = (x.flatten(0, 1) for x in wire.gather(embeddings, labels))
        self.largest_similarity = largest_similarity(X, wire.size)
        self.groups = Groups.of(y, last)
        order = self.groups.order
        if self.groups.arrived_grouped:
            self.X, self.rows = X, order.view(wire.size, -1)
        else:
            self.X, self.rows = X[order], order.argsort().view(wire.size, -1).sort(dim=1).values
        self.rank = wire.rank

    @property
    def processes(self) -> int:
        return len(self.rows)

    @property
    def own_rows(self) -> Tensor:
        return self.rows[self.rank]

    def in_grouped_order(self, x: Tensor) -> Tensor:
        """Numbers of every process's rows, W x b (x ...), in grouped order: m (x ...)."""
        if self.groups.arrived_grouped:
            return x.flatten(0, 1)
        grouped = torch.empty_like(x).flatten(0, 1)
        grouped[self.rows.flatten()] = x.flatten(0, 1)
        return grouped

    def in_input_order(self, own: Tensor) -> Tensor:
        """Numbers of the own rows, from grouped order to the order of this process's embeddings."""
        if self.groups.arrived_grouped:
            return own
        back = torch.empty_like(own)
        back[self.groups.order[self.own_rows] - self.rank * len(own)] = own
        return back
