"""Statistics of an anchor's pairs that merge, so that a loss is written once and runs on any tiling.

A statistic reduces the similarities of an anchor's positive or negative pairs. It is computed on a
tile (`of`), joined with that of another tile of the same rows (`merge`), and turned into a number
(`finish`). The dense engine sees one tile, the streaming engine many; the result is the same.

Shapes: R rows (anchors), C pairs of a row in a tile, K slots for the positives of a row, B bins.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor

Statistics = Mapping[str, Tensor]
# What a statistic reduces, or a weight: a function of S and of the statistics known so far, which
# arrive in a shape that broadcasts against S.
Term = Callable[[Tensor, Statistics], Tensor]
# Partial results of a statistic; a log-sum-exp needs two tensors.
State = tuple[Tensor, ...]


class Side(Enum):
    """Which pairs of an anchor a statistic is about."""

    POSITIVE = "positive"
    NEGATIVE = "negative"


class Scope(Enum):
    """What a statistic belongs to, and so its shape: (R,), (R, K), or one for the whole batch."""

    ANCHOR = "anchor"
    POSITIVE_PAIR = "positive pair"
    BATCH = "batch"


class Statistic(ABC):
    """A mergeable reduction. `keep` says which pairs count; None means all of them."""

    scope: ClassVar[Scope] = Scope.ANCHOR
    # whether a pair counts alike from both of its sides: of(S) is of(S^T)
    mirrored: ClassVar[bool] = False

    @abstractmethod
    def of(self, S: Tensor, keep: Tensor | None, t: Statistics) -> State: ...

    @abstractmethod
    def merge(self, a: State, b: State) -> State: ...

    def finish(self, state: State) -> Tensor:
        return state[0]


def masked(x: Tensor, keep: Tensor | None, otherwise: float) -> Tensor:
    return x if keep is None else torch.where(keep, x, otherwise)


def above(S: Tensor, threshold: Tensor) -> Tensor:
    """S where it is above the threshold, -inf elsewhere; without a mask, which would take longer
    than all else that is done to a tile."""
    penalty = torch.threshold_(S.detach() - threshold, 0, -torch.inf)
    return penalty.clamp_(max=0).add_(S)


@dataclass(frozen=True)
class Minimum(Statistic):
    """min S; +inf where there is no pair."""

    def of(self, S: Tensor, keep: Tensor | None, t: Statistics) -> State:
        return (masked(S, keep, torch.inf).amin(-1),)

    def merge(self, a: State, b: State) -> State:
        return (torch.minimum(a[0], b[0]),)


@dataclass(frozen=True)
class Maximum(Statistic):
    """max S; -inf where there is no pair."""

    def of(self, S: Tensor, keep: Tensor | None, t: Statistics) -> State:
        return (masked(S, keep, -torch.inf).amax(-1),)

    def merge(self, a: State, b: State) -> State:
        return (torch.maximum(a[0], b[0]),)


class Additive(Statistic):
    """A statistic whose parts add up."""

    def merge(self, a: State, b: State) -> State:
        return (a[0] + b[0],)


@dataclass(frozen=True)
class Sum(Additive):
    """sum term(S)."""

    term: Term

    def of(self, S: Tensor, keep: Tensor | None, t: Statistics) -> State:
        return (masked(self.term(S, t), keep, 0).sum(-1),)


@dataclass(frozen=True)
class Count(Additive):
    """The number of pairs."""

    def of(self, S: Tensor, keep: Tensor | None, t: Statistics) -> State:
        if keep is None:
            return (S.new_full(S.shape[:-1], S.shape[-1]),)
        return (keep.sum(-1, dtype=S.dtype),)


# e^LEAST vanishes beside 1 in every precision, and is far from the denormal numbers, with which
# exp and a product are up to a hundred times slower.
LEAST = -70.0


@dataclass(frozen=True)
class Exponent:
    """scale S + shift."""

    scale: float
    shift: float = 0.0


@dataclass(frozen=True)
class LogSumExp(Statistic):
    """log sum e^{scale S + shift}; -inf where there is no pair.

    The state is (maximum, sum relative to it), without the shift. Terms below e^LEAST of the maximum
    are taken for e^LEAST.
    """

    exponent: Exponent

    def of(self, S: Tensor, keep: Tensor | None, t: Statistics) -> State:
        scale = self.exponent.scale
        S = masked(S, keep, -math.copysign(torch.inf, scale))
        best = S.detach().amax(-1) if scale > 0 else S.detach().amin(-1)
        top = scale * best
        x = torch.add(-finite(top)[..., None], S, alpha=scale)
        return top, x.clamp_(min=LEAST).exp_().sum(-1)

    def merge(self, a: State, b: State) -> State:
        if a[0].data_ptr() == b[0].data_ptr():  # relative to the same
            return a[0], a[1] + b[1]
        top = torch.maximum(a[0], b[0])
        scale_a, scale_b = torch.exp(a[0] - finite(top)), torch.exp(b[0] - finite(top))
        return top, (a[1] * scale_a + b[1] * scale_b).to(a[1].dtype)

    def finish(self, state: State) -> Tensor:
        top, total = state  # without a pair the one is -inf, or the other 0
        lse = (top + total.log() + self.exponent.shift).to(total.dtype)
        return torch.where(total > 0, lse, -torch.inf)


def finite(top: Tensor) -> Tensor:
    """The maximum to subtract: not -inf for an empty row, where -inf - (-inf) would not be a number."""
    return top.clamp(min=torch.finfo(top.dtype).min)


@dataclass(frozen=True)
class Collect(Statistic):
    """The similarities of the positive pairs themselves, a slot each; +inf in an empty slot."""

    scope: ClassVar[Scope] = Scope.POSITIVE_PAIR

    def of(self, S: Tensor, keep: Tensor | None, t: Statistics) -> State:
        return (masked(S, keep, torch.inf),)

    def merge(self, a: State, b: State) -> State:
        raise AssertionError("the positives of a row always come in one piece")


@dataclass(frozen=True)
class SumPerPositive(Additive):
    """sum over an anchor's negatives of term(S_an, S_ap), for every one of its positives p.

    `positives` names the statistic that collected S_ap. One positive at a time: they are few, and
    an R x C x K tensor is not.
    """

    positives: str
    term: Callable[[Tensor, Tensor], Tensor]
    scope: ClassVar[Scope] = Scope.POSITIVE_PAIR

    def of(self, S: Tensor, keep: Tensor | None, t: Statistics) -> State:
        sums = [
            masked(self.term(S, S_ap), keep, 0).sum(-1) for S_ap in t[self.positives].unbind(-1)
        ]
        return (torch.stack(sums, -1),)


@dataclass(frozen=True)
class Histogram(Additive):
    """The soft histogram of S on `bins` nodes t_r = -1 + r Delta, not yet divided by the number of
    pairs (which is its sum: a pair gives 1 in all, shared by the two nodes around it)."""

    bins: int
    scope: ClassVar[Scope] = Scope.BATCH
    mirrored: ClassVar[bool] = True

    def of(self, S: Tensor, keep: Tensor | None, t: Statistics) -> State:
        cell, share = self.locate(S)
        # float64: a float32 bin stops counting at 16 million pairs, a batch of 4,096
        upper = masked(share.double(), keep, 0).flatten()
        lower = masked(1 - share.double(), keep, 0).flatten()
        nodes = upper.new_zeros(self.bins)
        return (nodes.index_add(0, cell.flatten(), lower).index_add(0, cell.flatten() + 1, upper),)

    def locate(self, S: Tensor) -> tuple[Tensor, Tensor]:
        """The p with S in [t_p, t_p+1], and how far into it S lies, from 0 to 1.

        Rounding can carry S beyond 1; such a pair is counted at the end, with the slope inside.
        """
        S = S + (S.clamp(-1, 1) - S).detach()
        place = (S + 1) * ((self.bins - 1) / 2)
        cell = place.detach().floor().clamp(0, self.bins - 2)
        return cell.long(), place - cell


@dataclass(frozen=True)
class Selected(Statistic):
    """A statistic of the selected pairs only: how mining goes in front of a weighting.

    threshold: for pairs that are selected by being above it, where a pair at -inf does not count.
    """

    statistic: Statistic
    select: Term
    threshold: Callable[[Statistics], Tensor] | None = None

    @property
    def scope(self) -> Scope:  # type: ignore[override]
        return self.statistic.scope

    def of(self, S: Tensor, keep: Tensor | None, t: Statistics) -> State:
        if self.threshold is not None and keep is None:
            return self.statistic.of(above(S, self.threshold(t)), None, t)
        selected = self.select(S, t)
        return self.statistic.of(S, selected if keep is None else keep & selected, t)

    def merge(self, a: State, b: State) -> State:
        return self.statistic.merge(a, b)

    def finish(self, state: State) -> Tensor:
        return self.statistic.finish(state)
