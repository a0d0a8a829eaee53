"""The losses of other papers against pytorch-metric-learning (PML), values and gradients to 1e-6.

Where PML divides or ranks differently, the difference is written out in the test.
"""

import pytest
import torch
from batches import batch
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning.miners import DistanceWeightedMiner, distance_weighted_miner
from torch.nn.functional import normalize

from dml.gpw import GlobalPairLoss, dense_loss, make_loss
from dml.gpw.reference import pair_masks
from dml.gpw.statistics import Side


def ours(loss, raw, labels, engine="streaming"):
    """The value, and the gradient with respect to the vectors before normalisation: PML normalises
    inside."""
    raw = raw.clone().requires_grad_()
    X = normalize(raw, dim=1)
    value = (
        dense_loss(loss, X, labels) if engine == "dense" else GlobalPairLoss(loss, 16)(X, labels)
    )
    return value.item(), torch.autograd.grad(value, raw)[0]


def theirs(loss, raw, labels):
    raw = raw.clone().requires_grad_()
    value = loss(raw, labels)
    return value.item(), torch.autograd.grad(value, raw)[0]


def agree(found, expected, factor=1.0):
    """factor: what theirs has to be multiplied with."""
    (value, gradient), (their_value, their_gradient) = found, expected
    assert value == pytest.approx(factor * their_value, rel=1e-6)
    assert their_gradient.abs().max() > 1e-4
    assert (gradient - factor * their_gradient).abs().max() < 1e-6


@pytest.mark.parametrize("engine", ["dense", "streaming"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("loss", "peer"),
    [
        (make_loss("supcon", tau=0.2), pml.SupConLoss(temperature=0.2)),
        (make_loss("circle", m=0.4, gamma=80), pml.CircleLoss(m=0.4, gamma=80)),
        (make_loss("circle", m=0.25, gamma=5), pml.CircleLoss(m=0.25, gamma=5)),
    ],
    ids=["supcon", "circle", "circle 5"],
)
def test_supcon_and_circle(loss, peer, seed, engine):
    """PML takes the mean over the anchors whose loss is not zero, we over all m: some anchors
    have no positive."""
    X, labels = batch(m=60, d=16, classes=9, spread=1.0, seed=seed)
    live = pair_masks(labels)[Side.POSITIVE].any(1).sum().item()
    assert live < 60
    agree(ours(loss, 3 * X, labels, engine), theirs(peer, 3 * X, labels), factor=live / 60)


@pytest.mark.parametrize("engine", ["dense", "streaming"])
@pytest.mark.parametrize("tau", [0.07, 0.5])
def test_info_nce(tau, engine):
    """PML takes the mean over all positive pairs, we first over those of an anchor: the same if all
    classes are equally large."""
    X, _ = batch(m=60, d=16, spread=1.0)
    labels = torch.arange(60) % 12
    loss, peer = make_loss("info_nce", tau=tau), pml.NTXentLoss(temperature=tau)
    agree(ours(loss, 3 * X, labels, engine), theirs(peer, 3 * X, labels))


def test_info_nce_of_classes_of_several_sizes():
    X, labels = batch(m=60, d=16, spread=1.0)
    positives = pair_masks(labels)[Side.POSITIVE].sum(1)
    loss, peer = make_loss("info_nce", tau=0.2), pml.NTXentLoss(temperature=0.2)
    value, _ = ours(loss, X, labels)
    assert value != pytest.approx(theirs(peer, X, labels)[0], rel=1e-3)
    # every anchor once for each of its positives: theirs
    weighted = sum(
        positives[i] * anchor_value(loss, X, labels, i) for i in range(60) if positives[i]
    )
    assert weighted / positives.sum() == pytest.approx(theirs(peer, X, labels)[0], rel=1e-6)


def anchor_value(loss, X, labels, i):
    """The loss of anchor i alone, from the similarities of its pairs."""
    masks, S = pair_masks(labels), X @ X.T
    return value_of(loss, S[i][masks[Side.POSITIVE][i]][None], S[i][masks[Side.NEGATIVE][i]][None])


def value_of(loss, S_pos, S_neg):
    """The mean loss of anchors with these similarities: stages and value, without any grouping."""
    t = {}
    for side, stage in loss.stages:
        S = S_pos if side is Side.POSITIVE else S_neg
        per_pair = side is Side.POSITIVE
        known = {n: x if x.ndim > 1 and per_pair else x[:, None] for n, x in t.items()}
        t |= {name: s.finish(s.reduce(S, None, known)) for name, s in stage.items()}
    return loss.weighting.value(t).mean()


@pytest.mark.parametrize("tau", [0.01, 0.1])
def test_smooth_ap(tau):
    """PML ranks the anchor itself too, and it is one of its own positives. Given the same positives, our
    stages give the same value and gradient. (PML is right for as many classes as images per class.)"""
    raw, _ = batch(m=25, d=16, spread=1.0)
    labels = torch.arange(25) // 5
    peer = theirs(pml.SmoothAPLoss(temperature=tau), raw, labels)

    leaf = raw.clone().requires_grad_()
    X = normalize(leaf, dim=1)
    S, same = X @ X.T, labels[:, None] == labels
    value = value_of(make_loss("smooth_ap", tau=tau), S[same].view(25, 5), S[~same].view(25, 20))
    agree((value.item(), torch.autograd.grad(value, leaf)[0]), peer)
    without, _ = ours(make_loss("smooth_ap", tau=tau), raw, labels)
    assert without > value.item(), (
        "an anchor is always retrieved first, which flatters the precision"
    )


@pytest.mark.parametrize("engine", ["dense", "streaming"])
@pytest.mark.parametrize("seed", range(3))
def test_margin_with_a_single_negative(seed, engine):
    """With one negative there is nothing to draw, and PML's triplets are our pairs."""
    X, _ = batch(m=5, d=6, spread=1.0, seed=seed)
    labels = torch.tensor([0, 0, 0, 0, 1])
    loss = make_loss("margin", alpha=0.3, beta=0.9, dim=6, nonzero_loss_cutoff=1.99)
    peer = pml.MarginLoss(margin=0.3, beta=0.9)
    agree(ours(loss, 3 * X, labels, engine), theirs(peer, 3 * X, labels))


@pytest.mark.parametrize("seed", range(3))
def test_margin_is_the_expectation_over_the_draws_of_the_miner(seed, monkeypatch):
    """PML's miner draws a negative with these probabilities; the expectation is written out."""
    X, _ = batch(m=40, d=16, spread=1.0, seed=seed)
    labels = torch.arange(40) % 8
    probabilities = []
    monkeypatch.setattr(
        distance_weighted_miner.lmu,
        "get_random_triplet_indices",
        lambda labels, ref_labels, weights: probabilities.append(weights) or ([], [], []),
    )
    DistanceWeightedMiner(cutoff=0.5, nonzero_loss_cutoff=1.4)(X, labels)
    p = probabilities[0].nan_to_num(0)  # anchors without a negative below the cutoff draw none
    leaf = X.clone().requires_grad_()
    unit = normalize(leaf, dim=1)
    D = (unit[:, None] - unit + torch.eye(40)[:, :, None]).norm(dim=2)  # not 0 on the diagonal
    positive = pair_masks(labels)[Side.POSITIVE]
    hinge_pos, hinge_neg = (0.2 + D - 1.2).relu(), (0.2 - D + 1.2).relu()
    draws = 4 * p  # one for each positive
    total = hinge_pos[positive].sum() + (draws * hinge_neg).sum()
    active = (hinge_pos[positive] > 0).sum() + draws[hinge_neg > 0].sum()
    expected = total / active
    agree(
        ours(make_loss("margin", dim=16), X, labels),
        (expected.item(), torch.autograd.grad(expected, leaf)[0]),
    )
