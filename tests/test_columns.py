"""Anchors against columns that are not the batch. Oracle: the dense loss from masks, plain autograd."""

import pytest
import torch
from batches import IDS, VARIANTS, batch, make, relative_error

from dml.cost import CPU, Cutting
from dml.gpw import GlobalPairLoss, dense_loss, make_loss
from dml.gpw.columns import Matches, places
from dml.gpw.engine.general_kernel import GeneralKernel
from dml.gpw.engine.ms_kernel import MsKernel
from dml.gpw.engine.rectangle import RectangleSweeps, of_rows, one_sweep_suffices
from dml.gpw.engine.workspace import Workspace

SMALL = Cutting(1, 64, None, kept_bytes=0, block_bytes=1)  # S is computed twice, in parts of a tile


def rectangle(R=21, C=47, seed=0, dtype=torch.float64):
    """Anchors and columns of one batch, some of them the same image: other embeddings, same identity."""
    X, labels = batch(m=R + C, classes=9, seed=seed, dtype=dtype)
    A, y, Y, z = X[:R], labels[:R], X[R:], labels[R:].clone()
    ids, column_ids = torch.arange(R), torch.arange(100, 100 + C)
    for i in range(0, R, 3):
        column = (2 * i) % C
        z[column], column_ids[column] = y[i], ids[i]
    return A, y, Y, z, (ids, column_ids)


def sweep(loss, A, y, Y, z, ids, tile=16, cutting=None, **more):
    matches = Matches.of(y, z, ids)
    return RectangleSweeps(loss, A, Y, matches, tile, Workspace(), cutting, **more)


def value(loss, t, anchors):
    return loss.sum_of_anchors(t) / anchors if loss.has_anchors else loss.weighting.value(t)


def expected(loss, A, y, Y, z, ids):
    A, Y = A.clone().requires_grad_(), Y.clone().requires_grad_()
    L = dense_loss(loss, A, y, Y, z, ids)
    return L.item(), *torch.autograd.grad(L, (A, Y))


@pytest.mark.parametrize("cutting", [CPU, SMALL], ids=["kept", "twice"])
@pytest.mark.parametrize("identity", [True, False])
@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
@torch.no_grad()
def test_value_and_both_gradients_are_those_of_the_dense_loss(variant, identity, cutting):
    loss, (A, y, Y, z, ids) = make(variant), rectangle()
    case = A, y, Y, z, ids if identity else None
    with torch.enable_grad():
        L, dA, dY = expected(loss, *case)
    assert dA.abs().max() > 0
    out, columns_out = torch.ones_like(A), torch.ones_like(Y)  # the gradient is added
    sweeps = sweep(loss, *case, cutting=cutting)
    t = sweeps.statistics()
    assert value(loss, t, len(A)).item() == pytest.approx(L, rel=1e-12, abs=1e-13)
    scale = 1 / loss.divisor(len(A))
    sweeps.gradient(of_rows(loss, t), None, scale, out, columns_out)
    assert relative_error(out - 1, dA) < 1e-12
    assert relative_error(columns_out - 1, dY) < 1e-12

    if one_sweep_suffices(loss):
        out, columns_out = torch.zeros_like(A), torch.zeros_like(Y)
        t = sweep(loss, *case, cutting=cutting).one_sweep(scale, out, columns_out)
        assert value(loss, t, len(A)).item() == pytest.approx(L, rel=1e-12, abs=1e-13)
        assert relative_error(out, dA) < 1e-12
        assert relative_error(columns_out, dY) < 1e-12


@pytest.mark.parametrize("kernel", [GeneralKernel.of, MsKernel.of], ids=["general", "ms"])
@torch.no_grad()
def test_either_kernel_of_mined_multi_similarity(kernel):
    loss, case = make(VARIANTS[0]), rectangle()
    with torch.enable_grad():
        L, dA, _ = expected(loss, *case)
    out = torch.zeros_like(dA)
    t = sweep(loss, *case, make_kernel=kernel).one_sweep(1 / len(dA), out)
    assert value(loss, t, len(dA)).item() == pytest.approx(L, rel=1e-12)
    assert relative_error(out, dA) < 1e-12


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
@torch.no_grad()
def test_a_batch_as_its_own_columns_is_the_batch(variant):
    """Both weights of a pair, and the self pair left out by identity. Oracle: GlobalPairLoss."""
    loss, (X, labels) = make(variant), batch(m=40)
    with torch.enable_grad():
        X_ = X.clone().requires_grad_()
        L = GlobalPairLoss(loss)(X_, labels)
        L.backward()
    ids = torch.arange(len(X))
    sweeps = sweep(loss, X, labels, X, labels, (ids, ids))
    t = sweeps.statistics()
    assert value(loss, t, len(X)).item() == pytest.approx(L.item(), rel=1e-12)
    out, anchors = torch.zeros_like(X), of_rows(loss, t)
    sweeps.gradient(anchors, anchors, 1 / loss.divisor(len(X)), out)
    assert relative_error(out, X_.grad) < 1e-12


@torch.no_grad()
def test_partial_results_of_two_sets_of_columns_merge():
    """As proxies on two processes would; every anchor has its positives in one of them."""
    loss, (A, y, Y, z, _) = make(VARIANTS[0]), rectangle()
    with torch.enable_grad():
        L, dA, dY = expected(loss, A, y, Y, z, None)
    parts = [
        sweep(loss, A, y, Y[some], z[some], None) for some in (slice(0, 20), slice(20, len(Y)))
    ]
    out, columns_out = torch.zeros_like(A), torch.zeros_like(Y)
    total = 0.0
    for blocks in zip(*(sweeps.blocks() for sweeps in parts), strict=True):
        t = {}
        for side, stage in loss.stages:
            (statistics, a), (_, b) = (block.reduce(side, stage, t) for block in blocks)
            t |= statistics.finish(statistics.merge(a, b))
        total += loss.sum_of_anchors(t).item()
        for block, some in zip(blocks, (columns_out[:20], columns_out[20:]), strict=True):
            block.gradient(of_rows(loss, t), 1 / len(A), out, some)
    assert total / len(A) == pytest.approx(L, rel=1e-12)
    assert relative_error(out, dA) < 1e-12
    assert relative_error(columns_out, dY) < 1e-12


CASES = {
    "no anchor finds its class": lambda y, z: (y, z + 10_000),
    "one class": lambda y, z: (torch.zeros_like(y), torch.zeros_like(z)),
    "one anchor has positives": lambda y, z: (torch.arange(len(y)), torch.full_like(z, 3)),
    "one column": lambda y, z: (y, z),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
@torch.no_grad()
def test_columns_that_are_hard_to_compare_with(variant, case):
    loss, (A, y, Y, z, _) = make(variant), rectangle(R=9, C=12)
    y, z = CASES[case](y, z)
    if case == "one column":
        Y, z = Y[:1], y[:1]
    with torch.enable_grad():
        L, dA, _ = expected(loss, A, y, Y, z, None)
    sweeps = sweep(loss, A, y, Y, z, None, tile=5)
    t, out = sweeps.statistics(), torch.zeros_like(A)
    assert value(loss, t, len(A)).item() == pytest.approx(L, rel=1e-12, abs=1e-13)
    sweeps.gradient(of_rows(loss, t), None, 1 / loss.divisor(len(A)), out)
    assert (out - dA).abs().max() < 1e-12


def test_matches_are_those_of_a_loop():
    _, y, _, z, (ids, column_ids) = rectangle()
    matches = Matches.of(y, z, (ids, column_ids))
    for i in range(len(y)):
        same = [j for j in range(len(z)) if z[j] == y[i]]
        columns, valid = matches.slots.columns[i], matches.slots.valid[i]
        assert columns.tolist() == same + [len(z)] * (matches.K - len(same))
        assert columns[valid].tolist() == [j for j in same if column_ids[j] != ids[i]]
    assert torch.equal(matches.select(slice(3, 9)).slots.columns, matches.slots.columns[3:9])
    assert places(torch.tensor([4, 2, 4, 4, 2])).tolist() == [0, 0, 1, 2, 1]


@torch.no_grad()
def test_columns_are_not_copied():
    """50,000 columns as the memory has them: what a step allocates is far less than they take."""
    torch.manual_seed(0)
    loss = make_loss("multi_similarity")
    A, Y = (torch.nn.functional.normalize(torch.randn(n, 128), dim=1) for n in (8, 50_000))
    y, z = torch.arange(8), torch.randint(1000, (50_000,))
    before = Y.clone()
    workspace, largest = Workspace(), []
    matches = Matches.of(y, z)
    sweeps = RectangleSweeps(loss, A, Y, matches, 1024, workspace)
    sweeps.one_sweep(1.0, torch.zeros_like(A))
    largest = max(x.numel() for x in workspace.buffers.values())
    assert largest < 8 * 51_000
    assert torch.equal(Y, before)
