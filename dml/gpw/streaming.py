"""The streaming engine: the exact global loss and gradient without the m x m matrix.

    for every block of rows:  S = X_rows X^T, row statistics              (first sweep)
    loss from the statistics
    for every block of rows:  S again; G_ij + G_ji from S and the         (second sweep)
                              statistics of row i and of row j;
                              dL/dX_rows = 1/m (G + G^T) X

S is symmetric, so the part of the gradient that comes from the other anchors, G_ji, needs only
their statistics. Memory is O(m d + tile m).

Shapes: m samples, d dimensions, R rows (anchors) of a block, C columns of a tile, K slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dml.gpw.algebra import Scope, Side, masked
from dml.gpw.batch import (
    Block,
    Groups,
    block_statistics,
    check_batch,
    of_columns,
    of_partners,
    of_rows,
    spans,
)
from dml.gpw.pair_loss import PairLoss


class GlobalPairLoss(nn.Module):
    """A pair loss over the global batch, as a module.

        loss_fn = GlobalPairLoss(make_loss("multi_similarity"))
        loss_fn(embeddings, labels).backward()

    Embeddings are expected L2-normalised and taken as they are, like in `dense_loss`, to which it is
    equal in value and gradient. Half precision is computed in float32. Gradients of gradients are
    not available.
    """

    def __init__(
        self, loss: PairLoss, tile: int = 512, reduction: Literal["mean", "sum"] = "mean"
    ) -> None:
        super().__init__()
        if tile < 1:
            raise ValueError(f"tile must be at least 1, not {tile}")
        if reduction not in ("mean", "sum"):
            raise ValueError(
                f"reduction must be 'mean' (for wrappers that average gradients, such as DDP) or "
                f"'sum', not {reduction!r}"
            )
        self.loss = loss
        self.tile = tile
        self.reduction = reduction

    def extra_repr(self) -> str:
        return f"{self.loss}, tile={self.tile}, reduction={self.reduction!r}"

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        check_batch(embeddings, labels)
        if embeddings.dtype in (torch.float16, torch.bfloat16):
            embeddings = embeddings.float()
        value: Tensor = StreamingLoss.apply(embeddings, labels, self.loss, self.tile)  # type: ignore[no-untyped-call]
        return value


class StreamingLoss(torch.autograd.Function):
    """The gradient is known when the loss is: forward keeps dL/dX, backward scales it."""

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, labels: Tensor, loss: PairLoss, tile: int) -> Tensor:
        with full_precision(embeddings.device):
            groups = Groups.of(labels)
            X = embeddings[groups.order]
            t = sweep_statistics(loss, X, groups, tile)
            if ctx.needs_input_grad[0]:
                dX = torch.empty_like(X)
                dX[groups.order] = sweep_gradient(loss, X, groups, t, tile)
                ctx.save_for_backward(dX)
            return loss.value(t, groups.m).to(X.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        (dX,) = ctx.saved_tensors
        return grad * dX, None, None, None


def sweep_statistics(loss: PairLoss, X: Tensor, groups: Groups, tile: int) -> dict[str, Tensor]:
    """The statistics of all rows, a block at a time."""
    parts = [block_statistics(loss, block, tile) for block in blocks(X, groups, tile)]
    return {
        name: sum(p[name] for p in parts)  # type: ignore[misc]
        if loss.scopes[name] is Scope.BATCH
        else torch.cat([p[name] for p in parts])
        for name in parts[0]
    }


def sweep_gradient(
    loss: PairLoss, X: Tensor, groups: Groups, t: dict[str, Tensor], tile: int
) -> Tensor:
    """dL/dX_i = 1/m sum_j (G_ij + G_ji) x_j with G = w_neg - w_pos; a block of rows at a time."""
    dX = torch.empty_like(X)
    live = loss.live(t)
    for block in blocks(X, groups, tile):
        own = {n: x if loss.scopes[n] is Scope.BATCH else x[block.rows] for n, x in t.items()}

        S_pos, valid = block.positives()
        columns = block.slots.clamp(max=groups.m - 1)
        w = loss.positive_weight(S_pos, of_rows(loss, own, Side.POSITIVE))
        w_back = loss.positive_weight(S_pos, of_partners(loss, t, block))
        w_pos = masked(w + w_back, valid, 0)

        rows = of_rows(loss, own, Side.NEGATIVE)
        for span, S, keep in block.negatives(tile):
            w = masked(masked(loss.negative_weight(S, rows), keep, 0), live[block.rows, None], 0)
            w_back = loss.negative_weight(S, of_columns(loss, t, span))
            w += masked(masked(w_back, keep, 0), live[span], 0)
            S.copy_(w)

        G = block.S.scatter_add_(1, columns, -w_pos)
        dX[block.rows] = G @ X
    return dX / loss.divisor(groups.m)


def blocks(X: Tensor, groups: Groups, tile: int) -> Iterator[Block]:
    """S of `tile` rows at a time, all in the same memory: a block is gone when the next one comes."""
    S = X.new_empty(min(tile, groups.m), groups.m)
    for span in spans(groups.m, tile):
        rows = torch.arange(span.start, span.stop, device=X.device)
        yield Block(torch.mm(X[rows], X.T, out=S[: len(rows)]), rows, groups)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """float32 products in float32: no autocast, no TF32 or bf16 inside a matrix product, whatever
    the user chose for the model. Rounding S flips mining decisions between the two sides of a pair.
    """
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    chosen = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for backend, precision in zip(backends, chosen, strict=True):
            backend.fp32_precision = precision
