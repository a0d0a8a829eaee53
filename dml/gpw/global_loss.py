"""The streaming engine: the exact global loss and gradient without the m x m matrix.

W processes bring b rows each of a global batch of m = W b.

    all-gather the embeddings and labels                               X, m x d
    first sweep over the own rows of S = X X^T:  their statistics
    all-gather the statistics, a few scalars a row
    loss from the statistics
    second sweep:  G_ij + G_ji from S and the statistics of row i and of row j;
                   dL/dX_rows = 1/m (G + G^T) X

S is symmetric, so the part of the gradient that comes from the other anchors, G_ji, needs only
their statistics: backward sends nothing. Memory is O(m d + tile m).

The sweeps are those of `rows` for any batch, of `symmetric` for a process alone, and of `whole` where
that has no more than a tile.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from dml.distributed.collectives import Wire
from dml.distributed.precision import at_least_float32, full_precision
from dml.gpw.engine.rows import RowSweeps
from dml.gpw.engine.symmetric import SymmetricSweeps, fits
from dml.gpw.engine.tiles import Memory
from dml.gpw.engine.whole import WholeSweeps
from dml.gpw.grouping import GlobalBatch, problem_of
from dml.gpw.losses import MultiSimilarity
from dml.gpw.statistics import Scope, Statistics
from dml.gpw.weighting import PairLoss

Kind = Literal["auto", "streaming", "triton"]


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
    below 32 the last bits of S may differ between the two sides of a pair. `kind` is what computes
    the sweeps: "auto" is "triton" where that is possible (dml/gpw/triton_ms.py). `wire` counts what
    was sent.
    """

    def __init__(
        self,
        loss: PairLoss,
        tile: int = 1024,
        reduction: Literal["mean", "sum"] = "mean",
        kind: Kind = "auto",
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
        if kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, not {kind!r}")
        self.loss = loss
        self.kind = kind
        self.tile = tile
        self.reduction = reduction
        self.wire = Wire()
        self.memory = Memory()

    def extra_repr(self) -> str:
        return f"{self.loss}, tile={self.tile}, reduction={self.reduction!r}, kind={self.kind!r}"

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        problem = problem_of(embeddings, labels)
        self.wire.agree(describe(embeddings, labels) if problem is None else "", problem)
        X = at_least_float32(embeddings)
        dX = X.new_empty(X.shape) if X.requires_grad and torch.is_grad_enabled() else None
        # inference: without what autograd does at every operation, and every tensor but dX is of it
        with full_precision(X.device), torch.inference_mode():
            batch = GlobalBatch(X.detach(), labels, self.wire, self.memory.groups)
            self.memory.groups = batch.groups
            sweeps = self.sweeps(batch)
            value, t = gathered(self.loss, batch, sweeps.statistics(), self.wire)
            value = value.to(X.dtype)
            if dX is not None:
                # Wrappers that average divide the gradient of the global loss by W; this restores it.
                scale = self.wire.size if self.reduction == "mean" else 1
                sweeps.gradient(t, scale / self.loss.divisor(batch.groups.m), out=dX)
        if dX is None:
            return value.clone()
        dX = batch.in_batch_order(dX)
        attached: Tensor = KnownGradient.apply(X, value, dX)  # type: ignore[no-untyped-call]
        return attached

    def sweeps(self, batch: GlobalBatch) -> Sweeps:
        if self.kind != "streaming":
            problem = triton_problem(self.loss, batch.X.dtype, batch.X.device)
            if problem is None:
                from dml.gpw.engine.triton_ms import TritonSweeps

                return TritonSweeps(self.loss, batch, self.tile)
            if self.kind == "triton":
                raise ValueError(problem)
        if self.wire.size == 1 and fits(batch.groups, self.tile):
            whole = WholeSweeps.of(self.loss, batch, self.tile, self.memory)
            return whole or SymmetricSweeps(self.loss, batch, self.tile, self.memory)
        return RowSweeps(self.loss, batch, self.tile, self.memory)


def triton_problem(loss: PairLoss, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why Triton's kernels cannot compute this loss here, in a sentence; None if they can."""
    instead = "set engine.kind=auto"
    if not isinstance(loss.weighting, MultiSimilarity):
        return f"engine.kind=triton computes multi_similarity and ms_weighting, not {loss.name}; {instead}"
    if dtype != torch.float32:
        return f"engine.kind=triton computes in float32, not {dtype}; {instead}"
    if device.type != "cuda":
        return (
            f"engine.kind=triton needs a CUDA GPU, and this process computes on {device}; {instead}"
        )
    if find_spec("triton") is None:
        return f"engine.kind=triton needs the package triton (pip install triton); or {instead}"
    return None


class Sweeps(Protocol):
    """Two sweeps over the similarities of the own rows, and what is kept between them."""

    def statistics(self) -> dict[str, Tensor]:
        """Those of the own rows, and this process's share in those of the batch."""

    def gradient(self, t: Statistics, scale: float, out: Tensor) -> None:
        """Of the own rows: scale sum_j (G_ij + G_ji) x_j with G = w_neg - w_pos, from the statistics
        of all rows."""


def describe(embeddings: Tensor, labels: Tensor) -> str:
    """What a process brings, for comparison with the others."""
    shape = tuple(embeddings.shape)
    return f"{shape} {embeddings.dtype} with {tuple(labels.shape)} {labels.dtype}"


class KnownGradient(torch.autograd.Function):
    """A value whose gradient, dX, is known already."""

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
        is_one = grad.is_cpu and grad == 1  # a GPU would have to be waited for
        return dX if is_one else grad * dX, None, None


def gathered(
    loss: PairLoss, batch: GlobalBatch, own: Statistics, wire: Wire
) -> tuple[Tensor, Statistics]:
    """The loss, and the statistics of all m rows that its weights read. Sums over processes are
    taken in their order, so all get the same bits."""
    share = own["P"].new_zeros(()) if loss.of_batch else loss.sum_of_anchors(own)
    total, *everyone = wire.gather(share.double(), *(own[name] for name in loss.read))
    t = {}
    for name, x in zip(loss.read, everyone, strict=True):
        if loss.scopes[name] is Scope.BATCH:
            t[name] = x.sum(0)
        else:
            t[name] = batch.of_all_rows(x)
    value = loss.weighting.value(t) if loss.of_batch else total.sum() / batch.groups.m
    return value, t
