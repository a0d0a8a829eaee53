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
from dml.gpw.checks import row_norms


@dataclass(frozen=True, eq=False)
class Groups:
    """The order that groups a batch by class, classes in order of first appearance.

    It is found on the CPU and copied to the device of the embeddings.

    order: for every grouped position, the position in the batch.
    start, end: for every grouped position, the interval of its class.
    K: the size of the largest class.
    first: the position of the first sample of every class, on the CPU; None unless the batch arrived
        grouped.
    on_cpu: the same on the CPU; None if it is there.
    """

    order: Tensor
    start: Tensor
    end: Tensor
    K: int
    first: Tensor | None = None
    on_cpu: Groups | None = None

    @staticmethod
    def of(
        labels: Tensor, last: Groups | None = None, device: torch.device | None = None
    ) -> Groups:
        """Return `last` if the labels have the same runs, so that what was cached for it stays valid.

        device: of the embeddings; None: that of the labels. Labels on a GPU are waited for.
        """
        device, labels = device or labels.device, labels.cpu()
        if last is not None and last.order.device == device and last.host.match(labels):
            return last
        return grouped(labels).to(device)

    @property
    def host(self) -> Groups:
        """The same on the CPU, where reading a number takes no waiting."""
        return self.on_cpu or self

    def to(self, device: torch.device) -> Groups:
        if device.type == "cpu":
            return self
        order, start, end = copied(torch.stack([self.order, self.start, self.end]), device)
        return Groups(order, start, end, self.K, self.first, on_cpu=self)

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


def grouped(labels: Tensor) -> Groups:
    m = len(labels)
    run, size = torch.unique_consecutive(labels, return_counts=True)
    if distinct(run):  # the batch arrived grouped
        end = size.cumsum(0)
        first = end - size
        start, end = ((x.repeat_interleave(size, output_size=m)) for x in (first, end))
        return Groups(torch.arange(m), start, end, int(size.max()), first)
    _, label, size = torch.unique(labels, return_inverse=True, return_counts=True)
    position = torch.arange(m)
    first = torch.full_like(size, m).scatter_reduce(0, label, position, "amin")
    order = first[label].argsort(stable=True)
    start = torch.empty_like(first)
    by_appearance = first.argsort()
    start[by_appearance] = size[by_appearance].cumsum(0) - size[by_appearance]
    label = label[order]
    return Groups(order, start[label], (start + size)[label], int(size.max()))


def distinct(labels: Tensor) -> bool:
    return bool(labels.sort().values.diff().all())


def copied(x: Tensor, device: torch.device) -> Tensor:
    """From the CPU to a GPU without waiting."""
    pinned = x.pin_memory() if device.type == "cuda" else x
    return pinned.to(device, non_blocking=True)


class GlobalBatch:
    """The embeddings of all processes grouped by class, and where each process's rows are in them.

    X: m x d, grouped. rows: W x b, the grouped positions of every process's samples, ascending.
    gathered, labels: the embeddings and labels in the order of the processes; the labels are on the CPU if
    they were known there. norms: the lengths of the embeddings, in the same order.
    all_labels: those of all processes, if they are known on the CPU; otherwise they are gathered.
    """

    def __init__(
        self,
        embeddings: Tensor,
        labels: Tensor,
        wire: Wire,
        last: Groups | None = None,
        all_labels: Tensor | None = None,
    ) -> None:
        if all_labels is None:
            X, y = (x.flatten(0, 1) for x in wire.gather(embeddings, labels))
        else:
            X, y = wire.gather(embeddings)[0].flatten(0, 1), all_labels
        self.gathered, self.labels = X, y
        self.norms = row_norms(X)
        self.groups = Groups.of(y, last, X.device)
        order = self.groups.order
        if self.groups.arrived_grouped:
            self.X, self.rows = X, order.view(wire.size, -1)
            self.rows_on_host = self.groups.host.order.view(wire.size, -1)
        else:
            place = self.groups.host.order.argsort().view(wire.size, -1)
            self.rows_on_host = place.sort(dim=1).values
            self.X = X[order]
            self.rows = self.rows_on_host if X.is_cpu else copied(self.rows_on_host, X.device)
        self.rank = wire.rank

    @property
    def processes(self) -> int:
        return len(self.rows)

    @property
    def own_rows(self) -> Tensor:
        return self.rows[self.rank]

    @property
    def own_rows_on_host(self) -> Tensor:
        return self.rows_on_host[self.rank]

    def own(self, span: slice) -> slice | Tensor:
        """Some of the own rows: a slice where they are consecutive, so that nothing is copied."""
        if not self.groups.arrived_grouped:
            return self.own_rows[span]
        first = self.rank * self.rows.shape[1]
        return slice(first + span.start, first + span.stop)

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
