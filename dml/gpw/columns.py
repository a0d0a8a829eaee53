"""Who is compared with whom, where it is not the batch with itself: anchors and columns.

Anchors are compared with columns, another set of vectors with labels: a memory of earlier batches, the
other tower, proxies of the classes. S = A Y^T is then a rectangle. A column of the anchor's class is a
positive, any other a negative. There is no self pair by place, but anchors and columns may have an
identity, such as the number of an image: an anchor and a column of the same identity are no pair.
Samples of the same identity must have the same label.

The columns stay where they are: 50,000 vectors of a memory are not sorted or copied at every step.
The positives of an anchor are found by index instead, from the labels, on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dml.gpw.grouping import copied


@dataclass(frozen=True, eq=False)
class Matches:
    """The columns of every anchor's class, as intervals of `order`.

    count: how many columns there are. order: those that have the class of an anchor, class by class,
        ascending within a class; and `count`, which is no column, as its last entry.
    start, end: of every anchor, the interval of its class.
    place: of every anchor, its position among the anchors of its class. Where the columns are anchors
        too, these find the anchor in that slot.
    K: the size of the largest class among the columns; at least 1.
    identities: those of the anchors, and those of the entries of `order`; None: no two are the same.
    """

    count: int
    order: Tensor
    start: Tensor
    end: Tensor
    place: Tensor
    K: int
    identities: tuple[Tensor, Tensor] | None

    @staticmethod
    def of(
        labels: Tensor,
        column_labels: Tensor,
        identities: tuple[Tensor, Tensor] | None = None,
        device: torch.device | None = None,
    ) -> Matches:
        """labels: of the anchors. identities: of the anchors and of the columns. device: of the
        embeddings; None: that of the labels. Tensors on a GPU are waited for, those on a CPU are not."""
        device = device or labels.device
        labels, column_labels = labels.cpu(), column_labels.cpu()
        known, of_anchor = torch.unique(labels, return_inverse=True)
        of_column = torch.searchsorted(known, column_labels).clamp_(max=len(known) - 1)
        hit = (known[of_column] == column_labels).nonzero()[:, 0]
        of_hit, by_class = of_column[hit].sort(stable=True)
        order = torch.cat([hit[by_class], hit.new_tensor([len(column_labels)])])
        size = torch.bincount(of_hit, minlength=len(known))
        end = size.cumsum(0)
        of_order = None
        if identities is not None:
            of_anchors, of_columns = (x.cpu() for x in identities)
            last = torch.cat([of_columns[order[:-1]], of_columns.new_zeros(1)])
            of_order = of_anchors, last
        matches = Matches(
            count=len(column_labels),
            order=order,
            start=(end - size)[of_anchor],
            end=end[of_anchor],
            place=places(of_anchor),
            K=max(1, int(size.max())),
            identities=of_order,
        )
        return matches.to(device)

    def to(self, device: torch.device) -> Matches:
        if device.type == "cpu":
            return self
        start, end, place = copied(torch.stack([self.start, self.end, self.place]), device)
        moved = None
        if self.identities is not None:
            of_anchors, of_order = (copied(x, device) for x in self.identities)
            moved = of_anchors, of_order
        order = copied(self.order, device)
        return Matches(self.count, order, start, end, place, self.K, moved)

    def select(self, anchors: slice) -> Matches:
        """Those of some of the anchors."""
        identities = self.identities
        if identities is not None:
            identities = identities[0][anchors], identities[1]
        start, end, place = (x[anchors] for x in (self.start, self.end, self.place))
        return replace(self, start=start, end=end, place=place, identities=identities)

    @property
    def has_column(self) -> Tensor:
        """Which anchors have a column of their class, whatever its identity."""
        return self.end > self.start

    @cached_property
    def slots(self) -> Slots:
        inside = self.start[:, None] + torch.arange(self.K, device=self.start.device)
        valid = inside < self.end[:, None]
        entry = torch.where(valid, inside, len(self.order) - 1)
        if self.identities is not None:
            of_anchors, of_order = self.identities
            valid = valid & (of_order[entry] != of_anchors[:, None])
        return Slots(self.order[entry], valid)


@dataclass(frozen=True, eq=False)
class Slots:
    """For some anchors, the columns of their classes: R x K.

    columns: of every slot; in an empty one `count`, the place of a spare column behind the others.
    valid: which slots hold a positive pair. The others are empty or have the identity of the anchor.
    """

    columns: Tensor
    valid: Tensor


def places(classes: Tensor) -> Tensor:
    """Of every sample, how many samples of its class are before it."""
    of, by_class = classes.sort(stable=True)
    size = torch.bincount(of)
    place = torch.empty_like(classes)
    place[by_class] = torch.arange(len(of)) - (size.cumsum(0) - size)[of]
    return place
