"""The dense engine: the whole similarity matrix and plain autograd. The readable reference."""

from __future__ import annotations

import torch
from torch import Tensor

from dml.distributed.precision import at_least_float32, full_precision
from dml.gpw.engine.tiles import Block, Negatives, block_statistics, of_rows
from dml.gpw.grouping import Groups, check_batch
from dml.gpw.statistics import Side, masked
from dml.gpw.weighting import PairLoss


def dense_loss(loss: PairLoss, embeddings: Tensor, labels: Tensor) -> Tensor:
    """The loss of a batch, differentiable by autograd.

    Embeddings are expected L2-normalised. They are taken as they are: if they are not, S is their
    dot product, and value and gradient are exact for that S.
    """
    check_batch(embeddings, labels)
    with full_precision(embeddings.device):
        return loss_of_similarities(loss, similarities(embeddings), labels)


def loss_of_similarities(loss: PairLoss, S: Tensor, labels: Tensor) -> Tensor:
    """L(S, y), for any m x m matrix S."""
    groups = Groups.of(labels)
    t = block_statistics(Negatives(loss, groups), whole(S, groups), width=groups.m)
    value = loss.weighting.value(t) if loss.of_batch else loss.sum_of_anchors(t) / groups.m
    return value.to(S.dtype)


@torch.no_grad()
def pair_weights(loss: PairLoss, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """w_ij = |dL/dS_ij| of the positive and of the negative pairs, two m x m matrices (Eq. 3)."""
    check_batch(embeddings, labels)
    with full_precision(embeddings.device):
        return weights_of_similarities(loss, similarities(embeddings), labels)


def similarities(embeddings: Tensor) -> Tensor:
    X = at_least_float32(embeddings)
    return X @ X.T


@torch.no_grad()
def weights_of_similarities(loss: PairLoss, S: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    groups = Groups.of(labels)
    block = whole(S, groups)
    negatives = Negatives(loss, groups)
    t = block_statistics(negatives, block, width=groups.m)
    w = loss.positive_weight(block.S_pos, of_rows(loss, t, Side.POSITIVE))
    w = masked(w, block.classes.valid, 0)
    w_pos = torch.zeros_like(S).scatter_add(1, block.classes.slots, w)

    ((_, S_neg, keep),) = block.negatives(width=groups.m)
    rows = of_rows(loss, negatives.known(t), Side.NEGATIVE)
    w_neg = negatives.weigh(S_neg, keep, rows)

    back = groups.order.argsort()
    w_pos, w_neg = (w[back][:, back] / loss.divisor(groups.m) for w in (w_pos, w_neg))
    return w_pos, w_neg


def whole(S: Tensor, groups: Groups) -> Block:
    rows = torch.arange(groups.m, device=S.device)
    return Block(S[groups.order][:, groups.order], rows, groups)
