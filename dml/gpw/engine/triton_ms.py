"""The multi-similarity loss in Triton where S is too large to keep: two sweeps with S on the chip.

    min_positive            from the columns of the rows' own classes   (with mining)
    max_negative, lse_neg   from all columns, in parts that are merged
    lse_pos, P              from the columns of the rows' own classes
    G_ij + G_ji             from all columns, some rows at a time, into a buffer of these rows x m

float32 only: float64 is left to plain torch. An element of S is one chain of fused multiply-adds over
the dimensions in their order, so it has the same bits in every kernel and on both sides of a pair, and
all of them mine the same pairs.

Shapes: m samples, d dimensions, R own rows (anchors). A program works on BLOCK_R rows i, and on
BLOCK_C columns j and BLOCK_D dimensions k at a time; past the end it repeats the last row or column.
"""

# Kernels are Triton's language and untyped; the rest is typed.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dml.cost import rows_at_a_time
from dml.gpw.engine.tiles import spans
from dml.gpw.engine.triton_tuning import fastest
from dml.gpw.engine.triton_weights import (
    OPTIONS,
    Anchors,
    both_weights,
    no_mining,
    select_negative,
    select_positive,
)
from dml.gpw.engine.workspace import Workspace
from dml.gpw.grouping import GlobalBatch
from dml.gpw.losses import MultiSimilarity
from dml.gpw.statistics import Statistics
from dml.gpw.weighting import PairLoss


@dataclass(frozen=True)
class Blocks:
    """How the work is divided. The first choice is for A100 and H100: 32 elements of S per thread, no
    spilled register, at least two programs per SM. m = 1,000 has 16 blocks of rows, too few for a GPU,
    so the first sweep divides the columns into parts too."""

    BLOCK_R: int = 64
    BLOCK_C: int = 64
    BLOCK_D: int = 16
    column_parts: int = 16
    num_warps: int = 4

    @property
    def how(self) -> dict[str, int | bool]:
        """The last arguments of every kernel."""
        sizes = {"BLOCK_R": self.BLOCK_R, "BLOCK_C": self.BLOCK_C, "BLOCK_D": self.BLOCK_D}
        return {**OPTIONS, **sizes, "num_warps": self.num_warps}


CHOICES = (
    Blocks(),
    Blocks(BLOCK_D=32),
    Blocks(BLOCK_D=64),  # for sm_100, see tests/test_triton.py
    Blocks(BLOCK_C=128, num_warps=8),
    Blocks(BLOCK_R=128, BLOCK_C=64, num_warps=8),
    Blocks(BLOCK_R=128, BLOCK_C=128, num_warps=8, column_parts=8),
    Blocks(BLOCK_R=32, column_parts=32),
)


class TritonSweeps:
    """The two sweeps of a process over its own rows, with S on the chip."""

    def __init__(
        self,
        loss: PairLoss,
        batch: GlobalBatch,
        tile: int,
        workspace: Workspace,
        blocks: Blocks | None = None,
    ) -> None:
        assert isinstance(loss.weighting, MultiSimilarity)
        assert batch.X.dtype == torch.float32
        assert batch.X.is_contiguous()
        self.loss, self.ms, self.tile = loss, loss.weighting, tile
        self.X, self.own, self.groups = batch.X, batch.own_rows, batch.groups
        self.cutting = workspace.cutting(batch.X.device)
        self.blocks = blocks or fastest(
            CHOICES, "streaming", (len(self.own), *self.X.shape), self.X.device, self.try_out
        )

    def try_out(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.statistics()

    def statistics(self) -> dict[str, Tensor]:
        """S is not stored."""
        loss, ms, X, own, groups = self.loss, self.ms, self.X, self.own, self.groups
        R, (m, d) = len(own), X.shape
        rows = triton.cdiv(R, self.blocks.BLOCK_R)
        parts = min(self.blocks.column_parts, triton.cdiv(m, self.blocks.BLOCK_C))
        how = self.blocks.how
        samples = X, own, groups.start, groups.end, R, m, d
        lse_pos, P = X.new_empty(2, R)
        max_of_part, lse_of_part = X.new_empty(2, parts, R)
        min_positive, max_negative, eps = no_mining(P)
        with torch.cuda.device_of(X):  # type: ignore[no-untyped-call]
            if loss.mining is not None:
                eps = loss.mining.eps
                hardest_positive[rows,](*samples, min_positive, **how)
            negatives[rows, parts](
                *samples, min_positive, max_of_part, lse_of_part, ms.beta, ms.lam, eps, **how
            )
            if loss.mining is not None:
                max_negative = max_of_part.amax(0)
            positives[rows,](*samples, max_negative, lse_pos, P, ms.alpha, ms.lam, eps, **how)
        mined = {"min_positive": min_positive, "max_negative": max_negative}
        t = {"lse_neg": lse_of_part.logsumexp(0), "lse_pos": lse_pos, "P": P}
        return t if loss.mining is None else mined | t

    def gradient(self, t: Statistics, scale: float, out: Tensor) -> None:
        ms, X, own, groups = self.ms, self.X, self.own, self.groups
        m, d = X.shape
        anchors = Anchors.of(self.loss, t, groups)
        rows_of_G = rows_at_a_time(len(own), m, self.tile, cutting=self.cutting)
        G = X.new_empty(rows_of_G, m)
        with torch.cuda.device_of(X):  # type: ignore[no-untyped-call]
            for span in spans(len(own), rows_of_G):
                rows = own[span]
                R = len(rows)
                grid = (
                    triton.cdiv(R, self.blocks.BLOCK_R),
                    triton.cdiv(m, self.blocks.BLOCK_C),
                )
                samples = X, rows, groups.start, R, m, d
                exponents = ms.alpha, ms.beta, ms.lam, anchors.eps
                weights[grid](*samples, *anchors.tensors, G, *exponents, **self.blocks.how)
                out[span].addmm_(G[:R], X, beta=0, alpha=scale)


@triton.jit
def own_rows(own, R, BLOCK_R: tl.constexpr):
    """The positions of a program's rows among the own rows, and the rows."""
    place = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    return place, tl.load(own + tl.minimum(place, R - 1))


@triton.jit
def similarities(
    X, i, j, m, d, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr
):
    """S = X_i X_j^T."""
    j = tl.minimum(j, m - 1).to(tl.int64)
    S = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for first in range(0, d, BLOCK_D):
        k = first + tl.arange(0, BLOCK_D)
        X_i = tl.load(X + i[:, None] * d + k[None, :], mask=k[None, :] < d, other=0.0)
        X_j = tl.load(X + j[None, :] * d + k[:, None], mask=k[:, None] < d, other=0.0)
        S = tl.dot(X_i, X_j, S, input_precision="ieee")
    return S


@triton.jit
def same_class(j, start, end):
    return (j[None, :] >= start[:, None]) & (j[None, :] < end[:, None])


@triton.jit
def add_exponents(top, total, x):
    """A log-sum-exp, (maximum, sum relative to it), merged with a tile of exponents."""
    new = tl.maximum(top, tl.max(x, 1))
    finite = tl.where(new == float("-inf"), 0.0, new)
    return new, total * tl.exp(top - finite) + tl.sum(tl.exp(x - finite[:, None]), 1)


@triton.jit
def finish(top, total):
    """-inf where there is no pair; otherwise the maximum itself adds 1 to the sum."""
    return top + tl.log(tl.maximum(total, 1.0))


@triton.jit
def hardest_positive(
    X,
    own,
    start,
    end,
    R,
    m,
    d,
    min_positive,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """min_positive; +inf where there is no positive."""
    place, i = own_rows(own, R, BLOCK_R)
    start, end = tl.load(start + i), tl.load(end + i)
    hardest = tl.full((BLOCK_R,), float("inf"), tl.float32)
    for first in range(tl.min(start), tl.max(end), BLOCK_C):
        j = first + tl.arange(0, BLOCK_C)
        S = similarities(X, i, j, m, d, BLOCK_R, BLOCK_C, BLOCK_D)
        pair = same_class(j, start, end) & (i[:, None] != j[None, :])
        hardest = tl.minimum(hardest, tl.min(tl.where(pair, S, float("inf")), 1))
    tl.store(min_positive + place, hardest, mask=place < R)


@triton.jit
def negatives(
    X,
    own,
    start,
    end,
    R,
    m,
    d,
    min_positive,
    max_of_part,
    lse_of_part,
    beta,
    lam,
    eps,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """max_negative and lse_neg of a part of the columns; parts x R."""
    place, i = own_rows(own, R, BLOCK_R)
    start, end = tl.load(start + i), tl.load(end + i)
    min_positive = tl.load(min_positive + tl.minimum(place, R - 1))[:, None]
    hardest = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    top = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    part = tl.program_id(1)
    width = tl.cdiv(tl.cdiv(m, BLOCK_C), tl.num_programs(1)) * BLOCK_C
    for first in range(part * width, tl.minimum((part + 1) * width, m), BLOCK_C):
        j = first + tl.arange(0, BLOCK_C)
        S = similarities(X, i, j, m, d, BLOCK_R, BLOCK_C, BLOCK_D)
        pair = ~same_class(j, start, end) & (j < m)[None, :]
        hardest = tl.maximum(hardest, tl.max(tl.where(pair, S, float("-inf")), 1))
        selected = pair & select_negative(S, min_positive, eps)
        x = tl.where(selected, beta * (S - lam), float("-inf"))
        top, total = add_exponents(top, total, x)
    to = part * R + place
    tl.store(max_of_part + to, hardest, mask=place < R)
    tl.store(lse_of_part + to, finish(top, total), mask=place < R)


@triton.jit
def positives(
    X,
    own,
    start,
    end,
    R,
    m,
    d,
    max_negative,
    lse_pos,
    P,
    alpha,
    lam,
    eps,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """lse_pos and P."""
    place, i = own_rows(own, R, BLOCK_R)
    start, end = tl.load(start + i), tl.load(end + i)
    max_negative = tl.load(max_negative + tl.minimum(place, R - 1))[:, None]
    top = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    number = tl.zeros((BLOCK_R,), tl.float32)
    for first in range(tl.min(start), tl.max(end), BLOCK_C):
        j = first + tl.arange(0, BLOCK_C)
        S = similarities(X, i, j, m, d, BLOCK_R, BLOCK_C, BLOCK_D)
        pair = same_class(j, start, end) & (i[:, None] != j[None, :])
        selected = pair & select_positive(S, max_negative, eps)
        x = tl.where(selected, -alpha * (S - lam), float("-inf"))
        top, total = add_exponents(top, total, x)
        number += tl.sum(selected.to(tl.float32), 1)
    tl.store(lse_pos + place, finish(top, total), mask=place < R)
    tl.store(P + place, number, mask=place < R)


@triton.jit
def weights(
    X,
    own,
    start,
    R,
    m,
    d,
    min_positive,
    max_negative,
    log_pos,
    log_neg,
    G,
    alpha,
    beta,
    lam,
    eps,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """G_ij + G_ji; R x m."""
    place, i = own_rows(own, R, BLOCK_R)
    j = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    to = G + place.to(tl.int64)[:, None] * m + j[None, :]
    inside = (place < R)[:, None] & (j < m)[None, :]
    j = tl.minimum(j, m - 1)
    S = similarities(X, i, j, m, d, BLOCK_R, BLOCK_C, BLOCK_D)
    G_both = both_weights(
        S,
        i[:, None],
        j[None, :],
        start,
        min_positive,
        max_negative,
        log_pos,
        log_neg,
        alpha,
        beta,
        lam,
        eps,
    )
    tl.store(to, G_both, mask=inside)
