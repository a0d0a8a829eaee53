"""The dense loss from its definition: two masks, the whole matrix S, plain autograd.

It shares no code with the engine, so that it is an oracle for it. It takes O(m^2) memory, and
O(m^3) for the losses that compare every positive with other pairs (triplet, recall_surrogate,
smooth_ap).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dml.distributed.precision import at_least_float32, full_precision
from dml.gpw.checks import check_batch
from dml.gpw.losses.proxies import Anchors, Number, ProxyLoss
from dml.gpw.statistics import Scope, Side, Statistics
from dml.gpw.weighting import PairLoss


def dense_loss(
    loss: PairLoss,
    embeddings: Tensor,
    labels: Tensor,
    columns: Tensor | None = None,
    column_labels: Tensor | None = None,
    identities: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The loss of a batch, differentiable by autograd.

    Embeddings are expected to be L2-normalised. They are used as they are: S is their dot product,
    and value and gradient are exact for that S.

    columns, column_labels: what the embeddings are compared with instead of each other; the loss is the
    mean over the embeddings. identities: of the embeddings and of the columns; where they are equal,
    there is no pair.
    """
    check_batch(embeddings, labels)
    with full_precision(embeddings.device):
        if columns is None:
            return loss_of_similarities(loss, similarities(embeddings), labels)
        assert column_labels is not None, "columns have labels"
        check_batch(columns, column_labels)
        S = at_least_float32(embeddings) @ at_least_float32(columns).T
        return loss_of_pairs(loss, S, column_masks(labels, column_labels, identities))


def dense_loss_of_towers(
    loss: PairLoss, x: Tensor, labels: Tensor, y: Tensor, y_labels: Tensor
) -> Tensor:
    """The mean of both directions: x as anchors against the columns y, and y against x."""
    there, back = (x, labels), (y, y_labels)
    return (dense_loss(loss, *there, *back) + dense_loss(loss, *back, *there)) / 2


@torch.no_grad()
def pair_weights(loss: PairLoss, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(w_pos, w_neg): the weights of the positive and of the negative pairs, two m x m matrices.

    dL/dS = w_neg - w_pos. A positive weight pulls a positive pair together, or pushes a negative one
    apart. For the losses of the paper all weights are w_ij = |dL/dS_ij| >= 0 (Eq. 3). A positive pair
    may have a weight below 0 in `supcon`, where its share in the softmax may exceed 1/P, and in
    `recall_surrogate` and `smooth_ap`, where it may rank before a positive that matters more.
    """
    check_batch(embeddings, labels)
    with full_precision(embeddings.device):
        return weights_of_similarities(loss, similarities(embeddings), labels)


def similarities(embeddings: Tensor) -> Tensor:
    X = at_least_float32(embeddings)
    return X @ X.T


def loss_of_similarities(loss: PairLoss, S: Tensor, labels: Tensor) -> Tensor:
    """L(S, y), for any m x m matrix S."""
    return loss_of_pairs(loss, S, pair_masks(labels))


def loss_of_pairs(loss: PairLoss, S: Tensor, masks: dict[Side, Tensor]) -> Tensor:
    """The loss of the anchors in the rows of S, whatever is in its columns."""
    t = statistics(loss, S, masks)
    value = loss.sum_of_anchors(t) / len(S) if loss.has_anchors else loss.weighting.value(t)
    return value.to(S.dtype)


@torch.no_grad()
def weights_of_similarities(loss: PairLoss, S: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """dL/dS = w_neg - w_pos, for any m x m matrix S."""
    masks = pair_masks(labels)
    t = statistics(loss, S, masks)
    w_pos = loss.positive_weight(S, against(loss, t, Side.POSITIVE))
    w_neg = loss.negative_weight(S, against(loss, t, Side.NEGATIVE))
    w_pos = torch.where(masks[Side.POSITIVE], w_pos, 0)
    w_neg = torch.where(masks[Side.NEGATIVE], w_neg, 0)
    if loss.has_anchors:  # a sample without a positive is no anchor
        w_neg = torch.where(masks[Side.POSITIVE].any(1, keepdim=True), w_neg, 0)
    return w_pos / loss.divisor(len(S)), w_neg / loss.divisor(len(S))


def pair_masks(labels: Tensor) -> dict[Side, Tensor]:
    """Which entries of S are pairs: positives are of the same class and not the sample itself,
    negatives of another class."""
    same = labels[:, None] == labels
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    return {Side.POSITIVE: same & ~itself, Side.NEGATIVE: ~same}


def column_masks(
    labels: Tensor, column_labels: Tensor, identities: tuple[Tensor, Tensor] | None
) -> dict[Side, Tensor]:
    """Which entries of S = A Y^T are pairs: those of the same class are positives, the others negatives,
    and those of the same identity neither."""
    same = labels[:, None] == column_labels
    other = torch.ones_like(same)
    if identities is not None:
        other = identities[0][:, None] != identities[1]
    return {Side.POSITIVE: same & other, Side.NEGATIVE: ~same & other}


def statistics(loss: PairLoss, S: Tensor, masks: dict[Side, Tensor]) -> dict[str, Tensor]:
    """All statistics, stage by stage, each of the whole matrix at once."""
    t: dict[str, Tensor] = {}
    for side, stage in loss.stages:
        known = against(loss, t, side)
        t |= {name: s.finish(s.reduce(S, masks[side], known)) for name, s in stage.items()}
    return t


def against(loss: PairLoss, t: Statistics, side: Side) -> Statistics:
    """The statistics in shapes that broadcast against S. Those of positive pairs are m x m already; a
    negative pair sees all of its anchor's, as m x 1 x m."""
    unchanged = {Scope.BATCH, Scope.POSITIVE_PAIR} if side is Side.POSITIVE else {Scope.BATCH}
    return {n: x if loss.scopes[n] in unchanged else x.unsqueeze(1) for n, x in t.items()}


def dense_proxy_loss(
    loss: ProxyLoss, embeddings: Tensor, labels: Tensor, proxies: Tensor
) -> Tensor:
    """The loss between a batch and the proxies of all classes, C x d, differentiable by autograd in
    both. labels: from 0 to C - 1. Embeddings are used as they are, proxies at unit length."""
    check_batch(embeddings, labels)
    X, P = at_least_float32(embeddings), torch.nn.functional.normalize(proxies, dim=1)
    weighting, same = loss.weighting, labels[:, None] == torch.arange(len(P), device=labels.device)
    with full_precision(embeddings.device):
        S = X @ P.T
    if weighting.anchors is Anchors.PROXIES:
        S, same = S.T, same.T
    neg, live = weighting.negative, same.any(1)
    n = Number(len(S), int(live.sum()))
    lse_neg = masked_log_sum_exp(neg.scale * S + neg.shift, ~same)
    lse_pos = masked_log_sum_exp(weighting.positive_term(S), same)
    return weighting.value(lse_pos, lse_neg, n).sum()


def masked_log_sum_exp(x: Tensor, keep: Tensor) -> Tensor:
    """Of every row; the least finite number where nothing is kept, whose gradient is not NaN."""
    return torch.where(keep, x, torch.finfo(x.dtype).min).logsumexp(1)
