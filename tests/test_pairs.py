"""The report of pairs. Oracles: the dense matrix of weights, and MS mining by loops."""

import pytest
import torch
from batches import batch

from dml.distributed.collectives import Wire
from dml.gpw import LOSSES, make_loss, pair_weights
from dml.gpw.monitor import BINS, pair_report


def masks(labels):
    same = labels[:, None] == labels
    positive = same & ~torch.eye(len(labels), dtype=torch.bool)
    return positive, ~same


@pytest.mark.parametrize(
    ("name", "mine"),
    [
        ("multi_similarity", {}),
        ("ms_mining", {}),
        ("binomial_deviance", {"mine": True}),
        ("lifted_structure_star", {"mine": True}),
        ("histogram", {"mine": True}),
    ],
)
def test_mining_is_that_of_a_loop(name, mine):
    X, labels = batch(m=40, classes=9)
    S, eps = X @ X.T, 0.1
    positive, negative = masks(labels)
    live = positives = negatives = 0
    for i in range(len(S)):
        pos, neg = S[i][positive[i]], S[i][negative[i]]
        if len(pos) == 0 or len(neg) == 0:
            continue
        mined_neg = int((neg > pos.min() - eps).sum())
        mined_pos = int((pos < neg.max() + eps).sum())
        live += mined_neg + mined_pos > 0
        positives += mined_pos
        negatives += mined_neg
    report = pair_report(make_loss(name, eps=eps, **mine), X, labels, 16, Wire())
    assert report.anchors == pytest.approx(live / 40)
    assert report.positives == pytest.approx(positives / 40)
    assert report.negatives == pytest.approx(negatives / 40)
    assert 0 < report.negatives < 40


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("tile", [7, 64])
def test_without_mining_a_pair_with_a_weight_is_selected(name, tile):
    X, labels = batch(m=30, classes=7)
    loss = make_loss(name)
    w_pos, w_neg = pair_weights(loss, X, labels)
    report = pair_report(loss, X, labels, tile, Wire())
    positive, negative = masks(labels)
    if loss.mining is None:
        assert report.positives == pytest.approx(int((w_pos != 0).sum()) / 30)
        assert report.negatives == pytest.approx(int((w_neg > 0).sum()) / 30)
        live = ((w_pos != 0) | (w_neg > 0)).any(1).sum().item()
        assert report.anchors == pytest.approx(live / 30)
    S = X @ X.T
    for histogram, mask in (
        (report.positive_similarities, positive),
        (report.negative_similarities, negative),
    ):
        expected = torch.histc(S[mask].clamp(-1, 1), BINS, -1, 1).double()
        assert histogram.counts.sum() == mask.sum()
        assert (histogram.counts - expected).abs().sum() <= 2  # a similarity on the edge of a bin
    assert report.weights.counts.sum() == (w_pos != 0).sum() + (w_neg > 0).sum()


def test_a_batch_with_nothing_to_learn():
    """Classes far apart and tight: no pair is mined."""
    X = torch.eye(4, dtype=torch.float64).repeat_interleave(3, 0)
    labels = torch.arange(4).repeat_interleave(3)
    report = pair_report(make_loss("multi_similarity"), X, labels, 64, Wire())
    assert (report.anchors, report.positives, report.negatives) == (0, 0, 0)
