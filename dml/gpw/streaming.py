"""The streaming engine: the exact global loss and gradient without the m x m matrix.

W processes bring b rows each of a global batch of m = W b.

    all-gather the embeddings and labels                               X, m x d
    for every block of own rows:  S = X_rows X^T, row statistics       (first sweep)
    all-gather the statistics, a few scalars a row
    loss from the statistics
    for every block of own rows:  S again; G_ij + G_ji from S and the  (second sweep)
                                  statistics of row i and of row j;
                                  dL/dX_rows = 1/m (G + G^T) X

S is symmetric, so the part of the gradient that comes from the other anchors, G_ji, needs only
their statistics: backward sends nothing. Memory is O(m d + tile m).

Shapes: m samples, d dimensions, R rows (anchors) of a block, C columns of a tile, K slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dml.collectives import Wire
from dml.gpw.algebra import Scope, Side, Statistics, masked
from dml.gpw.pair_loss import PairLoss
from dml.gpw.tiles import (
    Block,
    Groups,
    block_statistics,
    check_finite,
    of_columns,
    of_partners,
    of_rows,
    problem_of,
    spans,
    weigh_negatives,
)
from dml.precision import at_least_float32, full_precision


class GlobalPairLoss(nn.Module):
    """A pair loss over the global batch, as a module.

        loss_fn = GlobalPairLoss(make_loss("multi_similarity"))
        loss_fn(embeddings, labels).backward()

    Every process gives its own rows and gets the loss of the global batch, the same on all, and by
    `backward` the gradient of its own rows. With reduction="mean" that gradient is right for
    wrappers that average over processes (DDP, DeepSpeed), with "sum" for those that sum. Alone,
    without torch.distributed, it is the same function.

    Embeddings are expected L2-normalised and taken as they are, as in `dense_loss`, to which it is
    equal in value and gradient. Half precision is computed in float32. Gradients of gradients are
    refused. `tile` is the number of rows, and of columns, worked on at a time: memory against speed;
    below 32 the last bits of S may differ between the two sides of a pair. `wire` counts what was
    sent.
    """

    def __init__(
        self, loss: PairLoss, tile: int = 512, reduction: Literal["mean", "sum"] = "mean"
    ) -> None:
        super().__init__()
        if not isinstance(loss, PairLoss):
            raise TypeError(f"loss must come from make_loss, not {loss!r}")
        if not isinstance(tile, int) or tile < 1:
            raise ValueError(f"tile must be a whole number, at least 1, not {tile}")
        if reduction not in ("mean", "sum"):
            raise ValueError(
                f"reduction must be 'mean' (for wrappers that average gradients, such as DDP) or "
                f"'sum', not {reduction!r}"
            )
        self.loss = loss
        self.tile = tile
        self.reduction = reduction
        self.wire = Wire()

    def extra_repr(self) -> str:
        return f"{self.loss}, tile={self.tile}, reduction={self.reduction!r}"

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        problem = problem_of(embeddings, labels)
        self.wire.agree(describe(embeddings, labels) if problem is None else "", problem)
        # Wrappers that average divide the gradient of the global loss by W; this restores it.
        scale = self.wire.size if self.reduction == "mean" else 1
        X = at_least_float32(embeddings)
        with full_precision(X.device):
            batch = GlobalBatch(X.detach(), labels, self.wire)
            value, t = global_statistics(self.loss, batch, self.tile, self.wire)
            value = value.to(X.dtype)
            if not (X.requires_grad and torch.is_grad_enabled()):
                return value
            dX = scale * own_gradient(self.loss, batch, t, self.tile)
        attached: Tensor = KnownGradient.apply(X, value, dX)  # type: ignore[no-untyped-call]
        return attached


def describe(embeddings: Tensor, labels: Tensor) -> str:
    """What a process brings, for comparison with the others."""
    shape = tuple(embeddings.shape)
    return f"{shape} {embeddings.dtype} with {tuple(labels.shape)} {labels.dtype}"


class KnownGradient(torch.autograd.Function):
    """A value whose gradient is known already: forward keeps dL/dX, backward scales it."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, value: Tensor, dX: Tensor) -> Tensor:
        ctx.save_for_backward(dX)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "GlobalPairLoss has no gradient of its gradient (create_graph=True); use dense_loss"
            )
        (dX,) = ctx.saved_tensors
        return grad * dX, None, None


class GlobalBatch:
    """The embeddings of all processes grouped by class, and where each process's rows are in them.

    X: m x d, grouped. rows: W x b, the grouped positions of every process's samples, ascending.
    """

    def __init__(self, embeddings: Tensor, labels: Tensor, wire: Wire) -> None:
        X, y = (x.flatten(0, 1) for x in wire.gather(embeddings, labels))
        check_finite(X, wire.size)
        self.groups = Groups.of(y)
        self.X = X[self.groups.order]
        self.rows = self.groups.order.argsort().view(wire.size, -1).sort(dim=1).values
        self.rank = wire.rank

    @property
    def own_rows(self) -> Tensor:
        return self.rows[self.rank]

    def in_batch_order(self, own: Tensor) -> Tensor:
        """Own rows, from grouped order back to the order in which they were brought."""
        back = torch.empty_like(own)
        back[self.groups.order[self.own_rows] - self.rank * len(own)] = own
        return back


def global_statistics(
    loss: PairLoss, batch: GlobalBatch, tile: int, wire: Wire
) -> tuple[Tensor, Statistics]:
    """The loss, and the statistics of all m rows that its weights read: own rows computed, the rest
    gathered. Sums over processes are taken in their order, so all get the same bits."""
    parts = [block_statistics(loss, block, tile) for block in blocks(batch, tile)]
    own: dict[str, Tensor] = {
        name: torch.stack([p[name] for p in parts]).sum(0)
        if loss.scopes[name] is Scope.BATCH
        else torch.cat([p[name] for p in parts])
        for name in parts[0]
    }
    share = own["P"].new_zeros(()) if loss.of_batch else loss.sum_of_anchors(own)
    total, *gathered = wire.gather(share.double(), *(own[name] for name in loss.read))
    t = {}
    for name, x in zip(loss.read, gathered, strict=True):
        if loss.scopes[name] is Scope.BATCH:
            t[name] = x.sum(0)
        else:
            t[name] = torch.empty_like(x).flatten(0, 1)
            t[name][batch.rows.flatten()] = x.flatten(0, 1)
    value = loss.weighting.value(t) if loss.of_batch else total.sum() / batch.groups.m
    return value, t


def own_gradient(loss: PairLoss, batch: GlobalBatch, t: Statistics, tile: int) -> Tensor:
    """dL/dX_i = 1/m sum_j (G_ij + G_ji) x_j with G = w_neg - w_pos; a block of rows at a time."""
    groups = batch.groups
    anchors = groups.anchors(loss)
    parts = []
    for block in blocks(batch, tile):
        own = {n: x if loss.scopes[n] is Scope.BATCH else x[block.rows] for n, x in t.items()}

        S_pos, valid = block.positives()
        w = loss.positive_weight(S_pos, of_rows(loss, own, Side.POSITIVE))
        w_back = loss.positive_weight(S_pos, of_partners(loss, t, block))
        w_pos = masked(w + w_back, valid, 0)

        rows = of_rows(loss, own, Side.NEGATIVE)
        anchor_rows = None if anchors is None else anchors[block.rows, None]
        for span, S, keep in block.negatives(tile):
            w = weigh_negatives(loss, S, rows, keep, anchor_rows)
            anchor_columns = None if anchors is None else anchors[span]
            w += weigh_negatives(loss, S, of_columns(loss, t, span), keep, anchor_columns)
            S.copy_(w)

        G = block.S.scatter_add_(1, block.slots, -w_pos)
        parts.append(G @ batch.X)
    return batch.in_batch_order(torch.cat(parts)) / loss.divisor(groups.m)


def blocks(batch: GlobalBatch, tile: int) -> Iterator[Block]:
    """S of `tile` own rows at a time, all in the same memory: a block is gone when the next comes."""
    own = batch.own_rows
    S = batch.X.new_empty(min(tile, len(own)), batch.groups.m)
    for span in spans(len(own), tile):
        rows = own[span]
        yield Block(torch.mm(batch.X[rows], batch.X.T, out=S[: len(rows)]), rows, batch.groups)
