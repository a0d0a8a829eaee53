"""Losses of proxies: against loops, finite differences, dense autograd and pytorch-metric-learning."""

import math
import sys

import numpy as np
import pytest
import torch
from batches import relative_error
from fleet import WORKERS, run
from proxies import IDS, VARIANTS, make, splits
from pytorch_metric_learning import losses as pml
from torch.nn.functional import normalize

from dml.cost import classes_of
from dml.errors import NotFiniteError
from dml.gpw import (
    PROXY_LOSSES,
    GlobalPairLoss,
    GlobalProxyLoss,
    dense_proxy_loss,
    make_loss,
)
from dml.gpw.proxy_loss import drawn_proxies

sys.path.insert(0, str(WORKERS))
from network import Network, inputs

WORLD_SIZES = (1, 2, 3, 4)
TOLERANCE = {"torch.float64": 1e-12, "torch.float32": 2e-5}
by_variant = pytest.mark.parametrize("variant", VARIANTS, ids=IDS)


def batch(m=40, d=8, classes=13, dtype=torch.float64):
    """Vectors, not of unit length, and labels; the last classes have no sample."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes - 4, (m,), generator=generator)
    return torch.randn(m, d, generator=generator, dtype=dtype), labels


# --- plain loops, from the equations ---------------------------------------------------------------


def proxy_nca(S, labels, tau, own_proxy):
    total = 0.0
    for s, y in zip(S, labels, strict=True):
        terms = [math.exp(-(2 - 2 * x) / tau) for x in s]
        below = sum(t for k, t in enumerate(terms) if own_proxy or k != y)
        total -= math.log(terms[y] / below)
    return total / len(labels)


def normalised_softmax(S, labels, tau):
    return sum(
        -math.log(math.exp(s[y] / tau) / sum(math.exp(x / tau) for x in s))
        for s, y in zip(S, labels, strict=True)
    ) / len(labels)


def arcface(S, labels, s, margin):
    total = 0.0
    for row, y in zip(S, labels, strict=True):
        theta = math.acos(row[y])
        phi = math.cos(theta + margin)
        if theta + margin > math.pi:
            phi = row[y] - margin * math.sin(margin)
        others = sum(math.exp(s * x) for k, x in enumerate(row) if k != y)
        total -= math.log(math.exp(s * phi) / (math.exp(s * phi) + others))
    return total / len(labels)


def proxy_anchor(S, labels, alpha, delta):
    classes = len(S[0])
    of_positives = of_negatives = 0.0
    for p in range(classes):
        pos = [s[p] for s, y in zip(S, labels, strict=True) if y == p]
        neg = [s[p] for s, y in zip(S, labels, strict=True) if y != p]
        of_positives += math.log(1 + sum(math.exp(-alpha * (s - delta)) for s in pos))
        of_negatives += math.log(1 + sum(math.exp(alpha * (s + delta)) for s in neg))
    return of_positives / len(set(labels)) + of_negatives / classes


LOOPS = {
    "proxy_nca": proxy_nca,
    "proxy_anchor": proxy_anchor,
    "normalised_softmax": normalised_softmax,
    "arcface": arcface,
}


@by_variant
def test_the_value_is_that_of_a_loop(variant):
    raw, labels = batch()
    X, proxies = normalize(raw, dim=1), drawn_proxies(1, 0, 13, 8).double()
    S = (X @ normalize(proxies, dim=1).T).tolist()
    expected = LOOPS[variant[0]](S, labels.tolist(), **variant[1])
    assert dense_proxy_loss(make(variant), X, labels, proxies).item() == pytest.approx(
        expected, rel=1e-13
    )
    assert GlobalProxyLoss(make(variant), 13, 8, seed=1).double()(X, labels).item() == (
        pytest.approx(expected, rel=1e-13)
    )


def gradients(loss_fn, raw, labels):
    """Value and gradients with respect to vectors and proxies, both before normalisation."""
    raw = raw.clone().requires_grad_()
    value = loss_fn(normalize(raw, dim=1), labels)
    value.backward()
    return value.item(), raw.grad, loss_fn.proxies.grad


@by_variant
def test_the_gradient_is_that_of_finite_differences(variant):
    raw, labels = batch(m=9, d=5, classes=7)
    loss_fn = GlobalProxyLoss(make(variant), 7, 5).double()
    _, dX, dP = gradients(loss_fn, raw, labels)
    step = 1e-6
    for values, gradient in ((raw, dX), (loss_fn.proxies.data, dP)):
        flat, found = values.view(-1), torch.empty(values.numel(), dtype=torch.float64)
        for k in range(len(flat)):
            before = flat[k].item()
            with torch.no_grad():
                flat[k] = before + step
                above = loss_fn(normalize(raw, dim=1), labels)
                flat[k] = before - step
                below = loss_fn(normalize(raw, dim=1), labels)
            flat[k] = before
            found[k] = (above - below) / (2 * step)
        assert relative_error(gradient.flatten(), found) < 1e-7


@by_variant
@pytest.mark.parametrize("rows", [64, 7])
def test_blocks_change_nothing(variant, rows, monkeypatch):
    """Oracle: dense autograd. Blocks of 64 anchors, the least there are, and fewer."""
    monkeypatch.setattr("dml.gpw.engine.proxies.proxy_rows_at_a_time", lambda *_: rows)
    raw, labels = batch(m=150, classes=140)
    loss_fn = GlobalProxyLoss(make(variant), 140, 8).double()
    value, dX, dP = gradients(loss_fn, raw, labels)
    raw, proxies = raw.clone().requires_grad_(), loss_fn.proxies.detach().requires_grad_()
    expected = dense_proxy_loss(make(variant), normalize(raw, dim=1), labels, proxies)
    expected.backward()
    assert value == pytest.approx(expected.item(), rel=1e-13)
    assert relative_error(dX, raw.grad) < 1e-12
    assert relative_error(dP, proxies.grad) < 1e-12
    assert loss_fn.gradient_norm.item() == pytest.approx(dP.norm().item(), rel=1e-12)


@pytest.mark.parametrize("name", PROXY_LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 3], ids=["plain", "shifted"])
def test_extreme_similarities(name, dtype, length):
    """Samples beside the proxy of their own or another class, or opposite to one, with the published scales, at
    most 64; three times as long, embeddings need shifted exponents. Oracle: dense autograd in float64."""
    proxies = drawn_proxies(1, 0, 13, 8).double()
    P = normalize(proxies, dim=1)
    near = normalize(
        P + 0.2 * P.roll(2, 0), dim=1
    )  # on a proxy itself rounding decides the gradient
    X = length * torch.cat([near, -near, near.roll(1, 0), -near[:1].repeat(4, 1)])
    labels = torch.cat([torch.arange(13).repeat(3), torch.arange(4)])
    loss_fn = GlobalProxyLoss(make_loss(name), 13, 8).to(dtype)
    loss_fn.proxies.data = proxies.to(dtype)
    of_ours, of_dense = X.to(dtype, copy=True).requires_grad_(), X.clone().requires_grad_()
    value = loss_fn(of_ours, labels)
    value.backward()
    proxies.requires_grad_()
    expected = dense_proxy_loss(make_loss(name), of_dense, labels, proxies)
    expected.backward()
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    assert value.item() == pytest.approx(expected.item(), rel=tolerance)
    assert relative_error(of_ours.grad.double(), of_dense.grad) < tolerance
    assert relative_error(loss_fn.proxies.grad.double(), proxies.grad) < tolerance


# --- pytorch-metric-learning ------------------------------------------------------------------------

DEGREES = 180 / math.pi
PEERS = {
    # theirs has the own proxy in the denominator, and the inverse of the temperature
    "proxy_nca": ({"tau": 1 / 9}, lambda: pml.ProxyNCALoss(13, 8, softmax_scale=9)),
    "proxy_anchor": ({}, lambda: pml.ProxyAnchorLoss(13, 8, margin=0.1, alpha=32)),
    "normalised_softmax": ({}, lambda: pml.NormalizedSoftmaxLoss(13, 8, temperature=0.05)),
    # theirs takes the margin in degrees; both keep phi monotonic beyond pi
    "arcface": ({}, lambda: pml.ArcFaceLoss(13, 8, margin=0.5 * DEGREES, scale=64)),
}


@pytest.mark.parametrize("name", PROXY_LOSSES)
def test_pytorch_metric_learning_agrees(name):
    """With the published parameters, which are the defaults of both."""
    parameters, make_peer = PEERS[name]
    raw, labels = batch(m=60)
    loss_fn, peer = GlobalProxyLoss(make_loss(name, **parameters), 13, 8).double(), make_peer()
    theirs = peer.proxies if hasattr(peer, "proxies") else peer.W  # W is d x C
    proxies = loss_fn.proxies.detach()
    theirs.data = (proxies if theirs.shape == proxies.shape else proxies.T).clone()
    value, dX, dP = gradients(loss_fn, raw, labels)
    raw = raw.clone().requires_grad_()
    expected = peer(raw, labels)
    expected.backward()
    assert value == pytest.approx(expected.item(), rel=1e-6)
    assert (dX - raw.grad).abs().max() < 1e-6 * raw.grad.abs().max()
    of_theirs = theirs.grad if theirs.shape == proxies.shape else theirs.grad.T
    assert (dP - of_theirs).abs().max() < 1e-6 * of_theirs.abs().max()


# --- several processes ------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=WORLD_SIZES)
def results(request, tmp_path_factory):
    """What each of W processes found."""
    folder = tmp_path_factory.mktemp(f"world{request.param}")
    run("proxies.py", request.param, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


@pytest.mark.processes
@pytest.mark.parametrize("split", splits())
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_shards_of_any_number_of_processes_give_the_dense_gradient(results, split, dtype):
    """Oracle: one process, all proxies, plain autograd in float64."""
    labels, classes = splits()[split]
    tolerance = TOLERANCE[dtype]
    for name, variant in zip(IDS, VARIANTS, strict=True):
        model = Network()
        proxies = drawn_proxies(3, 0, classes, 8).double().requires_grad_()
        value = dense_proxy_loss(make(variant), model(inputs(labels)), labels, proxies)
        *grads, dP = torch.autograd.grad(value, [*model.parameters(), proxies])
        gradient = torch.cat([g.flatten() for g in grads])
        for k in (1, 3) if split == "classes without samples" else (1,):
            everyone = [found[dtype, name, split, k] for found in results]
            assert len({found["loss"] for found in everyone}) == 1
            assert len({found["norm"] for found in everyone}) == 1
            assert everyone[0]["loss"] == pytest.approx(value.item(), rel=tolerance)
            assert everyone[0]["norm"] == pytest.approx(dP.norm().item(), rel=tolerance)
            for found in everyone:
                assert relative_error(found["gradient"].double(), gradient) <= tolerance
            shards = torch.cat([found["proxies"] for found in everyone]).double()
            assert torch.equal(shards, proxies.detach())
            of_shards = torch.cat([found["of proxies"] for found in everyone]).double()
            assert relative_error(of_shards, dP) <= tolerance


def test_the_splits_are_what_they_say():
    """With four processes."""
    owner = {
        name: {
            int(y): next(r for r in range(4) if sum(classes_of(r, 4, classes)) > y) for y in labels
        }
        for name, (labels, classes) in splits().items()
    }
    assert set(owner["all classes have one owner"].values()) == {0}
    assert (
        owner["classes on both sides of a border"][8]
        != (owner["classes on both sides of a border"][9])
    )
    assert [classes_of(r, 4, 2)[1] for r in range(4)] == [0, 1, 0, 1]
    assert len(set(splits()["one class"][0].tolist())) == 1


# --- proxies ----------------------------------------------------------------------------------------


def test_proxies_depend_on_seed_and_class_alone():
    whole = drawn_proxies(5, 0, 100, 7)
    assert torch.equal(torch.cat([drawn_proxies(5, 0, 33, 7), drawn_proxies(5, 33, 67, 7)]), whole)
    assert not torch.equal(drawn_proxies(6, 0, 100, 7), whole)


def test_proxies_are_normal_with_about_unit_length():
    found = drawn_proxies(0, 0, 70_000, 9).numpy().astype(np.float64)
    assert abs(found.mean()) < 2e-3
    assert found.var() * 9 == pytest.approx(1, rel=5e-3)
    assert (found**4).mean() / found.var() ** 2 == pytest.approx(3, rel=2e-2)
    correlation = np.corrcoef(found.T) - np.eye(9)
    assert np.abs(correlation).max() < 2e-2
    assert abs(np.corrcoef(found[1:, 0], found[:-1, 0])[0, 1]) < 2e-2


@pytest.mark.parametrize("processes", [1, 3, 4, 7])
def test_blocks_of_classes_differ_by_one_at_most(processes):
    found = [classes_of(rank, processes, 23) for rank in range(processes)]
    assert [first for first, _ in found] == [sum(n for _, n in found[:r]) for r in range(processes)]
    counts = [n for _, n in found]
    assert sum(counts) == 23
    assert max(counts) - min(counts) <= 1


# --- mistakes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", [-1, 13])
def test_a_label_without_a_proxy_is_refused(label):
    raw, labels = batch()
    labels[3] = label
    with pytest.raises(ValueError, match=rf"labels must be from 0 to 12, .* but there is {label}"):
        GlobalProxyLoss(make_loss("arcface"), 13, 8)(normalize(raw.float(), dim=1), labels)


def test_another_dimension_is_refused():
    raw, labels = batch()
    with pytest.raises(ValueError, match="embeddings have 8 dimensions, but proxies 16"):
        GlobalProxyLoss(make_loss("arcface"), 13, 16)(normalize(raw.float(), dim=1), labels)


def test_a_loss_of_the_other_kind_is_refused():
    with pytest.raises(TypeError, match="proxy_anchor compares with proxies: use GlobalProxyLoss"):
        GlobalPairLoss(make_loss("proxy_anchor"))
    with pytest.raises(TypeError, match="multi_similarity has no proxies: use GlobalPairLoss"):
        GlobalProxyLoss(make_loss("multi_similarity"), 13, 8)


def test_nan_is_named_by_its_row():
    raw, labels = batch()
    raw[7, 2] = torch.nan
    with pytest.raises(NotFiniteError, match="first in row 7"):
        GlobalProxyLoss(make_loss("proxy_nca"), 13, 8)(normalize(raw.float(), dim=1), labels)


def test_a_second_backward_pass_is_refused():
    """The first has handed the gradient of the proxies over."""
    raw, labels = batch()
    value = GlobalProxyLoss(make_loss("proxy_nca"), 13, 8)(normalize(raw.float(), dim=1), labels)
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated already"):
        value.backward()


def test_gradients_are_scaled_by_what_comes_back():
    raw, labels = batch()
    loss_fn = GlobalProxyLoss(make_loss("proxy_anchor"), 13, 8).double()
    _, dX, dP = gradients(loss_fn, raw, labels)
    loss_fn.proxies.grad = None
    raw = raw.clone().requires_grad_()
    (3 * loss_fn(normalize(raw, dim=1), labels)).backward()
    assert relative_error(raw.grad, 3 * dX) < 1e-15
    assert relative_error(loss_fn.proxies.grad, 3 * dP) < 1e-15


def test_half_precision_is_computed_in_float32():
    raw, labels = batch()
    X = normalize(raw, dim=1).to(torch.bfloat16)
    loss_fn = GlobalProxyLoss(make_loss("normalised_softmax"), 13, 8)
    value = loss_fn(X.requires_grad_(), labels)
    value.backward()
    assert value.dtype == torch.float32
    assert X.grad.dtype == torch.bfloat16
    assert value.item() == loss_fn(X.float(), labels).item()
