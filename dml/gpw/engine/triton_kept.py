"""The multi-similarity loss in Triton where S of the own rows fits into memory.

    S = X_rows X^T          by cuBLAS
    all statistics          one kernel, a program per row, which reads its row of S from the cache again
    G_ij + G_ji             one kernel, from S, in place
    dX_rows = (G + G^T) X   by cuBLAS

A log-sum-exp is relative to the hardest pair of its row, which is selected if any pair is.

Shapes: m samples, R own rows (anchors). A program works on BLOCK columns j at a time.
"""

# Kernels are Triton's language and untyped; the rest is typed.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dml.gpw.engine.triton_tuning import fastest
from dml.gpw.engine.triton_weights import (
    OPTIONS,
    Anchors,
    both_weights,
    select_negative,
    select_positive,
)
from dml.gpw.engine.workspace import Workspace
from dml.gpw.grouping import GlobalBatch
from dml.gpw.losses import MultiSimilarity
from dml.gpw.statistics import Statistics
from dml.gpw.weighting import PairLoss


@dataclass(frozen=True)
class Block:
    """Columns per program, and the warps that work on them."""

    BLOCK: int = 1024
    num_warps: int = 4

    @property
    def how(self) -> dict[str, int | bool]:
        return {**OPTIONS, "BLOCK": self.BLOCK, "num_warps": self.num_warps}


CHOICES = (Block(), Block(512), Block(2048, 8), Block(4096, 8), Block(2048, 4))


class KeptSweeps:
    """The two sweeps of a process over its own rows, with S in memory."""

    @staticmethod
    def fits(batch: GlobalBatch, workspace: Workspace) -> bool:
        S = len(batch.own_rows) * batch.groups.m * batch.X.element_size()
        return S <= workspace.cutting(batch.X.device).kept_bytes

    def __init__(
        self,
        loss: PairLoss,
        batch: GlobalBatch,
        tile: int,
        workspace: Workspace,
        block: Block | None = None,
    ) -> None:
        assert isinstance(loss.weighting, MultiSimilarity)
        assert batch.X.dtype == torch.float32
        self.loss, self.ms = loss, loss.weighting
        self.X, self.own, self.groups = batch.X, batch.own_rows, batch.groups
        rows, m = self.X[batch.own(slice(0, len(self.own)))], len(self.X)
        self.S = workspace.buffer("S", (len(rows), m), self.X)
        torch.mm(rows, self.X.T, out=self.S)
        self.block = block or fastest(
            CHOICES, "kept", (len(rows), *self.X.shape), self.X.device, self.try_out
        )

    def try_out(self, block: Block) -> None:
        self.block = block
        self.statistics()

    def statistics(self) -> dict[str, Tensor]:
        ms, R, m = self.ms, len(self.own), len(self.X)
        found = self.X.new_empty(5, R)
        eps = 0.0 if self.loss.mining is None else self.loss.mining.eps
        with torch.cuda.device_of(self.X):  # type: ignore[no-untyped-call]
            row_statistics[R,](
                *(self.S, self.own, self.groups.start, self.groups.end, R, m, found),
                *(ms.alpha, ms.beta, ms.lam, eps),
                MINED=self.loss.mining is not None,
                **self.block.how,
            )
        names = "min_positive", "max_negative", "lse_neg", "lse_pos", "P"
        t = dict(zip(names, found, strict=True))
        return t if self.loss.mining is not None else {name: t[name] for name in names[2:]}

    def gradient(self, t: Statistics, scale: float, out: Tensor) -> None:
        """It overwrites S."""
        ms, R, m = self.ms, len(self.own), len(self.X)
        anchors = Anchors.of(self.loss, t, self.groups)
        grid = R, triton.cdiv(m, self.block.BLOCK)
        with torch.cuda.device_of(self.X):  # type: ignore[no-untyped-call]
            weights_in_place[grid](
                *(self.S, self.own, self.groups.start, m, *anchors.tensors),
                *(ms.alpha, ms.beta, ms.lam, anchors.eps),
                **self.block.how,
            )
        out.addmm_(self.S, self.X, beta=0, alpha=scale)


@triton.jit
def log_sum(top, total):
    """The log-sum-exp from the sum relative to its largest term, which adds 1; -inf without a pair."""
    return tl.where(total > 0, top + tl.log(tl.maximum(total, 1.0)), float("-inf"))


@triton.jit
def row_statistics(
    S,
    own,
    start,
    end,
    R,
    m,
    found,
    alpha,
    beta,
    lam,
    eps,
    MINED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """min_positive, max_negative, lse_neg, lse_pos and P of one row; found: 5 x R."""
    place = tl.program_id(0)
    i = tl.load(own + place)
    start, end = tl.load(start + i), tl.load(end + i)
    S += place.to(tl.int64) * m
    column = tl.arange(0, BLOCK)

    hardest = tl.full((BLOCK,), float("inf"), tl.float32)
    for first in range(start, end, BLOCK):
        j = first + column
        pair = (j < end) & (j != i)
        hardest = tl.minimum(hardest, tl.load(S + j, mask=pair, other=float("inf")))
    min_positive = tl.min(hardest, 0)

    hardest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, m, BLOCK):
        j = first + column
        pair = (j < m) & ((j < start) | (j >= end))
        hardest = tl.maximum(hardest, tl.load(S + j, mask=pair, other=float("-inf")))
    max_negative = tl.max(hardest, 0)

    hardest = tl.where(max_negative == float("-inf"), 0.0, max_negative)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, m, BLOCK):
        j = first + column
        pair = (j < m) & ((j < start) | (j >= end))
        s = tl.load(S + j, mask=pair, other=0.0)
        if MINED:
            pair = pair & select_negative(s, min_positive, eps)
        total += tl.exp(tl.where(pair, beta * (s - hardest), float("-inf")))
    lse_neg = log_sum(beta * (hardest - lam), tl.sum(total, 0))

    hardest = tl.where(min_positive == float("inf"), 0.0, min_positive)
    total = tl.zeros((BLOCK,), tl.float32)
    number = tl.zeros((BLOCK,), tl.float32)
    for first in range(start, end, BLOCK):
        j = first + column
        pair = (j < end) & (j != i)
        s = tl.load(S + j, mask=pair, other=0.0)
        if MINED:
            pair = pair & select_positive(s, max_negative, eps)
        total += tl.exp(tl.where(pair, -alpha * (s - hardest), float("-inf")))
        number += pair.to(tl.float32)
    lse_pos = log_sum(-alpha * (hardest - lam), tl.sum(total, 0))

    tl.store(found + place, min_positive)
    tl.store(found + R + place, max_negative)
    tl.store(found + 2 * R + place, lse_neg)
    tl.store(found + 3 * R + place, lse_pos)
    tl.store(found + 4 * R + place, tl.sum(number, 0))


@triton.jit
def weights_in_place(
    S,
    own,
    start,
    m,
    min_positive,
    max_negative,
    log_pos,
    log_neg,
    alpha,
    beta,
    lam,
    eps,
    BLOCK: tl.constexpr,
):
    """G_ij + G_ji instead of S, of one row i and some columns j."""
    place = tl.program_id(0)
    i = tl.load(own + place)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = j < m
    to = S + place.to(tl.int64) * m + j
    j = tl.minimum(j, m - 1)
    s = tl.load(to, mask=inside, other=0.0)
    G = both_weights(
        s, i, j, start, min_positive, max_negative, log_pos, log_neg, alpha, beta, lam, eps
    )
    tl.store(to, G, mask=inside)
