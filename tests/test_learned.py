"""Learned parameters of pair losses. Oracle: dense autograd with the parameters as tensors."""

import math
import sys
from dataclasses import replace

import pytest
import torch
from fleet import WORKERS, run
from torch.nn.functional import normalize

from dml.gpw import GlobalPairLoss, dense_loss, dense_loss_of_towers, make_loss
from dml.gpw.reference import similarities, statistics
from dml.gpw.statistics import Side

sys.path.insert(0, str(WORKERS))
from learned import LEARNING
from network import inputs, mixed_labels

CASES = [(name, how) for name in LEARNING for how in ("batch", "towers", "memory")]


@pytest.fixture(scope="module", params=[1, 2, 4])
def results(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"world{request.param}")
    run("learned.py", request.param, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


def with_tensors(name):
    """The loss with learned numbers that autograd follows. They are parameters of float32 at first."""
    loss = make_loss(name, **LEARNING[name])
    if name == "margin":
        raw = {"beta": torch.tensor(loss.weighting.beta).double()}
        fields = {"beta": raw["beta"].requires_grad_()}
    else:
        numbers = {"log_t": math.log(loss.weighting.t), "b": loss.weighting.b}
        raw = {k: torch.tensor(x).double().requires_grad_() for k, x in numbers.items()}
        fields = {"t": raw["log_t"].exp(), "b": raw["b"]}
    return replace(loss, weighting=replace(loss.weighting, **fields)), raw


def dense_memory_loss(loss, X, memory, labels):
    """The anchors of a batch against another set of the same labels, none of which is the same image."""
    S = similarities(torch.cat([X, memory]))[: len(X), len(X) :]
    same = labels[:, None] == labels
    t = statistics(loss, S, {Side.POSITIVE: same, Side.NEGATIVE: ~same})
    return loss.sum_of_anchors(t) / len(X) if loss.has_anchors else loss.weighting.value(t)


@pytest.mark.processes
@pytest.mark.parametrize(("name", "how"), CASES)
def test_the_gradient_of_what_is_learned_is_that_of_autograd(results, name, how):
    labels = mixed_labels()
    a, b = (normalize(inputs(labels, seed=seed), dim=1) for seed in (0, 1))
    loss, raw = with_tensors(name)
    if how == "towers":
        expected = dense_loss_of_towers(loss, a, labels, b, labels)
    else:
        expected = dense_loss(loss, a, labels)
    if how == "memory":
        expected = expected + 0.7 * dense_memory_loss(loss, a, b, labels)
    gradients = torch.autograd.grad(expected, list(raw.values()))
    norm = torch.stack(gradients).norm().item()
    assert norm > 1e-3
    for value, found, found_norm, _ in (each[name, how] for each in results):
        assert value == pytest.approx(expected.item(), rel=1e-12)
        for key, gradient in zip(raw, gradients, strict=True):
            assert found[key] == pytest.approx(gradient.item(), rel=1e-12)
        assert found_norm == pytest.approx(norm, rel=1e-12)
    assert len({each[name, how][1][key] for each in results for key in list(raw)[:1]}) == 1


@pytest.mark.parametrize("name", LEARNING)
def test_a_step_changes_the_loss_that_follows(name):
    labels = mixed_labels()
    X = normalize(inputs(labels), dim=1).requires_grad_()
    loss_fn = GlobalPairLoss(make_loss(name, **LEARNING[name], learn=True)).double()
    optimizer = torch.optim.SGD(loss_fn.parameters(), 1e-3)
    before = loss_fn(X, labels)
    before.backward()
    optimizer.step()
    after = loss_fn(X, labels)
    assert after < before
    learned = {k: p.item() for k, p in loss_fn.learned.items()}
    fields = {"t": math.exp(learned["log_t"]), "b": learned["b"]} if "b" in learned else learned
    fixed = make_loss(name, **{**LEARNING[name], **fields})
    assert after.item() == pytest.approx(dense_loss(fixed, X, labels).item(), rel=1e-12)


@pytest.mark.parametrize("name", LEARNING)
def test_nothing_is_learned_unless_it_is_asked_for(name):
    loss_fn = GlobalPairLoss(make_loss(name, **LEARNING[name]))
    assert list(loss_fn.parameters()) == []
    assert loss_fn.gradient_norm is None
