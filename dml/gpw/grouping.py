"""How a batch lies in memory: gathered from all processes and grouped by class.

With the samples of a class side by side, the positives of an anchor are one interval of columns:
they are found by index, and a tile that meets no such interval holds negatives only and needs no
mask. A batch of P classes x M images comes grouped already.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dml.distributed.collectives import Wire
from dml.errors import NotFiniteError
from dml.gpw.weighting import PairLoss


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


def check_finite(embeddings: Tensor, processes: int = 1) -> float:
    """The largest S_ii, which no S_ij exceeds; NotFiniteError if a row of the global batch holds NaN
    or infinity, or overflows in S."""
    norms = torch.linalg.vector_norm(embeddings.detach(), dim=1)
    norm = float(norms.max())
    largest = norm * norm  # norm**2 would raise an OverflowError of its own
    if not largest <= torch.finfo(norms.dtype).max:
        finite = norms.square().isfinite()
        bad = (~finite).nonzero().flatten().tolist()
        process, row = divmod(bad[0], len(finite) // processes)
        of = f" of process {process}" if processes > 1 else ""
        raise NotFiniteError(
            f"{len(bad)} of {len(finite)} embeddings hold NaN or infinity, or are too large (first in "
            f"row {row}{of}); the model has diverged or its input is damaged"
        )
    return largest


def check_batch(embeddings: Tensor, labels: Tensor) -> None:
    problem = problem_of(embeddings, labels)
    if problem is not None:
        raise ValueError(problem)
    check_finite(embeddings)


@dataclass(frozen=True, eq=False)
class Groups:
    """A batch grouped by class, in order of first appearance.

    order: the grouped position -> the position in the batch.
    start, end: for every grouped position, the interval of its class.
    K: the size of the largest class. first: the position of the first sample of every class, if the
    batch came grouped.
    """

    order: Tensor
    start: Tensor
    end: Tensor
    K: int
    first: Tensor | None = None

    @staticmethod
    def of(labels: Tensor, last: Groups | None = None) -> Groups:
        """The last ones themselves, if this batch came grouped as that: what follows from them
        follows again."""
        if last is not None and last.fit(labels):
            return last
        m = len(labels)
        run, size = torch.unique_consecutive(labels, return_counts=True)
        if distinct(run):  # it comes grouped
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
    def came_grouped(self) -> bool:
        return self.first is not None

    def fit(self, labels: Tensor) -> bool:
        """Whether another batch comes in the same groups."""
        return (
            self.first is not None
            and len(labels) == self.m
            and torch.equal(labels, labels.index_select(0, self.start))
            and distinct(labels.index_select(0, self.first))
        )

    def anchors(self, loss: PairLoss) -> Tensor | None:
        """Which samples are anchors, by grouped position; None: all. One without a positive is not,
        unless the loss is of the whole batch and has no anchors."""
        has_positive = self.end - self.start > 1
        return None if loss.of_batch or has_positive.all() else has_positive


def distinct(labels: Tensor) -> bool:
    return bool(labels.sort().values.diff().all())


class GlobalBatch:
    """The embeddings of all processes grouped by class, and where each process's rows are in them.

    X: m x d, grouped. rows: W x b, the grouped positions of every process's samples, ascending.
    largest: no similarity is above it.
    """

    def __init__(
        self, embeddings: Tensor, labels: Tensor, wire: Wire, last: Groups | None = None
    ) -> None:
        X, y = (x.flatten(0, 1) for x in wire.gather(embeddings, labels))
        self.largest = check_finite(X, wire.size)
        self.groups = Groups.of(y, last)
        order = self.groups.order
        if self.groups.came_grouped:
            self.X, self.rows = X, order.view(wire.size, -1)
        else:
            self.X, self.rows = X[order], order.argsort().view(wire.size, -1).sort(dim=1).values
        self.rank = wire.rank

    @property
    def own_rows(self) -> Tensor:
        return self.rows[self.rank]

    def of_all_rows(self, x: Tensor) -> Tensor:
        """Numbers of every process's own rows, W x b (x ...), in grouped order: m (x ...)."""
        if self.groups.came_grouped:
            return x.flatten(0, 1)
        grouped = torch.empty_like(x).flatten(0, 1)
        grouped[self.rows.flatten()] = x.flatten(0, 1)
        return grouped

    def in_batch_order(self, own: Tensor) -> Tensor:
        """Own rows, from grouped order back to the order in which they were brought."""
        if self.groups.came_grouped:
            return own
        back = torch.empty_like(own)
        back[self.groups.order[self.own_rows] - self.rank * len(own)] = own
        return back
