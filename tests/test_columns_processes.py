"""Two towers and a memory in real processes against the dense loss of one process."""

import sys
from functools import cache

import pytest
import torch
from batches import IDS, VARIANTS, make, relative_error
from fleet import WORKERS, run

from dml.cost import memory_bytes_sent
from dml.gpw import dense_loss, dense_loss_of_towers

sys.path.insert(0, str(WORKERS))
from network import Network, TwoTowers, inputs, remembered, tower_cases, tower_labels

pytestmark = pytest.mark.processes
FP64, LABEL = 8, 8


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def results(request, tmp_path_factory):
    """What each of W processes found."""
    folder = tmp_path_factory.mktemp(f"columns{request.param}")
    run("columns.py", request.param, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


def compare(results, key, loss, gradients):
    gradient = torch.cat([g.flatten() for g in gradients])
    assert len({found[key][0] for found in results}) == 1, "the loss differs between processes"
    assert results[0][key][0] == pytest.approx(loss, rel=1e-12, abs=1e-13)
    for found in results:
        if gradient.abs().max() < 1e-13:
            assert found[key][1].abs().max() < 1e-13
        else:
            assert relative_error(found[key][1], gradient) <= 1e-12, key


@cache
def of_towers(case):
    """Loss and gradients of every loss of a case, in one process."""
    labels, y_labels = tower_labels()[case]
    model = TwoTowers()
    X, Y = model(inputs(labels, seed=0), inputs(y_labels, seed=1))
    parameters, found = list(model.parameters()), {}
    for name in {name for name, _ in tower_cases(case)}:
        variant = VARIANTS[IDS.index(name)]
        X_, Y_ = (Z.detach().requires_grad_() for Z in (X, Y))
        loss = dense_loss_of_towers(make(variant), X_, labels, Y_, y_labels)
        through = torch.autograd.grad(loss, (X_, Y_))
        gradients = torch.autograd.grad((X, Y), parameters, through, retain_graph=True)
        found[name] = loss.item(), gradients
    return found


@pytest.mark.parametrize("case", tower_labels())
def test_two_towers_on_any_number_of_processes(results, case):
    for name, micro_batches in tower_cases(case):
        compare(results, ("towers", case, name, micro_batches), *of_towers(case)[name])


@cache
def of_memory():
    """Loss and gradients of every loss with a memory, in one process."""
    model, found = Network(), {}
    *before, (labels, ids, images) = remembered()
    M = torch.cat([model(x).detach() for _, _, x in before])[-100:]
    z, column_ids = (torch.cat([step[i] for step in before])[-100:] for i in (0, 1))
    for name, variant in zip(IDS, VARIANTS, strict=True):
        loss, X = make(variant), model(images)
        L = dense_loss(loss, X, labels)
        L = L + 0.7 * dense_loss(loss, X, labels, M, z, (ids, column_ids))
        found[name] = L.item(), torch.autograd.grad(L, list(model.parameters()))
    return found


def test_a_memory_on_any_number_of_processes(results):
    for name in IDS:
        for micro_batches in (1, 2) if name == IDS[0] else (1,):
            compare(results, ("memory", name, micro_batches), *of_memory()[name])


def test_every_process_holds_the_same_memory_in_the_order_of_the_batches(results):
    model, batches = Network(), list(remembered())
    M = torch.cat([model(x).detach() for _, _, x in batches])
    ids = torch.cat([ids for _, ids, _ in batches])
    ring = (torch.arange(180) % 100)[-100:]  # where each of the last 100 is
    for found in results:
        queue = found["queue", "multi_similarity", 1]
        assert torch.equal(queue["identities"][ring], ids[-100:])
        assert relative_error(queue["embeddings"][ring], M[-100:]) < 1e-14
        for name, x in queue.items():
            assert torch.equal(x, results[0]["queue", "multi_similarity", 1][name])


def test_a_memory_sends_what_the_plan_says(results):
    """Nothing, except for the losses that are one number of the whole batch: their sums over its pairs."""
    for found in results:
        for name, variant in zip(IDS, VARIANTS, strict=True):
            (*_, with_memory), without = found["memory", name, 1][2]
            planned = memory_bytes_sent(*variant, len(results))
            assert with_memory == without + planned, name
            assert (planned == 0) == (make(variant).has_anchors or len(results) == 1)


def test_towers_are_gathered_once(results):
    """Embeddings and labels of both, the statistics of both, a sum per direction."""
    W = len(results)
    for found in results:
        *_, sent = found["towers", "mixed", "multi_similarity", 1]
        rows = 2 * 60 // W  # of both towers
        statistics = 4  # minimum positive, maximum negative, two log-sum-exps
        assert sent == (W - 1) * (rows * (8 * FP64 + LABEL + statistics * FP64) + 2 * FP64)
