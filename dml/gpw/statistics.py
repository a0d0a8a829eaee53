"""Row statistics that merge: what a loss knows about an anchor without seeing a whole row of S.

A statistic reduces the similarities of an anchor's positive or negative pairs. It reduces one tile to
a partial result (`reduce`), merges the partial results of two tiles of the same rows (`merge`), and
turns the last one into a number (`finish`). The reference reduces the whole matrix at once, the
engine many tiles; the result is the same.

Shapes: R rows (anchors), C pairs of a row in a tile, K slots for the positives of a row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

Statistics = Mapping[str, Tensor]
# A function of S and of the statistics of earlier stages, which arrive in a shape that broadcasts
# against S.
Term = Callable[[Tensor, Statistics], Tensor]
# The partial result of a statistic; that of a log-sum-exp consists of two tensors.
Partial = tuple[Tensor, ...]


class Side(Enum):
    """Which pairs of an anchor a statistic is about."""

    POSITIVE = "positive"
    NEGATIVE = "negative"


class Scope(Enum):
    """What a statistic belongs to, and so its shape: (R,), (R, K), or any shape, once per batch."""

    ANCHOR = "anchor"
    POSITIVE_PAIR = "positive pair"
    BATCH = "batch"


class Statistic(ABC):
    """A mergeable reduction. `keep` says which pairs count; None means all of them."""

    scope: ClassVar[Scope] = Scope.ANCHOR
    # Whether reduce(S) equals reduce(S^T), so that a tile need be reduced only once for both sides.
    symmetric: ClassVar[bool] = False

    @abstractmethod
    def reduce(self, S: Tensor, keep: Tensor | None, t: Statistics) -> Partial: ...

    @abstractmethod
    def merge(self, a: Partial, b: Partial) -> Partial: ...

    def finish(self, partial: Partial) -> Tensor:
        return partial[0]


def masked(x: Tensor, keep: Tensor | None, otherwise: float) -> Tensor:
    return x if keep is None else torch.where(keep, x, constant(otherwise, x.dtype, x.device))


@lru_cache
def constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number on a device. torch.where would make one in every call, which on a GPU is a kernel."""
    return torch.full((), value, dtype=dtype, device=device)


def above(S: Tensor, threshold: Tensor) -> Tensor:
    """S where it is above the threshold, -inf elsewhere. Boolean masks are not used: torch does not
    vectorise them, and they would take longer than everything else that is done to a tile."""
    penalty = torch.threshold_(S.detach() - threshold, 0, -torch.inf)
    return penalty.clamp_(max=0).add_(S)


@dataclass(frozen=True)
class Minimum(Statistic):
    """min S; +inf where there is no pair."""

    def reduce(self, S: Tensor, keep: Tensor | None, t: Statistics) -> Partial:
        return (masked(S, keep, torch.inf).amin(-1),)

    def merge(self, a: Partial, b: Partial) -> Partial:
        return (torch.minimum(a[0], b[0]),)


@dataclass(frozen=True)
class Maximum(Statistic):
    """max S; -inf where there is no pair."""

    def reduce(self, S: Tensor, keep: Tensor | None, t: Statistics) -> Partial:
        return (masked(S, keep, -torch.inf).amax(-1),)

    def merge(self, a: Partial, b: Partial) -> Partial:
        return (torch.maximum(a[0], b[0]),)


class Additive(Statistic):
    """A statistic whose partial results are added."""

    def merge(self, a: Partial, b: Partial) -> Partial:
        return (a[0] + b[0],)


@dataclass(frozen=True)
class Sum(Additive):
    """sum term(S)."""

    term: Term

    def reduce(self, S: Tensor, keep: Tensor | None, t: Statistics) -> Partial:
        return (masked(self.term(S, t), keep, 0).sum(-1),)


@dataclass(frozen=True)
class SumsOfBatch(Additive):
    """sum term(S) over the pairs of all anchors, for several terms; in float64, as there may be billions
    of pairs."""

    terms: Callable[[Tensor, Statistics], tuple[Tensor, ...]]
    scope: ClassVar[Scope] = Scope.BATCH

    def reduce(self, S: Tensor, keep: Tensor | None, t: Statistics) -> Partial:
        sums = [masked(x, keep, 0).sum(dtype=torch.float64) for x in self.terms(S, t)]
        return (torch.stack(sums),)


@dataclass(frozen=True)
class Count(Additive):
    """The number of pairs."""

    def reduce(self, S: Tensor, keep: Tensor | None, t: Statistics) -> Partial:
        if keep is None:
            return (S.new_full(S.shape[:-1], S.shape[-1]),)
        return (keep.sum(-1, dtype=S.dtype),)


# e^LEAST is negligible beside 1 in every precision, and far above the denormal numbers, with which
# exp and matrix products are up to a hundred times slower.
LEAST = -70.0


@dataclass(frozen=True)
class Exponent:
    """scale S + shift."""

    scale: float
    shift: float = 0.0


class Exponentials(Statistic):
    """log sum e^x; -inf where there is no pair.

    The partial result is (maximum of x, sum of e^x relative to the maximum). Terms below e^LEAST of the
    maximum count as e^LEAST.
    """

    def merge(self, a: Partial, b: Partial) -> Partial:
        top = torch.maximum(a[0], b[0])
        scale_a, scale_b = torch.exp(a[0] - finite(top)), torch.exp(b[0] - finite(top))
        return top, a[1] * scale_a + b[1] * scale_b

    def finish(self, partial: Partial) -> Tensor:
        top, total = partial  # top is -inf where there is no pair
        return top + total.log()


@dataclass(frozen=True)
class LogSumExp(Exponentials):
    """log sum e^{scale S + shift}; the partial result is without the shift."""

    exponent: Exponent

    def reduce(self, S: Tensor, keep: Tensor | None, t: Statistics) -> Partial:
        scale = self.exponent.scale
        S = masked(S, keep, -math.copysign(torch.inf, scale))
        best = S.detach().amax(-1) if scale > 0 else S.detach().amin(-1)
        top = scale * best
        x = torch.add(-finite(top)[..., None], S, alpha=scale)
        return top, x.clamp_(min=LEAST).exp_().sum(-1)

    def finish(self, partial: Partial) -> Tensor:
        return super().finish(partial) + self.exponent.shift


@dataclass(frozen=True)
class LogSumExpOf(Exponentials):
    """log sum e^{term(S)}, of a term that is not affine in S."""

    term: Term

    def reduce(self, S: Tensor, keep: Tensor | None, t: Statistics) -> Partial:
        x = masked(self.term(S, t), keep, -torch.inf)
        top = x.detach().amax(-1)
        return top, x.sub(finite(top)[..., None]).clamp_(min=LEAST).exp_().sum(-1)


def finite(top: Tensor) -> Tensor:
    """The maximum to subtract. For an empty row it is not -inf, because -inf - (-inf) is NaN."""
    return top.clamp(min=torch.finfo(top.dtype).min)


class OfPositives(Statistic):
    """A number for each positive pair, one per slot. All positives of a row are reduced at once."""

    scope: ClassVar[Scope] = Scope.POSITIVE_PAIR

    def merge(self, a: Partial, b: Partial) -> Partial:
        raise AssertionError(
            "all positives of a row are reduced at once, so there is nothing to merge"
        )


@dataclass(frozen=True)
class Collect(OfPositives):
    """The similarities of the positive pairs; +inf in an empty slot."""

    def reduce(self, S: Tensor, keep: Tensor | None, t: Statistics) -> Partial:
        return (masked(S, keep, torch.inf),)


@dataclass(frozen=True)
class SumPerPositive(Additive):
    """sum over an anchor's negatives n of term(S_an, S_ap), for each of its positives p.

    `positives` names the statistic that collected S_ap. The loop takes one positive at a time: there
    are few of them, and a tensor of R x C x K would be large.
    """

    positives: str
    term: Callable[[Tensor, Tensor], Tensor]
    scope: ClassVar[Scope] = Scope.POSITIVE_PAIR

    def reduce(self, S: Tensor, keep: Tensor | None, t: Statistics) -> Partial:
        sums = [
            masked(self.term(S, S_ap), keep, 0).sum(-1) for S_ap in t[self.positives].unbind(-1)
        ]
        return (torch.stack(sums, -1),)


@dataclass(frozen=True)
class Histogram(Additive):
    """The soft histogram of S on `bins` nodes t_r = -1 + r Delta, not yet divided by the number of
    pairs. That number is its sum: a pair adds 1, divided between the two nodes around it."""

    bins: int
    scope: ClassVar[Scope] = Scope.BATCH
    symmetric: ClassVar[bool] = True

    def reduce(self, S: Tensor, keep: Tensor | None, t: Statistics) -> Partial:
        cell, share = self.locate(S)
        # float64: a float32 bin stops counting at 16 million pairs, a batch of 4,096
        share, cell = share.double(), cell.flatten()
        upper, lower = masked(share, keep, 0).flatten(), masked(1 - share, keep, 0).flatten()
        nodes = upper.new_zeros(self.bins)
        return (nodes.scatter_add(0, cell, lower).scatter_add(0, cell + 1, upper),)

    def locate(self, S: Tensor) -> tuple[Tensor, Tensor]:
        """The p with S in [t_p, t_p+1], and the position of S in that interval, from 0 to 1.

        Rounding can carry S beyond 1; such a pair is counted in the last interval, with its slope.
        """
        inside = S.clamp(-1, 1)
        S = S + (inside - S).detach() if torch.is_grad_enabled() else inside
        place = (S + 1) * ((self.bins - 1) / 2)
        cell = place.detach().floor().clamp_(0, self.bins - 2)
        return cell.long(), place - cell


@dataclass(frozen=True)
class Selected(Statistic):
    """A statistic of the selected pairs only; with it, mining stands in front of a weighting.

    threshold: given if the selected pairs are those above it and the statistic ignores S = -inf.
    """

    statistic: Statistic
    select: Term
    threshold: Callable[[Statistics], Tensor] | None = None

    @property
    def scope(self) -> Scope:  # type: ignore[override]
        return self.statistic.scope

    def reduce(self, S: Tensor, keep: Tensor | None, t: Statistics) -> Partial:
        if self.threshold is not None and keep is None:
            return self.statistic.reduce(above(S, self.threshold(t)), None, t)
        selected = self.select(S, t)
        return self.statistic.reduce(S, selected if keep is None else keep & selected, t)

    def merge(self, a: Partial, b: Partial) -> Partial:
        return self.statistic.merge(a, b)

    def finish(self, partial: Partial) -> Tensor:
        return self.statistic.finish(partial)
