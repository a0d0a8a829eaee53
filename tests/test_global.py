"""The global loss in real processes against the dense loss of one process."""

import sys
from functools import cache

import pytest
import torch
from batches import IDS, VARIANTS, make, relative_error
from fleet import WORKERS, run

from dml.gpw import dense_loss

sys.path.insert(0, str(WORKERS))
from network import Network, inputs, mixed_labels, splits

WORLD_SIZES = (1, 2, 3, 4)
TOLERANCE = {"torch.float64": 1e-12, "torch.float32": 1e-5}


@pytest.fixture(scope="module", params=WORLD_SIZES)
def results(request, tmp_path_factory):
    """What each of W processes found."""
    folder = tmp_path_factory.mktemp(f"world{request.param}")
    run("invariance.py", request.param, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


@cache
def reference(name, split=None):
    """One process, the whole batch, the dense loss, plain autograd, float64."""
    model, labels = Network(), splits()[split] if split else mixed_labels()
    variant = VARIANTS[IDS.index(name)]
    loss = dense_loss(make(variant), model(inputs(labels)), labels)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return loss.item(), torch.cat([g.flatten() for g in grads])


def check(results, key, expected, tolerance):
    loss, gradient = expected
    assert len({found[key][0] for found in results}) == 1, "the loss differs between processes"
    assert results[0][key][0] == pytest.approx(loss, rel=tolerance, abs=1e-13)
    if gradient.abs().max() < 1e-13:
        assert results[0][key][1].abs().max() < 1e-13
        return
    for found in results:
        assert relative_error(found[key][1].double(), gradient) <= tolerance


@pytest.mark.processes
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_any_number_of_processes_and_micro_batches_gives_the_dense_gradient(
    results, dtype, micro_batches
):
    for name in IDS:
        check(results, (dtype, name, micro_batches), reference(name), TOLERANCE[dtype])


@pytest.mark.processes
@pytest.mark.parametrize("split", splits())
def test_adversarial_splits(results, split):
    for name in IDS:
        check(results, (split, name), reference(name, split), 1e-12)


@pytest.mark.processes
@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_dropout_draws_the_masks_of_the_uncached_step(results, micro_batches):
    for found in results:
        loss, gradient = found["dropout", micro_batches]
        expected, expected_gradient = found["dropout reference", micro_batches]
        assert loss == pytest.approx(expected, rel=1e-12)
        assert relative_error(gradient, expected_gradient) <= 1e-12


def test_the_splits_are_what_they_say():
    """For W = 2: a process without positives, with no mined pair, with nothing at all."""
    for name, labels in splits().items():
        assert len(labels) == 60, name
    labels = splits()["one process without positives"]
    assert len(labels[30:].unique()) == 30
    assert not set(labels[:30].tolist()) & set(labels[30:].tolist())
