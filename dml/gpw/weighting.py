"""General Pair Weighting: a pair loss is statistics, a value, and a weight for every pair.

    F = sum_i ( sum_neg w_ij S_ij  -  sum_pos w_ij S_ij ),    w_ij = |dL/dS_ij|          (Eq. 3)

MS mining stands in front of any weighting: the weighting then sees the selected pairs only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from dml.gpw.statistics import (
    Count,
    Maximum,
    Minimum,
    Scope,
    Selected,
    Side,
    Statistic,
    Statistics,
    above,
)

# Statistics of one side that are computed in one sweep over the pairs. A statistic may read those
# of the stages before it.
Stage = tuple[Side, Mapping[str, Statistic]]


class Weighting(ABC):
    """How the pairs of an anchor are weighted; each loss of the paper is one of these.

    Where the order does not matter the negative stage comes first: mining then shares its sweep.
    """

    # A loss of scope ANCHOR is the mean over the m anchors of the batch (Eq. 15 and 16; where the
    # paper writes the sum over anchors we take the mean too, so that a learning rate means the
    # same for any batch size). A loss of scope BATCH divides by itself.
    scope: ClassVar[Scope] = Scope.ANCHOR
    # Whether a negative pair with S = -inf is as good as none, in the statistics and in its weight.
    vanishes: ClassVar[bool] = True
    # The statistics that the weights read: those of all anchors, so other processes must know them.
    read: ClassVar[tuple[str, ...]]

    @abstractmethod
    def stages(self) -> tuple[Stage, ...]: ...

    @abstractmethod
    def value(self, t: Statistics) -> Tensor:
        """The loss of every anchor, or of the batch, from the statistics."""

    @abstractmethod
    def positive_weight(self, S: Tensor, t: Statistics) -> Tensor: ...

    @abstractmethod
    def negative_weight(self, S: Tensor, t: Statistics) -> Tensor: ...


@dataclass(frozen=True)
class Mining:
    """MS mining: a pair is selected by Similarity-P, against the hardest pair of the other side."""

    eps: float

    # Eq. 11:  S_ij > min_{y_k = y_i} S_ik - eps
    def select_negative(self, S: Tensor, t: Statistics) -> Tensor:
        return S > self.threshold(t)

    def threshold(self, t: Statistics) -> Tensor:
        return t["min_positive"] - self.eps

    # Eq. 12:  S_ij < max_{y_k != y_i} S_ik + eps
    # With eps on the left, where Eq. 11 has it, both conditions round alike: an anchor with a
    # selected negative has a selected positive, and the other way round.
    def select_positive(self, S: Tensor, t: Statistics) -> Tensor:
        return S - self.eps < t["max_negative"]

    def before(self, stages: tuple[Stage, ...], vanishes: bool) -> tuple[Stage, ...]:
        """These stages on the selected pairs. The negative side needs only the minimum positive,
        so the maximum negative and a weighting's first negative statistics share one sweep."""
        select = {
            Side.POSITIVE: (self.select_positive, None),
            Side.NEGATIVE: (self.select_negative, self.threshold if vanishes else None),
        }
        mined: list[Stage] = [
            (side, {name: Selected(s, *select[side]) for name, s in statistics.items()})
            for side, statistics in stages
        ]
        hardest_negative: dict[str, Statistic] = {"max_negative": Maximum()}
        if mined[0][0] is Side.NEGATIVE:
            hardest_negative |= mined.pop(0)[1]
        return (
            (Side.POSITIVE, {"min_positive": Minimum()}),
            (Side.NEGATIVE, hardest_negative),
            *mined,
        )


@dataclass(frozen=True)
class PairLoss:
    """A loss's description: an immutable value made by `make_loss`."""

    name: str
    weighting: Weighting
    mining: Mining | None

    def __reduce__(self) -> tuple[object, ...]:
        """Pickled by its fields alone: what is cached below holds functions that cannot be."""
        return PairLoss, (self.name, self.weighting, self.mining)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The weighting's stages, and P: the number of (selected) positives of every anchor."""
        stages = (*self.weighting.stages(), (Side.POSITIVE, {"P": Count()}))
        if self.mining is None:
            return stages
        return self.mining.before(stages, self.weighting.vanishes)

    @cached_property
    def scopes(self) -> dict[str, Scope]:
        return {name: s.scope for _, statistics in self.stages for name, s in statistics.items()}

    @cached_property
    def read(self) -> tuple[str, ...]:
        """The statistics that the weights read."""
        mining = () if self.mining is None else ("min_positive", "max_negative")
        return (*mining, *self.weighting.read)

    @property
    def of_batch(self) -> bool:
        """Whether the loss is one of the whole batch, not the mean of its anchors'."""
        return self.weighting.scope is Scope.BATCH

    def divisor(self, m: int) -> int:
        """What the weights of a batch of m are divided by."""
        return 1 if self.of_batch else m

    def sum_of_anchors(self, t: Statistics) -> Tensor:
        """The sum of the losses of some anchors. One without a (selected) positive contributes
        zero: it has nothing to be closer to than its negatives.

        Such anchors are left out by index: multiplied by zero, an infinity in their gradient
        would still become a NaN.
        """
        live = t["P"].nonzero()[:, 0]
        return self.weighting.value({name: x.index_select(0, live) for name, x in t.items()}).sum()

    def positive_weight(self, S: Tensor, t: Statistics) -> Tensor:
        w = self.weighting.positive_weight(S, t)
        if self.mining is None:
            return w
        return torch.where(self.mining.select_positive(S, t), w, 0)

    def negative_weight(self, S: Tensor, t: Statistics) -> Tensor:
        if self.mining is None:
            return self.weighting.negative_weight(S, t)
        if self.weighting.vanishes:
            return self.weighting.negative_weight(above(S, self.mining.threshold(t)), t)
        w = self.weighting.negative_weight(S, t)
        return torch.where(self.mining.select_negative(S, t), w, 0)
