"""Anchors against columns that are not the batch. Oracle: the dense loss from masks, plain autograd."""

from functools import partial

import pytest
import torch
from batches import IDS, VARIANTS, batch, make, relative_error
from torch.nn.functional import cross_entropy, logsigmoid, normalize

from dml.cost import CPU, Cutting
from dml.gpw import GlobalPairLoss, Memory, dense_loss, dense_loss_of_towers, make_loss
from dml.gpw.columns import Matches, places
from dml.gpw.engine.general_kernel import GeneralKernel
from dml.gpw.engine.ms_kernel import MsKernel
from dml.gpw.engine.rectangle import RectangleSweeps, of_rows, one_sweep_suffices
from dml.gpw.engine.workspace import Workspace

MS = make_loss("multi_similarity", beta=10, lam=0.5)
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


def towers(b=20, c=20, seed=0, dtype=torch.float64):
    X, labels = batch(m=b + c, classes=9, seed=seed, dtype=dtype)
    return X[:b], labels[:b], X[b:], labels[b:]


def of_towers(fn, x, y):
    """The value and both gradients."""
    (X, labels), (Y, y_labels) = x, y
    X, Y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    L = fn(X, labels, Y, y_labels)
    return L.item(), *torch.autograd.grad(L, (X, Y))


TOWERS = {
    "same labels": lambda y, z: (y, y),
    "scattered": lambda y, z: (y, z),
    "all different": lambda y, z: (torch.arange(len(y)), torch.arange(len(z))),
    "no common class": lambda y, z: (y, z + 10_000),
    "one class": lambda y, z: (y * 0, z * 0),
}


@pytest.mark.parametrize("case", [*TOWERS, "sizes"])
@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_two_towers_are_those_of_the_dense_loss(variant, case):
    loss = make(variant)
    X, y, Y, z = towers(c=33) if case == "sizes" else towers()
    if case in TOWERS:
        y, z = TOWERS[case](y, z)
    expected = of_towers(partial(dense_loss_of_towers, loss), (X, y), (Y, z))
    for cutting in (CPU, SMALL):
        fn = GlobalPairLoss(loss, tile=8)
        fn.workspace.cuttings[X.device] = cutting
        found = of_towers(fn, (X, y), (Y, z))
        assert found[0] == pytest.approx(expected[0], rel=1e-12, abs=1e-13)
        for a, b in zip(found[1:], expected[1:], strict=True):
            assert (a - b).abs().max() <= 1e-12 * max(1, b.abs().max())


def test_info_nce_of_towers_is_the_loss_of_clip():
    """Oracle: open_clip's formula, the mean of the cross-entropies of rows and columns."""
    X, _, Y, _ = towers()
    pairs, tau = torch.arange(len(X)), 0.07

    def clip(X, labels, Y, y_labels):
        logits = X @ Y.T / tau
        return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2

    found = of_towers(GlobalPairLoss(make_loss("info_nce", tau=tau)), (X, pairs), (Y, pairs))
    expected = of_towers(clip, (X, pairs), (Y, pairs))
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    for a, b in zip(found[1:], expected[1:], strict=True):
        assert relative_error(a, b) < 1e-12


def test_pairwise_sigmoid_of_towers_is_the_loss_of_siglip():
    """Oracle: the formula of SigLIP, -1/n sum_ij log sigmoid(z_ij (t x_i y_j + b))."""
    X, _, Y, _ = towers()
    pairs, t, b = torch.arange(len(X)), 10.0, -10.0

    def siglip(X, labels, Y, y_labels):
        z = 2 * torch.eye(len(X), dtype=X.dtype) - 1
        return -logsigmoid(z * (t * X @ Y.T + b)).sum() / len(X)

    loss = make_loss("pairwise_sigmoid", t=t, b=b)
    found = of_towers(GlobalPairLoss(loss), (X, pairs), (Y, pairs))
    expected = of_towers(siglip, (X, pairs), (Y, pairs))
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    for a, c in zip(found[1:], expected[1:], strict=True):
        assert relative_error(a, c) < 1e-12


def test_a_frozen_tower_gets_no_gradient():
    X, y, Y, z = towers()
    leaf = X.clone().requires_grad_()
    fn = GlobalPairLoss(make(VARIANTS[0]))
    fn(leaf, y, Y, z, all_labels=y, all_y_labels=z).backward()
    assert relative_error(leaf.grad, of_towers(fn, (X, y), (Y, z))[1]) < 1e-14
    assert not fn(X, y, Y, z).requires_grad


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"y": torch.ones(20, 7, dtype=torch.float64)},
            "of the same size, type and device, not 8 of",
        ),
        ({"y_labels": None}, "needs both embeddings and labels"),
        ({"y_labels": torch.arange(3)}, "y: embeddings must be m x d and labels of length m"),
        ({"all_labels": torch.arange(20)}, "must be given together"),
    ],
)
def test_mistakes_with_towers_get_a_sentence(change, sentence):
    X, y, Y, z = towers()
    given = {"embeddings": X, "labels": y, "y": Y, "y_labels": z, **change}
    with pytest.raises(ValueError, match=sentence):
        GlobalPairLoss(MS)(**given)
    with pytest.raises(ValueError, match="a memory is for one set of embeddings"):
        GlobalPairLoss(MS, memory=Memory(10))(X, y, Y, z)


def steps(count=6, m=12):
    """Batches of images of which several come again: embeddings, labels and identities."""
    generator = torch.Generator().manual_seed(0)
    X, labels = batch(m=30, classes=6)
    for _ in range(count):
        ids = torch.randperm(30, generator=generator)[:m]
        noise = 0.3 * torch.randn(m, 8, generator=generator, dtype=torch.float64)
        yield normalize(X[ids] + noise, dim=1), labels[ids], ids


@pytest.mark.parametrize("size", [12, 30, 50])
@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_the_memory_is_that_of_a_list(variant, size):
    """Oracle: a list of all earlier embeddings, of which the last count, in the dense loss."""
    loss, weight, from_step = make(variant), 0.7, 1
    fn = GlobalPairLoss(loss, tile=8, memory=Memory(size, weight, from_step))
    queue = []
    for step, (X, labels, ids) in enumerate(steps()):
        leaves = [X.clone().requires_grad_() for _ in range(2)]
        found = fn(leaves[0], labels, identities=ids)
        expected = dense_loss(loss, leaves[1], labels)
        if queue:
            M, z, column_ids = (torch.cat(x)[-size:] for x in zip(*queue, strict=True))
            of_memory = dense_loss(loss, leaves[1], labels, M, z, (ids, column_ids))
            expected = expected + weight * of_memory
            share = ((labels[:, None] == z) & (ids[:, None] != column_ids)).any(1).double().mean()
            assert fn.memory.found == share
        assert found.item() == pytest.approx(expected.item(), rel=1e-12, abs=1e-13)
        found.backward()
        expected.backward()
        assert relative_error(leaves[0].grad, leaves[1].grad) < 1e-12
        if step >= from_step:
            queue.append((X, labels, ids))
    assert fn.memory.used == min(size, 60)


def test_a_memory_that_was_saved_goes_on_to_the_bit():
    batches = list(steps())
    straight, broken = (GlobalPairLoss(MS, memory=Memory(30)) for _ in range(2))
    expected = [straight(X, labels, identities=ids) for X, labels, ids in batches]
    for X, labels, ids in batches[:3]:
        broken(X, labels, identities=ids)
    resumed = GlobalPairLoss(MS, memory=Memory(30))
    state = {name: x.clone() for name, x in broken.memory.state().items()}
    resumed.memory.load(state, torch.device("cpu"))
    for (X, labels, ids), value in zip(batches[3:], expected[3:], strict=True):
        assert torch.equal(resumed(X, labels, identities=ids), value)
    for name, x in straight.memory.state().items():
        assert torch.equal(x, resumed.memory.state()[name]), name


def test_without_identities_every_embedding_is_another_image():
    (X, labels, _), *_ = steps()
    fn = GlobalPairLoss(MS, memory=Memory(30))
    fn(X, labels)
    expected = dense_loss(MS, X, labels) + dense_loss(MS, X, labels, X, labels)
    assert fn(X, labels).item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize(
    ("make_it", "sentence"),
    [
        (lambda: Memory(0), "at least 1, not 0"),
        (lambda: Memory(5, weight=0), "must be above 0"),
        (
            lambda: GlobalPairLoss(MS, memory=Memory(5))(*batch(), identities=torch.arange(3)),
            "identities must be those of the images of all processes, on the CPU: 30 numbers",
        ),
    ],
)
def test_mistakes_with_a_memory_get_a_sentence(make_it, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_it()
