"""The exact loss between the global batch and the proxies of all classes, which no process holds.

Every process owns the proxies of some classes, C / W of them. W processes bring b samples each.

    all-gather the embeddings and labels                                   X, m x d
    one sweep over the similarities of all m samples and the own proxies:
        if the anchors are samples: all-gather the log-sum-exps of this shard, a few scalars per row
        if they are proxies: all their pairs are here, and nothing is sent
        gradient of the own proxies, final; of the samples, the part of these proxies
    all-gather a few scalars: the loss of each process and the norm of its gradient
    reduce-scatter the gradient of the samples                             b x d

A proxy is used at unit length. Its gradient is that of the vector before, so it is at right angles to
it. Memory is O(m d + C/W d) and a block of S.

How the sweep is made is in `engine.proxies`.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from dml.cost import classes_of
from dml.distributed.collectives import Wire
from dml.distributed.precision import at_least_float32, full_precision
from dml.gpw.checks import input_problem, largest_similarity, row_norms
from dml.gpw.engine.proxies import PositivePairs, Positives, add_positives, sweep
from dml.gpw.engine.workspace import Workspace
from dml.gpw.global_loss import describe, problem_of_all
from dml.gpw.losses.proxies import Anchors, Number, ProxyLoss
from dml.gpw.weighting import PairLoss

CHUNK = 2**14  # proxies that are worked on at a time where that takes more memory


class GlobalProxyLoss(nn.Module):
    """A loss between the global batch and one proxy per class, as a module.

        loss_fn = GlobalProxyLoss(make_loss("proxy_anchor"), classes=11_318, dim=512)
        loss_fn(embeddings, labels).backward()

    Every process passes its own rows, L2-normalised, with labels from 0 to classes - 1, and gets the
    loss of the global batch. `backward` gives the gradient of its own rows, as `GlobalPairLoss` does,
    and in `proxies.grad` that of the proxies it owns. The module is made after the process group, must
    not be wrapped by DDP or DeepSpeed, and its parameters need an optimizer of their own on every
    process. A backward pass hands the gradient of the proxies over, so there is one per forward pass.

    proxies: of the classes from `first` on, C / W of them. They begin as normal random vectors of
        about unit length that depend on seed and class alone, not on the number of processes.
    sharded: of which parameters this process has the rows of its classes, with the number of all rows.
    gradient_norm: of the proxies of all processes, the same on each of them; of the last forward pass.
    wire: counts what was sent.
    """

    memory = None  # the proxies stand for all classes

    def __init__(
        self,
        loss: ProxyLoss,
        classes: int,
        dim: int,
        seed: int = 0,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> None:
        super().__init__()
        if not isinstance(loss, ProxyLoss):
            if isinstance(loss, PairLoss):
                raise TypeError(f"{loss.name} has no proxies: use GlobalPairLoss")
            raise TypeError(f"loss must be a loss of proxies from make_loss, not {loss!r}")
        if classes < 2:
            raise ValueError(f"a loss of proxies needs at least 2 classes, not {classes}")
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be 'mean' or 'sum', not {reduction!r}")
        self.loss, self.classes, self.reduction = loss, classes, reduction
        self.wire, self.workspace = Wire(), Workspace()
        self.first, count = classes_of(self.wire.rank, self.wire.size, classes)
        self.proxies = nn.Parameter(drawn_proxies(seed, self.first, count, dim))
        self.sharded = {"proxies": classes}
        self.gradient_norm: Tensor | None = None

    def extra_repr(self) -> str:
        return f"{self.loss}, classes={self.classes}, reduction={self.reduction!r}"

    def forward(
        self, embeddings: Tensor, labels: Tensor, all_labels: Tensor | None = None
    ) -> Tensor:
        """all_labels: those of all processes in the order of their ranks, on the CPU, where they are
        known. Nothing about labels is then sent."""
        problem = input_problem(embeddings, labels, all_labels is not None)
        if problem is None and all_labels is not None:
            problem = problem_of_all(labels, all_labels, self.wire)
        problem = problem or self.problem_of_labels(labels if all_labels is None else all_labels)
        if problem is None and embeddings.shape[1] != self.proxies.shape[1]:
            problem = f"embeddings have {embeddings.shape[1]} dimensions, but proxies {self.proxies.shape[1]}"
        mine = describe(embeddings, labels, all_labels) if problem is None else ""
        self.wire.agree(mine, problem)
        X = at_least_float32(embeddings).contiguous()
        wanted = torch.is_grad_enabled() and (X.requires_grad or self.proxies.requires_grad)
        dP = torch.empty_like(self.proxies) if wanted else None
        with full_precision(X.device), torch.no_grad():
            if all_labels is None:
                everyone, y = (x.flatten(0, 1) for x in self.wire.gather(X, labels.contiguous()))
                y = y.cpu()
            else:
                everyone, y = self.wire.gather(X)[0].flatten(0, 1), all_labels
            self.norms = row_norms(everyone)
            largest = self.check_finite() if X.is_cpu else None
            value, dX = self.sweep(everyone, y.long(), dP, largest)
        if dX is None or dP is None:
            return value.to(X.dtype)
        attached: Tensor = KnownGradients.apply(X, self.proxies, value, dX, Once(dP))  # type: ignore[no-untyped-call]
        return attached

    def problem_of_labels(self, labels: Tensor) -> str | None:
        """Why a label has no proxy, in a sentence; None if all have one. Labels on a GPU are waited for."""
        low, high = int(labels.min()), int(labels.max())
        if 0 <= low and high < self.classes:
            return None
        return (
            f"labels must be from 0 to {self.classes - 1}, one for each of the {self.classes} proxies, but "
            f"there is {low if low < 0 else high}"
        )

    def check_finite(self) -> float:
        """The largest |S| that there can be with proxies of unit length. Raise NotFiniteError, with the first
        row, if the last batch held NaN or infinity. It waits for a GPU."""
        return math.sqrt(largest_similarity(self.norms, self.wire.size))

    def sweep(
        self, X: Tensor, labels: Tensor, dP: Tensor | None, largest: float | None
    ) -> tuple[Tensor, Tensor | None]:
        """The loss and the gradient of the own rows, and that of the own proxies into dP. largest: a bound
        of |S|, where it is known."""
        weighting = self.loss.weighting
        lengths = row_norms(self.proxies).clamp(min=torch.finfo(self.proxies.dtype).tiny)[:, None]
        P = torch.div(self.proxies, lengths).to(X.dtype)
        count, of_samples = len(P), weighting.anchors is Anchors.SAMPLES
        pairs = PositivePairs.of(labels, self.first, count, weighting.anchors, X.device)
        positives = Positives.of(weighting, X, P, pairs)
        n = Number(len(X), len(X))
        if not of_samples:
            n = Number(self.classes, len(torch.unique(labels)))
        value = X.new_zeros((), dtype=torch.float64)
        slope_pos = torch.zeros_like(positives.lse)

        def slopes(span: slice, lse_here: Tensor) -> Tensor:
            """Merge the log-sum-exps of the shards, if the anchors have pairs on all of them."""
            lse_pos, lse_neg = positives.lse[span], lse_here
            if of_samples:
                (both,) = self.wire.gather(torch.stack([lse_pos, lse_here]))
                lse_pos, lse_neg = both[:, 0].amax(0), both[:, 1].logsumexp(0)
            value.add_(weighting.value(lse_pos, lse_neg, n).sum())
            slope_pos[span], slope_neg = weighting.slopes(lse_pos, lse_neg, n)
            return slope_neg * torch.exp(lse_here - lse_neg) if of_samples else slope_neg

        dX = torch.zeros_like(X) if dP is not None else None
        A, B, dA, dB = (X, P, dX, dP) if of_samples else (P, X, dP, dX)
        sweep(
            *(A, B, weighting.negative, weighting.anchors, pairs, slopes, self.workspace),
            dA=dA,
            dB=dB,
            largest=largest,
        )
        square = torch.zeros_like(value)
        if dX is not None and dP is not None:
            add_positives(weighting, pairs, positives, slope_pos, X, P, dX, dP)
            through_normalisation(dP, P, lengths)
            square = row_norms(dP).double().square().sum()
        sums = self.wire.gather(torch.stack([value, square]))[0]
        self.gradient_norm = sums[:, 1].sum().sqrt()
        value = sums[0, 0] if of_samples else sums[:, 0].sum()
        if dX is None:
            return value, None
        # Wrappers that average divide the gradient of the global loss by W; this restores it.
        scale = self.wire.size if self.reduction == "mean" else 1
        return value, self.wire.reduce_scatter(dX).mul_(scale)


def through_normalisation(dP: Tensor, P: Tensor, lengths: Tensor) -> None:
    """The gradient dp of p = v / |v| becomes that of v, dv = (dp - <dp, p> p) / |v|; P is overwritten. Some
    rows at a time: a product of all would be as large as the proxies."""
    parts = (torch.split(x, CHUNK) for x in (dP, P, lengths))
    for some, p, length in zip(*parts, strict=True):
        some.sub_(p.mul_((some * p).sum(1, keepdim=True))).div_(length)


def drawn_proxies(seed: int, first: int, count: int, dim: int) -> Tensor:
    """Normal numbers of variance 1 / dim: Box-Muller of a generator that is counted to the class. The
    length is about 1, so that a learning rate turns a proxy by the same angle for any dim."""
    pairs = -(-dim // 2)
    blocks = -(-pairs // 2)  # of 4 draws
    found = torch.empty(count, dim)
    for start in range(0, count, CHUNK):
        n = min(CHUNK, count - start)
        generator = np.random.Philox(key=seed).advance((first + start) * blocks)
        draws = generator.random_raw(n * 4 * blocks).reshape(n, 4 * blocks)[:, : 2 * pairs]
        uniform = ((draws >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        radius = np.sqrt(-2 * np.log(uniform[:, :pairs]) / dim)
        angle = 2 * np.pi * uniform[:, pairs:]
        both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], 1)
        found[start : start + n] = torch.from_numpy(both[:, :dim])
    return found


class Once:
    """A tensor that is handed over: who takes it is its only owner, and autograd then does not copy it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor

    def take(self) -> Tensor:
        if self.tensor is None:
            raise RuntimeError("GlobalProxyLoss has been differentiated already; call it again")
        tensor, self.tensor = self.tensor, None
        return tensor


class KnownGradients(torch.autograd.Function):
    """A value whose gradients are already computed."""

    @staticmethod
    def forward(
        ctx: Any, X: Tensor, proxies: Tensor, value: Tensor, dX: Tensor, dP: Once
    ) -> Tensor:
        ctx.save_for_backward(dX)
        ctx.dP = dP
        return value.to(X.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "GlobalProxyLoss has no gradient of its gradient (create_graph=True); use dense_proxy_loss"
            )
        (dX,) = ctx.saved_tensors
        of_proxies = None
        if ctx.needs_input_grad[1]:
            of_proxies = ctx.dP.take()
        is_one = grad.is_cpu and grad == 1  # on a GPU the comparison would wait for it
        if is_one:
            return dX, of_proxies, None, None, None
        return grad * dX, None if of_proxies is None else of_proxies.mul_(grad), None, None, None
