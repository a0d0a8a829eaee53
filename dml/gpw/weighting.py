"""General Pair Weighting: a pair loss is statistics, a value, and a weight for every pair.

    F = sum_i ( sum_neg w_ij S_ij  -  sum_pos w_ij S_ij ),    w_ij = |dL/dS_ij|          (Eq. 3)

The weights of the paper's losses are not negative. Those of a softmax over all pairs and of ranks may
be, for a positive pair: dL/dS_ij = w_ij for a negative pair and -w_ij for a positive one always holds.

MS mining stands in front of any weighting: the weighting then sees the selected pairs only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    masked,
)

# Statistics of one side that are computed in the same sweep over the pairs. A statistic may use those
# of earlier stages.
Stage = tuple[Side, Mapping[str, Statistic]]


class Weighting(ABC):
    """How the pairs of an anchor are weighted; each loss of the paper is one of these.

    Where the order of the stages does not matter, the negative one comes first: mining then shares
    its sweep.

    Every weighting states two things that have no default. Both are only used by the engine, so a
    wrong default would give wrong gradients and pass the tests of the equation:

    - ignores_minus_inf: whether a negative pair with S = -inf counts as no pair, in the statistics
      and in its weight. If so, the engine marks pairs that are not negative by S = -inf, which is
      much faster than a mask.
    - shared_statistics: the statistics that the weights use. The weight of a pair uses those of
      both of its anchors, so other processes must know them.
    """

    # A loss of scope ANCHOR is the mean over the m anchors of the batch (Eq. 15 and 16). Where the
    # paper writes the sum over anchors we take the mean too, so that a learning rate has the same
    # effect for any batch size. A loss of scope BATCH does its own division.
    scope: ClassVar[Scope] = Scope.ANCHOR
    ignores_minus_inf: ClassVar[bool]
    shared_statistics: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not isinstance(getattr(cls, "ignores_minus_inf", None), bool):
            raise TypeError(
                f"{cls.__name__} must state ignores_minus_inf: True if a negative pair with S = -inf "
                "counts as no pair in its statistics and weights, otherwise False"
            )
        names = getattr(cls, "shared_statistics", None)
        if not (isinstance(names, tuple) and all(isinstance(name, str) for name in names)):
            raise TypeError(
                f"{cls.__name__} must state shared_statistics: a tuple of the names of the statistics "
                "that its weights use; () if they use none"
            )

    def learned(self) -> dict[str, float]:
        """The parameters that are learned with the model, as they begin, under the names of the numbers
        that an optimizer changes: log_t for t = e^log_t."""
        return {}

    def at(self, learned: Mapping[str, float]) -> Weighting:
        """The same weighting with other values of what is learned."""
        return self

    def slopes(self, t: Statistics) -> tuple[Tensor, ...]:
        """The derivatives of `value` by each of the learned numbers, from the statistics too."""
        return ()

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
    # With eps on the left, as in Eq. 11, both conditions round in the same way: an anchor has a
    # selected positive if and only if it has a selected negative.
    def select_positive(self, S: Tensor, t: Statistics) -> Tensor:
        return S - self.eps < t["max_negative"]

    def before(self, stages: tuple[Stage, ...], ignores_minus_inf: bool) -> tuple[Stage, ...]:
        """These stages on the selected pairs. The negative side needs only the minimum positive, so
        the maximum negative and a weighting's first negative statistics share one sweep."""
        select = {
            Side.POSITIVE: (self.select_positive, None),
            Side.NEGATIVE: (self.select_negative, self.threshold if ignores_minus_inf else None),
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
        """Pickle the fields alone: the cached properties hold functions that cannot be pickled."""
        return PairLoss, (self.name, self.weighting, self.mining)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The weighting's stages, and P: the number of (selected) positives of every anchor."""
        stages = self.weighting.stages()
        if not any("P" in statistics for _, statistics in stages):
            stages = (*stages, (Side.POSITIVE, {"P": Count()}))
        if self.mining is None:
            return stages
        return self.mining.before(stages, self.weighting.ignores_minus_inf)

    @cached_property
    def scopes(self) -> dict[str, Scope]:
        return {name: s.scope for _, statistics in self.stages for name, s in statistics.items()}

    @cached_property
    def shared_statistics(self) -> tuple[str, ...]:
        """The statistics that the weights use, with those of mining."""
        mining = () if self.mining is None else ("min_positive", "max_negative")
        return (*mining, *self.weighting.shared_statistics)

    @property
    def has_anchors(self) -> bool:
        """Whether the loss is a mean over anchors; otherwise it is one number of the whole batch."""
        return self.weighting.scope is not Scope.BATCH

    @cached_property
    def same_from_both(self) -> bool:
        """Whether the weight of a pair is the same from both of its anchors: it then depends on S and
        on the batch alone."""
        return all(self.scopes[name] is Scope.BATCH for name in self.shared_statistics)

    def divisor(self, m: int) -> int:
        """What the weights of a batch of m are divided by."""
        return m if self.has_anchors else 1

    def sum_of_anchors(self, t: Statistics) -> Tensor:
        """The sum of the losses of some anchors. An anchor without a (selected) positive contributes
        zero.

        Autograd needs them left out by index: an infinity in their gradient would become NaN if it
        were multiplied by zero. Otherwise their value is replaced, because a GPU's host would wait for
        the index.
        """
        if not torch.is_grad_enabled():
            return masked(self.weighting.value(t), t["P"] > 0, 0).sum()
        live = t["P"].nonzero()[:, 0]
        return self.weighting.value({name: x.index_select(0, live) for name, x in t.items()}).sum()

    def totals_of_anchors(self, t: Statistics) -> Tensor:
        """`sum_of_anchors` in float64; where something is learned, a vector that also has the sums of the
        slopes. A mean over anchors or a weighted sum of losses does the same to both."""
        if not self.learned:
            return self.sum_of_anchors(t).double()
        live = t["P"] > 0
        slopes = [masked(x, live, 0).sum() for x in self.weighting.slopes(t)]
        return torch.stack([self.sum_of_anchors(t), *slopes]).double()

    def totals_of_batch(self, t: Statistics) -> Tensor:
        """The same of a loss that is one number of the whole batch."""
        value = self.weighting.value(t)
        if not self.learned:
            return value
        return torch.stack([value, *self.weighting.slopes(t)])

    @cached_property
    def learned(self) -> dict[str, float]:
        return self.weighting.learned()

    def at(self, learned: Mapping[str, float]) -> PairLoss:
        """The same loss with other values of what is learned."""
        return replace(self, weighting=self.weighting.at(learned))

    def positive_weight(self, S: Tensor, t: Statistics) -> Tensor:
        w = self.weighting.positive_weight(S, t)
        if self.mining is None:
            return w
        return masked(w, self.mining.select_positive(S, t), 0)

    def negative_weight(self, S: Tensor, t: Statistics) -> Tensor:
        if self.mining is None:
            return self.weighting.negative_weight(S, t)
        if self.weighting.ignores_minus_inf:
            return self.weighting.negative_weight(above(S, self.mining.threshold(t)), t)
        w = self.weighting.negative_weight(S, t)
        return masked(w, self.mining.select_negative(S, t), 0)
