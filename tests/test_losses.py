"""Every loss against loops from the paper, its weights against autograd and finite differences."""

import math

import naive
import numpy as np
import pytest
import torch
from batches import IDS, LIVELY, MINING_OPTIONAL, VARIANTS, batch, make, relative_error
from pytorch_metric_learning.losses import MultiSimilarityLoss
from pytorch_metric_learning.miners import MultiSimilarityMiner

from dml.catalogue import LOSS_PARAMETERS
from dml.gpw import LOSSES, PROXY_LOSSES, GlobalPairLoss, dense_loss, make_loss, pair_weights
from dml.gpw.reference import (
    against,
    loss_of_similarities,
    pair_masks,
    statistics,
    weights_of_similarities,
)
from dml.gpw.statistics import Side
from dml.gpw.weighting import Weighting


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
@pytest.mark.parametrize("seed", range(3))
def test_value_is_that_of_the_naive_loop(variant, seed):
    name, parameters = variant
    X, labels = batch(seed=seed)
    eps = parameters.get("eps")
    rest = {k: v for k, v in parameters.items() if k not in ("mine", "eps")}
    expected = naive.value(name, X @ X.T, labels, eps=eps, **rest)
    assert dense_loss(make(variant), X, labels).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["nca", "n_pairs", "lifted_structure"])
def test_without_a_temperature_the_loss_is_the_papers(name):
    X, labels = batch()
    lam = {} if name == "nca" else {"lam": 0.5}
    expected = naive.value(name, X @ X.T, labels, **lam)  # its tau is 1
    assert dense_loss(make_loss(name, **lam), X, labels).item() == pytest.approx(
        expected, rel=1e-12
    )


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
@pytest.mark.parametrize("seed", range(3))
def test_weights_are_the_derivative_of_the_value(variant, seed):
    """Oracle: autograd through the value, first with respect to S, then to the embeddings."""
    loss = make(variant)
    X, labels = batch(seed=seed)
    S = (X @ X.T).requires_grad_()
    (dS,) = torch.autograd.grad(loss_of_similarities(loss, S, labels), S)
    w_pos, w_neg = weights_of_similarities(loss, S.detach(), labels)
    assert relative_error(w_neg - w_pos, dS) < 1e-12

    X.requires_grad_()
    (dX,) = torch.autograd.grad(dense_loss(loss, X, labels), X)
    w_pos, w_neg = pair_weights(loss, X, labels)
    G = w_neg - w_pos
    assert relative_error((G + G.T) @ X.detach(), dX) < 1e-12


# The definition of these holds some of their factors constant: differences of the value are not the
# gradient. Their weights are checked against autograd above, and against peers below.
HELD_CONSTANT = {"bin_lifted", "circle", "margin"}
SMOOTH = {i: v for i, v in zip(IDS, VARIANTS, strict=True) if v[0] not in HELD_CONSTANT}


@pytest.mark.parametrize("variant", SMOOTH.values(), ids=SMOOTH)
def test_gradient_is_that_of_finite_differences(variant):
    loss = make(variant)
    X, labels = batch(m=14, d=4, classes=4, seed=1)
    w_pos, w_neg = pair_weights(loss, X, labels)
    G = w_neg - w_pos

    def value(X):
        return dense_loss(loss, X, labels)

    numeric = torch.zeros_like(X)
    h = 1e-6
    for index in range(X.numel()):
        step = torch.zeros_like(X)
        step.view(-1)[index] = h
        numeric.view(-1)[index] = (value(X + step) - value(X - step)) / (2 * h)
    assert relative_error((G + G.T) @ X, numeric) < 1e-7


# Losses in which a positive pair may have a weight below zero, as `pair_weights` says
SIGNED = ("supcon", "recall_surrogate", "smooth_ap")


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_weights_have_their_sign_and_are_on_their_own_side(variant):
    X, labels = batch()
    w_pos, w_neg = pair_weights(make(variant), X, labels)
    same = labels[:, None] == labels
    assert variant[0] in SIGNED or (w_pos >= 0).all()
    assert (w_neg >= 0).all()
    assert (w_pos[~same] == 0).all()
    assert (w_neg[same] == 0).all()
    assert (w_pos.diagonal() == 0).all()
    assert w_pos.sum() > 0
    assert w_neg.sum() > 0


@pytest.mark.parametrize("name", SIGNED)
def test_a_positive_pair_may_have_a_weight_below_zero(name):
    """Two positives of anchor 0, near each other (ranks) or far apart (softmax), below a negative."""
    S = torch.eye(4, dtype=torch.float64)
    S[0, 1:] = torch.tensor([0.9, 0.1, 0.2] if name == "supcon" else [0.5, 0.48, 0.9])
    loss = make_loss(name) if name == "supcon" else make_loss(name, tau=0.02)
    w_pos, w_neg = weights_of_similarities(loss, S, torch.tensor([0, 0, 0, 1]))
    assert w_pos[0].min() < -1e-3
    assert w_neg.min() >= 0


@pytest.mark.parametrize("preset", [{"lam": 1.0, "beta": 50.0}, {"lam": 0.5, "beta": 40.0}])
@pytest.mark.parametrize("seed", range(3))
def test_ms_is_the_naive_loop_over_anchors(preset, seed):
    """Oracle: Eq. 11-15 written as loops, with the weights of Eq. 13 and 14."""
    parameters = {"alpha": 2.0, "eps": 0.1, **preset}
    X, labels = batch(m=20, classes=4, spread=1.0, seed=seed)
    expected, gradient = naive.ms_loss_and_gradient(X, labels, **parameters)
    X.requires_grad_()
    loss = dense_loss(make_loss("multi_similarity", **parameters), X, labels)
    (dX,) = torch.autograd.grad(loss, X)
    assert loss.item() == pytest.approx(float(expected), rel=1e-12)
    assert relative_error(dX, gradient) < 1e-12


@pytest.mark.parametrize("preset", [{"lam": 1.0, "beta": 50.0}, {"lam": 0.5, "beta": 40.0}])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("engine", ["dense", "streaming"])
def test_ms_is_that_of_pytorch_metric_learning(preset, seed, engine):
    """Oracle: PML's miner and loss, float32. PML normalises inside, so the gradients with respect to
    the vectors before normalisation are compared."""
    raw, labels = batch(m=60, d=16, classes=9, spread=1.0, seed=seed, dtype=torch.float32)
    raw = 3 * raw
    parameters = {"alpha": 2.0, "eps": 0.1, **preset}
    ours = make_loss("multi_similarity", **parameters)

    theirs_in = raw.clone().requires_grad_()
    mined = MultiSimilarityMiner(epsilon=0.1)(theirs_in, labels)
    theirs = MultiSimilarityLoss(alpha=2, beta=preset["beta"], base=preset["lam"])(
        theirs_in, labels, mined
    )
    (theirs_grad,) = torch.autograd.grad(theirs, theirs_in)

    ours_in = raw.clone().requires_grad_()
    X = torch.nn.functional.normalize(ours_in, dim=1)
    if engine == "dense":
        value = dense_loss(ours, X, labels)
    else:
        value = GlobalPairLoss(ours, tile=16)(X, labels)
    (ours_grad,) = torch.autograd.grad(value, ours_in)

    assert value.item() == pytest.approx(theirs.item(), rel=1e-6)
    assert theirs_grad.abs().max() > 1e-4
    assert (ours_grad - theirs_grad).abs().max() < 1e-6


def test_make_loss_gives_an_immutable_value():
    loss = make_loss("multi_similarity", alpha=2, beta=40, lam=0.5, eps=0.1)
    assert loss == make_loss("multi_similarity")
    assert loss != make_loss("multi_similarity", beta=50)
    with pytest.raises(AttributeError):
        loss.name = "other"
    with pytest.raises(AttributeError):
        loss.weighting.beta = 50


def test_every_loss_of_the_catalogue_can_be_made_with_its_defaults():
    assert set(LOSSES) | set(PROXY_LOSSES) == set(LOSS_PARAMETERS)
    assert set(LOSSES) == set(LIVELY)
    for name in LOSSES:
        mined = name in ("multi_similarity", "ms_mining")
        assert (make_loss(name).mining is not None) == mined
    for name in MINING_OPTIONAL:
        assert make_loss(name, mine=True).mining.eps == 0.1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: make_loss("multi_similarty"), ["multi_similarty", "multi_similarity", "triplet"]),
        (lambda: make_loss("multi_similarity", bta=50), ["bta", "alpha", "beta", "lam", "eps"]),
        (lambda: make_loss("multi_similarity", beta=-1), ["beta", "-1"]),
        (lambda: make_loss("multi_similarity", beta="50"), ["beta", "'50'"]),
        (lambda: make_loss("multi_similarity", beta=math.nan), ["beta", "nan"]),
        (lambda: make_loss("binomial_deviance", eps=0.1), ["eps", "mine"]),
        (lambda: make_loss("ms_weighting", eps=0.1), ["eps", "alpha", "beta", "lam"]),
        (lambda: make_loss("histogram", bins=1), ["bins", "1"]),
        (lambda: make_loss("nca", lam=1), ["lam", "nca"]),
    ],
)
def test_a_wrong_name_or_parameter_names_the_valid_ones(call, words):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the words below are the match)
        call()
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("numbers", [{"beta": np.float64(45)}, {"beta": np.int64(45)}])
def test_numbers_of_numpy_are_numbers(numbers):
    assert make_loss("multi_similarity", **numbers) == make_loss("multi_similarity", beta=45.0)


STATED = {"ignores_minus_inf": True, "shared_statistics": ("lse_neg",)}


@pytest.mark.parametrize("forgotten", STATED)
def test_a_weighting_must_state_what_the_engine_needs(forgotten):
    stated = {name: value for name, value in STATED.items() if name != forgotten}
    with pytest.raises(TypeError, match=f"New must state {forgotten}"):
        type("New", (Weighting,), stated)
    type("New", (Weighting,), STATED)


@pytest.mark.parametrize(
    "wrong", [{"ignores_minus_inf": None}, {"shared_statistics": "lse_neg"}], ids=str
)
def test_a_weighting_must_state_it_in_the_right_type(wrong):
    with pytest.raises(TypeError, match="must state"):
        type("New", (Weighting,), {**STATED, **wrong})


IGNORING = [v for v in VARIANTS if make(v).weighting.ignores_minus_inf]


@pytest.mark.parametrize("variant", IGNORING, ids=str)
def test_a_loss_that_states_so_ignores_a_pair_at_minus_infinity(variant):
    """Oracle: the same row without that pair."""
    loss = make(variant)
    S_pos = torch.tensor([[0.4, 0.7]], dtype=torch.float64)
    S_neg = torch.tensor([[0.3, 0.6, 0.5]], dtype=torch.float64)

    def all_of(S_neg):
        t = {}
        for side, stage in loss.stages:
            S = S_pos if side is Side.POSITIVE else S_neg
            known = {n: x if x.ndim > 1 and S is S_pos else with_pairs(x) for n, x in t.items()}
            t |= {name: s.finish(s.reduce(S, None, known)) for name, s in stage.items()}
        return t, loss.negative_weight(S_neg, {n: with_pairs(x) for n, x in t.items()})

    def with_pairs(x):
        return x[:, None] if x.ndim else x

    t, w = all_of(S_neg)
    erased = torch.tensor([[-torch.inf]], dtype=torch.float64)
    t_erased, w_erased = all_of(torch.cat([S_neg, erased], 1))
    for name, x in t.items():
        torch.testing.assert_close(t_erased[name], x, msg=name)
    torch.testing.assert_close(w_erased[:, :3], w)
    assert w_erased[0, 3] == 0


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_the_weights_use_no_statistics_but_the_shared_ones(variant):
    loss = make(variant)
    X, labels = batch()
    full = pair_weights(loss, X, labels)
    t = statistics(loss, X @ X.T, pair_masks(labels))
    t = {name: t[name] for name in loss.shared_statistics}
    S, masks = X @ X.T, pair_masks(labels)
    for side, w, expected in zip(
        Side, (loss.positive_weight, loss.negative_weight), full, strict=True
    ):
        found = w(S, against(loss, t, side)) / loss.divisor(len(S))
        of_anchors = masks[side] & masks[Side.POSITIVE].any(1, keepdim=True)
        assert torch.equal(found[of_anchors], expected[of_anchors])
