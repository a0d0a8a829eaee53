"""What a loss sees in a batch: which pairs it selects, how similar they are, how it weights them.

It is meant for the journal, once in many steps: it takes two more sweeps over the batch, as long as
the loss itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dml.distributed.collectives import Wire
from dml.distributed.precision import at_least_float32, full_precision
from dml.gpw.engine.general_kernel import GeneralKernel
from dml.gpw.engine.rows import RowSweeps
from dml.gpw.engine.views import against_negatives, against_positives, of_batch, select
from dml.gpw.engine.workspace import Workspace
from dml.gpw.global_loss import share_statistics
from dml.gpw.grouping import GlobalBatch
from dml.gpw.statistics import masked
from dml.gpw.weighting import PairLoss

BINS = 64
SIMILARITIES = (-1.0, 1.0)
LOG_WEIGHTS = (-12.0, 2.0)  # powers of ten


@dataclass(frozen=True)
class Histogram:
    """Counts in BINS equal bins; values outside are counted in the first or the last."""

    low: float
    high: float
    counts: Tensor


@dataclass(frozen=True)
class PairReport:
    """A pair is selected by mining, or without mining if its weight is not zero."""

    anchors: float  # the share of anchors with a selected pair
    positives: float  # selected positives per anchor
    negatives: float  # selected negatives per anchor
    positive_similarities: Histogram
    negative_similarities: Histogram
    weights: Histogram  # log10 |dL/dS_ij| of those that are not zero


@torch.no_grad()
def pair_report(
    loss: PairLoss, embeddings: Tensor, labels: Tensor, tile: int, wire: Wire
) -> PairReport:
    """The report of the global batch, the same on every process."""
    X = at_least_float32(embeddings).contiguous()
    workspace = Workspace()
    tile = max(tile, workspace.cutting(X.device).least_tile)
    with full_precision(X.device):
        batch = GlobalBatch(X, labels.contiguous(), wire)
        own = torch.stack(list(_counts(loss, batch, tile, wire, workspace))).sum(0)
    total = wire.gather(own)[0].sum(0)
    anchors, positives, negatives = (total[:3] / batch.groups.m).tolist()
    S_pos, S_neg, weights = total[3:].view(3, BINS)
    return PairReport(
        anchors,
        positives,
        negatives,
        Histogram(*SIMILARITIES, S_pos),
        Histogram(*SIMILARITIES, S_neg),
        Histogram(*LOG_WEIGHTS, weights),
    )


def _counts(
    loss: PairLoss, batch: GlobalBatch, tile: int, wire: Wire, workspace: Workspace
) -> Iterator[Tensor]:
    """For every block of own rows: anchors with a selected pair, selected positives, selected
    negatives, and the three histograms."""
    sweeps = RowSweeps(loss, batch, tile, workspace)
    _, t = share_statistics(loss, batch, sweeps.statistics(), wire)
    anchors = of_batch(loss, t, batch.groups)
    weights_of = GeneralKernel(loss).prepare_weights(anchors, anchors)
    for block in sweeps.blocks():
        of_rows = select(loss, t, block.where)
        S, valid, known = block.S_pos, block.slots.valid, against_positives(loss, of_rows)
        w = masked(loss.positive_weight(S, known), valid, 0).abs()
        selected = w > 0
        if loss.mining is not None:
            selected = loss.mining.select_positive(S, known) & valid
        live, positives = selected.any(1), selected.sum()
        negatives = torch.zeros_like(positives)
        similar, weights = histogram(S, valid, SIMILARITIES), log_histogram(w)
        dissimilar = torch.zeros_like(similar)

        known = against_negatives(loss, of_rows)
        for each in block.tiles(tile):
            S, keep = each.S, each.keep
            w = weights_of.weigh_rows(S, keep, block.where)
            selected = w > 0
            if loss.mining is not None:
                mined = masked(loss.mining.select_negative(S, known), keep, False)
                selected = masked(mined, weights_of.is_anchor_of(block.where), False)
            live |= selected.any(1)
            negatives += selected.sum()
            dissimilar += histogram(S, S > -torch.inf if keep is None else keep, SIMILARITIES)
            weights += log_histogram(w)
        counts = torch.stack([live.sum(), positives, negatives]).double()
        yield torch.cat([counts, similar, dissimilar, weights])


def histogram(x: Tensor, keep: Tensor, limits: tuple[float, float]) -> Tensor:
    """Counts of the kept values. Whole numbers are added, so a GPU counts them in any order, and no
    float32 stops at 16 million; a boolean index would make the host wait for it."""
    low, high = limits
    place = ((x - low) * (BINS / (high - low))).clamp_(0, BINS - 1).long()
    place = torch.where(keep, place, BINS).flatten()
    counts = place.new_zeros(BINS + 1).index_add_(0, place, torch.ones_like(place))
    return counts[:BINS].double()


def log_histogram(w: Tensor) -> Tensor:
    return histogram(w.log10(), w > 0, LOG_WEIGHTS)
