"""One sweep over the similarities of samples and proxies: anchors in the rows, their pairs in the columns.

    for every block of anchors:
        x = scale A_rows B^T;   the positive pairs are left out
        E = e^{x - top},  Z = sum E,  lse = top + log Z + shift        top: 0, or the largest x of the row
        slope = dL/dlse, which the caller knows once the processes have told each other their lse
        G = f E,  f = slope scale / Z                                        dL/dS of negative pairs
        dA_rows = f (E B);   dB += E^T (f A_rows)

G is E times a number per row, so E is never touched again after its exponential, and S is multiplied
once: with the two products of the gradients there are three, which no computation of both gradients
can do without. A block holds all columns, so that lse is complete before its gradient is needed.

The positive pairs are few, one per sample, and treated one by one in `positives`.

Shapes: m samples, C proxies of this process, n positive pairs of these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dml.cost import Cutting, proxy_rows_at_a_time
from dml.gpw.engine.tiles import row_parts, spans
from dml.gpw.engine.workspace import Workspace
from dml.gpw.grouping import copied
from dml.gpw.losses.proxies import Anchors, ProxyWeighting
from dml.gpw.statistics import LEAST, Exponent, finite

# |x| up to which e^x needs no top: e^-LARGEST, e^LARGEST and sums of a billion of them are normal in float32
LARGEST = 65.0

# The slopes dL/dlse of some anchors, from their log-sum-exps over the columns of this process
Slopes = Callable[[slice, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class PositivePairs:
    """The samples whose proxies are on this process, by ascending anchor.

    samples, proxies: their positions among the m samples and the C own proxies, on the device.
    anchors: the one or the other, on the CPU.
    """

    samples: Tensor
    proxies: Tensor
    anchors: Tensor

    @staticmethod
    def of(
        labels: Tensor, first: int, count: int, anchors: Anchors, device: torch.device
    ) -> PositivePairs:
        """labels: of all m samples, on the CPU. first, count: the classes of this process."""
        place = labels - first
        samples = ((place >= 0) & (place < count)).nonzero()[:, 0]
        proxies = place[samples]
        if anchors is Anchors.PROXIES:
            order = proxies.argsort(stable=True)
            samples, proxies = samples[order], proxies[order]
        by_anchor = samples if anchors is Anchors.SAMPLES else proxies
        if device.type == "cpu":
            return PositivePairs(samples, proxies, by_anchor)
        return PositivePairs(copied(samples, device), copied(proxies, device), by_anchor)

    def of_anchors(self, span: slice) -> slice:
        """The pairs of some anchors."""
        edges = torch.tensor([span.start, span.stop])
        first, last = torch.searchsorted(self.anchors, edges).tolist()
        return slice(first, last)

    def oriented(self, anchors: Anchors) -> tuple[Tensor, Tensor]:
        """Rows and columns, anchors in the rows."""
        if anchors is Anchors.SAMPLES:
            return self.samples, self.proxies
        return self.proxies, self.samples


def sweep(
    A: Tensor,
    B: Tensor,
    exponent: Exponent,
    anchors: Anchors,
    pairs: PositivePairs,
    slopes: Slopes,
    workspace: Workspace,
    cutting: Cutting | None = None,
    dA: Tensor | None = None,
    dB: Tensor | None = None,
    largest: float | None = None,
) -> None:
    """Go through all negative pairs of the anchors A and the columns B. dA and dB, if given, become the
    gradients of the negative pairs. largest: a bound of |S|, where it is known."""
    if len(A) == 0:  # more processes than classes
        return
    cutting = cutting or workspace.cutting(A.device)
    is_bounded = largest is not None and largest * exponent.scale <= LARGEST
    rows, columns = pairs.oriented(anchors)
    height = proxy_rows_at_a_time(len(A), len(B), anchors.value, A.element_size(), cutting)
    for span in spans(len(A), height):
        R = span.stop - span.start
        E = workspace.buffer("S", (R, len(B)), A)
        torch.addmm(E, A[span], B.T, beta=0, alpha=exponent.scale, out=E)
        own = pairs.of_anchors(span)
        where = rows[own] - span.start, columns[own]
        E[where] = -torch.inf
        top, Z = exponentials(E, cutting.part_pairs, is_bounded)
        slope = slopes(span, top.double() + Z.double().log() + exponent.shift)
        if dA is None or dB is None:
            continue
        E[where] = 0
        Z = Z.double().clamp(min=torch.finfo(E.dtype).tiny)  # without pairs the slope is 0
        f = (slope * exponent.scale / Z).to(E.dtype)[:, None]
        torch.mm(E, B, out=dA[span]).mul_(f)
        dB.addmm_(E.T, f * A[span], beta=0 if span.start == 0 else 1)


def exponentials(x: Tensor, part_pairs: int | None, is_bounded: bool) -> tuple[Tensor, Tensor]:
    """x becomes e^{x - top}. Returns top and the sums, 0 of no columns. Parts of a few rows stay in the cache.

    is_bounded: no |x| exceeds LARGEST, and top is 0. Otherwise it is the largest of each row, and a term
    at least e^LEAST.
    """
    tops, sums = x.new_zeros(len(x)), x.new_zeros(len(x))
    for part in row_parts(x, part_pairs) if x.shape[1] > 0 else []:
        some = x[part]
        if not is_bounded:
            tops[part] = top = some.amax(1)
            some.sub_(finite(top)[:, None]).clamp_(min=LEAST)
        sums[part] = some.exp_().sum(1)
    return tops, sums


@dataclass(frozen=True, eq=False)
class Positives:
    """The similarities S of the positive pairs, their terms, and the log-sum-exp of the positives of
    every anchor, -inf where it has none; in float64."""

    S: Tensor
    terms: Tensor
    lse: Tensor

    @staticmethod
    def of(weighting: ProxyWeighting, X: Tensor, P: Tensor, pairs: PositivePairs) -> Positives:
        S = (X[pairs.samples] * P[pairs.proxies]).sum(1).double()
        terms = weighting.positive_term(S)
        rows, _ = pairs.oriented(weighting.anchors)
        n = len(X) if weighting.anchors is Anchors.SAMPLES else len(P)
        top = terms.new_full((n,), -torch.inf).scatter_reduce_(0, rows, terms, "amax")
        total = terms.new_zeros(n).index_add_(0, rows, (terms - top[rows]).exp())
        return Positives(S, terms, top + total.log())


def add_positives(
    weighting: ProxyWeighting,
    pairs: PositivePairs,
    positives: Positives,
    slope: Tensor,
    X: Tensor,
    P: Tensor,
    dX: Tensor,
    dP: Tensor,
) -> None:
    """Add the gradients of the positive pairs. slope: dL/dlse_pos of every anchor."""
    rows, _ = pairs.oriented(weighting.anchors)
    share = (positives.terms - positives.lse[rows]).exp()
    g = slope[rows] * share * weighting.positive_slope(positives.S)
    g = g.to(X.dtype)[:, None]
    dX.index_add_(0, pairs.samples, g * P[pairs.proxies])
    dP.index_add_(0, pairs.proxies, g * X[pairs.samples])
