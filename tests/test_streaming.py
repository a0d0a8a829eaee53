"""The engine against the dense loss, and against what no computation of a loss may do."""

import copy
import math
import pickle
import warnings
from collections import Counter
from dataclasses import replace
from functools import partial

import naive
import pytest
import torch
from batches import IDS, VARIANTS, batch, make, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dml.cost import CPU
from dml.distributed.collectives import Wire
from dml.distributed.precision import full_precision
from dml.gpw import GlobalPairLoss, dense_loss, make_loss, pair_weights
from dml.gpw.engine.general_kernel import GeneralKernel
from dml.gpw.engine.kernel import choose_kernel
from dml.gpw.engine.ms_kernel import MsKernel
from dml.gpw.engine.one_tile import OneTileSweeps
from dml.gpw.engine.rows import RowSweeps
from dml.gpw.engine.sweeps import choose_sweeps
from dml.gpw.engine.symmetric import SymmetricSweeps
from dml.gpw.engine.tiles import spans
from dml.gpw.engine.workspace import Workspace
from dml.gpw.grouping import GlobalBatch, Groups
from dml.gpw.reference import loss_of_similarities, weights_of_similarities

MS = make_loss("multi_similarity")


def value_and_gradient(fn, X, labels):
    X = X.clone().requires_grad_()
    value = fn(X, labels)
    (gradient,) = torch.autograd.grad(value, X)
    return value.detach(), gradient


def dense(loss):
    return lambda X, labels: dense_loss(loss, X, labels)


def assert_equals_dense(loss, X, labels, **how):
    expected, expected_gradient = value_and_gradient(dense(loss), X, labels)
    value, gradient = value_and_gradient(GlobalPairLoss(loss, **how), X, labels)
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    assert relative_error(gradient, expected_gradient) < 1e-12


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
@pytest.mark.parametrize("tile", [1, 6, 7, 18, 64])  # m = 18: divides, does not, m, above m
def test_streaming_equals_dense(variant, tile):
    assert_equals_dense(make(variant), *batch(m=18, classes=5), tile=tile)


KEPT = {"computed twice": 0, "in part": 5000, "kept": 2**20}  # bytes; S of m = 64 has 32 KiB


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
@pytest.mark.parametrize("tile", [8, 20, 64])
@pytest.mark.parametrize("kept", KEPT)
def test_sweeps_by_symmetry_equal_dense(variant, tile, kept):
    """Classes smaller than a tile, so that a process alone uses both sides of a tile."""
    X, labels = batch(m=64, classes=25)
    sweeps = partial(SymmetricSweeps, cutting=replace(CPU, kept_bytes=KEPT[kept]))
    assert_equals_dense(make(variant), X, labels, tile=tile, kind=sweeps)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_sweeps_by_rows_equal_dense(variant, kept):
    sweeps = partial(RowSweeps, cutting=replace(CPU, kept_bytes=KEPT[kept]))
    assert_equals_dense(make(variant), *batch(m=30), tile=7, kind=sweeps)


@pytest.mark.parametrize("tile", [20, 64])
@pytest.mark.parametrize("sweeps", [RowSweeps, SymmetricSweeps])
@pytest.mark.parametrize("kernel", [GeneralKernel.of, MsKernel.of], ids=["general", "ms"])
def test_either_kernel_of_mined_multi_similarity_equals_dense(sweeps, kernel, tile):
    X, labels = batch(m=64, classes=25)
    sweeps = partial(sweeps, make_kernel=kernel)
    assert_equals_dense(make(VARIANTS[0]), X, labels, tile=tile, kind=sweeps)


def chosen(loss, tile=64, length=1.0, classes=25):
    X, labels = batch(m=64, classes=classes, dtype=torch.float32)
    found = GlobalBatch(length * X, labels, Wire())
    sweeps = choose_sweeps(loss, found, tile, Workspace())
    return type(sweeps), type(choose_kernel(loss, Workspace(), None))


def test_sweeps_and_kernel_are_chosen_by_loss_and_batch():
    weighting, large = make_loss("ms_weighting"), make_loss("multi_similarity", beta=56)
    assert chosen(MS) == (OneTileSweeps, MsKernel)
    assert chosen(MS, tile=20) == (SymmetricSweeps, MsKernel)
    assert chosen(MS, tile=20, classes=2) == (RowSweeps, MsKernel)  # a class larger than a tile
    assert chosen(weighting) == (SymmetricSweeps, GeneralKernel)  # another loss
    assert chosen(large) == (OneTileSweeps, MsKernel)  # whatever the exponents are
    assert chosen(MS, length=1.2) == (OneTileSweeps, MsKernel)
    assert chosen(large, length=0.5) == (OneTileSweeps, MsKernel)


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_float32_equals_float64(variant):
    X, labels = batch(m=200, d=32, classes=40)
    X = X.float()
    loss = make(variant)
    expected, expected_gradient = value_and_gradient(dense(loss), X.double(), labels)
    value, gradient = value_and_gradient(GlobalPairLoss(loss, tile=64), X, labels)
    assert value.dtype == gradient.dtype == torch.float32
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    assert relative_error(gradient.double(), expected_gradient) < 1e-5


def test_upstream_gradient_scales_and_evaluation_needs_no_gradient():
    X, labels = batch()
    _, gradient = value_and_gradient(GlobalPairLoss(MS), X, labels)
    _, tripled = value_and_gradient(lambda X, y: 3 * GlobalPairLoss(MS)(X, y), X, labels)
    assert relative_error(tripled, 3 * gradient) < 1e-15
    assert not GlobalPairLoss(MS)(X, labels).requires_grad


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(half):
    X, labels = batch(m=60)
    X16 = X.to(half)
    assert torch.equal(dense_loss(MS, X16, labels), dense_loss(MS, X16.float(), labels))
    expected, expected_gradient = value_and_gradient(dense(MS), X16.float(), labels)
    value, gradient = value_and_gradient(GlobalPairLoss(MS), X16, labels)
    assert value.dtype == torch.float32
    assert gradient.dtype == half
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    assert relative_error(gradient.float(), expected_gradient) < 1e-2


def test_autocast_stays_outside_of_the_dense_loss():
    X, labels = batch(m=200, d=64, dtype=torch.float32)
    expected, w_neg = dense_loss(MS, X, labels), pair_weights(MS, X, labels)[1]
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(dense_loss(MS, X, labels), expected)
        assert torch.equal(pair_weights(MS, X, labels)[1], w_neg)


def test_second_derivatives_are_refused_not_wrong():
    X, labels = batch()
    X.requires_grad_()
    with pytest.raises(RuntimeError, match="use dense_loss"):
        torch.autograd.grad(GlobalPairLoss(MS)(X, labels), X, create_graph=True)


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_a_loss_can_be_pickled_after_use(variant):
    """Launchers and spawned workers pickle it."""
    X, labels = batch()
    used = GlobalPairLoss(make(variant))
    value = used(X, labels)
    for again in (pickle.loads(pickle.dumps(used)), copy.deepcopy(used)):
        assert torch.equal(again(X, labels), value)
        assert again.loss == used.loss


def test_no_gradient_is_computed_where_none_is_wanted():
    class NoGradient(SymmetricSweeps):
        def gradient(self, t, scale, out):
            raise AssertionError("the gradient was computed")

    X, labels = batch()
    X.requires_grad_()
    loss = GlobalPairLoss(MS, kind=NoGradient)
    with torch.no_grad():
        assert not loss(X, labels).requires_grad
    loss(X.detach(), labels)
    with pytest.raises(AssertionError, match="was computed"):
        loss(X, labels)


def test_autocast_and_reduced_matmul_precision_stay_outside():
    X, labels = batch(m=300, d=64, dtype=torch.float32)
    expected, expected_gradient = value_and_gradient(GlobalPairLoss(MS), X, labels)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value, gradient = value_and_gradient(GlobalPairLoss(MS), X, labels)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(value, expected)
    assert torch.equal(gradient, expected_gradient)


def test_full_precision_restores_the_choice_after_an_error():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision

    def fail():
        with full_precision(torch.device("cpu")):
            raise RuntimeError(f"inside: {matmul.fp32_precision}")

    with pytest.raises(RuntimeError, match="inside: ieee"):
        fail()
    assert matmul.fp32_precision == before


def test_similarities_of_a_pair_are_the_same_bits_in_both_rows():
    """Mining decides about (i, j) in row i and in row j, so blocks of any size must agree on S."""
    m = 1025  # one row more than blocks of 64 or 512 hold
    X, _ = batch(m=m, d=64, dtype=torch.float32)
    S = X @ X.T
    for width in (64, 200, 512):
        rows = torch.cat([X[span] @ X.T for span in spans(m, width)])
        assert torch.equal(rows, S)
        assert torch.equal(rows, rows.T)


# --- adversarial batches: each by the dense loss and by the engine, for every loss ---


def naive_value(variant, X, labels):
    name, parameters = variant
    rest = {k: v for k, v in parameters.items() if k not in ("mine", "eps")}
    return naive.value(name, X @ X.T, labels, eps=parameters.get("eps"), **rest)


def both_ways(variant, X, labels, tile=4):
    """Dense loss, engine and weights agree with each other, and the value with the naive loop."""
    loss = make(variant)
    expected, expected_gradient = value_and_gradient(dense(loss), X, labels)
    value, gradient = value_and_gradient(GlobalPairLoss(loss, tile=tile), X, labels)
    assert value.isfinite()
    assert gradient.isfinite().all()
    assert torch.allclose(value, expected, rtol=1e-12, atol=1e-14)
    assert value.item() == pytest.approx(naive_value(variant, X, labels), rel=1e-11, abs=1e-14)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-11, atol=1e-14)
    w_pos, w_neg = pair_weights(loss, X, labels)
    G = w_neg - w_pos
    assert torch.allclose(gradient, (G + G.T) @ X, rtol=1e-11, atol=1e-14)
    return value, gradient


NEEDS_NEGATIVES = {
    *("multi_similarity", "ms_mining", "triplet", "lifted_structure", "n_pairs", "nca"),
    *("histogram", "smooth_ap", "info_nce", "circle"),
}


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_all_one_class(variant):
    X, _ = batch(m=12)
    value, gradient = both_ways(variant, X, torch.full((12,), 4))
    if variant[1].get("variant") == "in":  # of supcon: log P, whatever the similarities
        assert value == pytest.approx(math.log(11))
        assert (gradient == 0).all()
    elif variant[0] in NEEDS_NEGATIVES or "mine" in variant[1]:
        assert value == 0
        assert (gradient == 0).all()
    else:
        assert (gradient != 0).any()


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_all_classes_distinct(variant):
    X, _ = batch(m=12)
    value, gradient = both_ways(variant, X, torch.arange(12))
    assert value == 0
    assert (gradient == 0).all()


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_no_nan_arises_on_the_way(variant):
    """Not even one that a mask would remove, so that autograd's anomaly detection stays usable."""
    X, labels = batch(m=12)
    for y in (labels, torch.zeros_like(labels), torch.arange(12)):
        with torch.autograd.detect_anomaly(check_nan=True):
            value_and_gradient(dense(make(variant)), X, y)


def test_histogram_counts_similarities_beyond_one_at_the_end():
    _, labels = batch(m=12)
    S = torch.linspace(-1.2, 1.2, 144, dtype=torch.float64).view(12, 12)
    loss = make_loss("histogram", bins=21)
    inside = loss_of_similarities(loss, S.clamp(-1, 1), labels)
    assert torch.allclose(loss_of_similarities(loss, S, labels), inside, rtol=1e-12)
    assert all((w >= 0).all() for w in weights_of_similarities(loss, S, labels))


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_duplicate_images(variant):
    """Similarity exactly 1, between positives and between negatives."""
    X = torch.eye(4, dtype=torch.float64)[[0, 0, 0, 1, 1, 2, 2, 3, 3, 3]]
    both_ways(variant, X, torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4]))
    both_ways(variant, X[:1].expand(10, -1).contiguous(), torch.arange(10) // 2)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if "eps" in v[1]], ids=str)
def test_mining_is_strict(variant):
    """Eq. 11 and 12 with eps = 0 and ties: a pair equal to the hardest is not selected."""
    name, parameters = variant
    X = torch.eye(4, dtype=torch.float64)[[0, 0, 0, 1, 1, 2, 2, 3, 3, 3]]
    both_ways((name, {**parameters, "eps": 0.0}), X, torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4]))
    value, _ = both_ways(
        (name, {**parameters, "eps": 0.0}), X[:1].expand(10, -1), torch.arange(10) // 2
    )
    assert value == 0


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_single_sample(variant):
    X, _ = batch(m=1)
    value, gradient = both_ways(variant, X, torch.tensor([7]))
    assert value == 0
    assert (gradient == 0).all()


@pytest.mark.parametrize("variant", [v for v in VARIANTS if "eps" in v[1]], ids=str)
def test_no_mined_pair_gives_zero_still_attached(variant):
    X = torch.eye(3, dtype=torch.float64)[[0, 0, 1, 1, 2, 2]]
    labels = torch.arange(6) // 2
    for fn in (dense(make(variant)), GlobalPairLoss(make(variant), tile=4)):
        leaf = X.clone().requires_grad_()
        value = fn(leaf, labels)
        assert value == 0
        value.backward()
        assert (leaf.grad == 0).all()


@pytest.mark.parametrize("beta", [50.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tile", [16, 64])
def test_large_beta_does_not_overflow(beta, dtype, tile):
    for name in (
        "multi_similarity",
        "ms_weighting",
        "binomial_deviance",
        "lifted_structure_star",
        "bin_lifted",
    ):
        parameters = {"alpha": 1000.0, "beta": beta}
        if name not in ("lifted_structure_star",):
            parameters["lam"] = 0.5
        loss = make_loss(name, **parameters)
        X, labels = batch(m=40, spread=1.5)
        value, gradient = value_and_gradient(GlobalPairLoss(loss, tile=tile), X.to(dtype), labels)
        assert value.isfinite()
        assert gradient.isfinite().all()
        expected, expected_gradient = value_and_gradient(dense(loss), X, labels)
        rel = 1e-4 if dtype == torch.float32 else 1e-11
        assert value.item() == pytest.approx(expected.item(), rel=rel)
        # float32 rounds beta S by up to beta * 6e-8, and the weight with it
        limit = 1e-3 if dtype == torch.float32 else 1e-11
        assert relative_error(gradient.double(), expected_gradient) < limit


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_labels_of_any_integer_type(dtype):
    X, labels = batch()
    labels = labels.clamp(max=100)
    expected = dense_loss(MS, X, labels)
    assert torch.equal(dense_loss(MS, X, labels.to(dtype)), expected)
    assert torch.allclose(GlobalPairLoss(MS)(X, labels.to(dtype)), expected, rtol=1e-13)


@pytest.mark.parametrize("tile", [7, 64])
def test_embeddings_that_are_not_normalised_are_taken_as_they_are(tile):
    X, labels = batch()
    X = 1.7 * X
    loss = make_loss("multi_similarity", alpha=2, beta=5, lam=0.5, eps=0.1)
    expected, expected_gradient = value_and_gradient(dense(loss), X, labels)
    value, gradient = value_and_gradient(GlobalPairLoss(loss, tile=tile), X, labels)
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    assert relative_error(gradient, expected_gradient) < 1e-12


ENGINES = {"dense": dense(MS), "streaming": GlobalPairLoss(MS)}
ENGINES["weights"] = lambda X, labels: pair_weights(MS, X, labels)


@pytest.mark.parametrize("engine", ENGINES)
def test_bad_input_is_one_clear_sentence(engine):
    fn = ENGINES[engine]
    X, labels = batch()
    with pytest.raises(ValueError, match=r"empty \(m = 0\)"):
        fn(X[:0], labels[:0])
    with pytest.raises(ValueError, match=r"\(30, 8\) and \(29,\)"):
        fn(X, labels[1:])
    with pytest.raises(ValueError, match=r"\(8,\) and \(30,\)"):
        fn(X[0], labels)
    with pytest.raises(ValueError, match=r"labels must be integers .* not torch.float32"):
        fn(X, labels.float())
    with pytest.raises(ValueError, match=r"embeddings must be floating point, not torch.int64"):
        fn(X.long(), labels)
    X[3, 1], X[8, 0], X[8, 2] = torch.nan, torch.inf, -torch.inf
    with pytest.raises(ValueError, match=r"2 of 30 embeddings hold NaN or infinity.* row 3"):
        fn(X, labels)
    with pytest.raises(ValueError, match=r"30 of 30 embeddings .* too large"):
        fn(torch.full((30, 8), 1e20), labels)
    with pytest.raises(ValueError, match="must be tensors, not Tensor and list"):
        fn(X, labels.tolist())


@pytest.mark.parametrize("engine", ENGINES)
def test_embeddings_too_large_for_their_similarities_are_refused(engine):
    """With one dimension, their norm is finite and only its square is not."""
    for X in (torch.full((4, 1), 1e200, dtype=torch.float64), torch.full((4, 1), 1e30)):
        with pytest.raises(ValueError, match="4 of 4 embeddings hold NaN or infinity, or are too"):
            ENGINES[engine](X, torch.tensor([0, 0, 1, 1]))


def test_bad_settings_are_refused():
    with pytest.raises(TypeError, match="must come from make_loss, not 'multi_similarity'"):
        GlobalPairLoss("multi_similarity")
    with pytest.raises(ValueError, match="tile must be a whole number, at least 1, not 0"):
        GlobalPairLoss(MS, tile=0)
    with pytest.raises(ValueError, match=r"reduction must be 'mean' .* not 'avg'"):
        GlobalPairLoss(MS, reduction="avg")


# --- properties ---

variants = st.sampled_from(VARIANTS)
sizes = st.integers(2, 24)
seeds = st.integers(0, 10_000)


@settings(max_examples=60)
@given(variants, sizes, seeds)
def test_permuting_the_batch_permutes_the_gradient(variant, m, seed):
    X, labels = batch(m=m, d=4, classes=5, seed=seed)
    loss = GlobalPairLoss(make(variant), tile=5)
    value, gradient = value_and_gradient(loss, X, labels)
    order = torch.randperm(m, generator=torch.Generator().manual_seed(seed + 1))
    permuted, permuted_gradient = value_and_gradient(loss, X[order], labels[order])
    assert torch.allclose(permuted, value, rtol=1e-10, atol=1e-12)
    assert torch.allclose(permuted_gradient, gradient[order], rtol=1e-9, atol=1e-11)


@settings(max_examples=60)
@given(variants, sizes, seeds)
def test_relabelling_the_classes_changes_nothing(variant, m, seed):
    X, labels = batch(m=m, d=4, classes=5, seed=seed)
    names = torch.randperm(2000, generator=torch.Generator().manual_seed(seed + 1)) - 1000
    loss = GlobalPairLoss(make(variant), tile=5)
    value, gradient = value_and_gradient(loss, X, labels)
    renamed, renamed_gradient = value_and_gradient(loss, X, names[labels + 5])
    assert torch.equal(renamed, value)
    assert torch.equal(renamed_gradient, gradient)


@settings(max_examples=100)
@given(variants, sizes, seeds, st.integers(1, 30))
def test_cutting_into_tiles_changes_nothing(variant, m, seed, tile):
    X, labels = batch(m=m, d=4, classes=5, seed=seed)
    value, gradient = value_and_gradient(GlobalPairLoss(make(variant), tile=100), X, labels)
    tiled, tiled_gradient = value_and_gradient(GlobalPairLoss(make(variant), tile=tile), X, labels)
    assert torch.allclose(tiled, value, rtol=1e-10, atol=1e-12)
    assert torch.allclose(tiled_gradient, gradient, rtol=1e-9, atol=1e-11)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=20))
def test_groups_hold_each_class_in_one_interval(labels):
    labels = torch.tensor(labels)
    groups = Groups.of(labels)
    grouped = labels[groups.order]
    assert sorted(groups.order.tolist()) == list(range(len(labels)))
    for position, (start, end) in enumerate(
        zip(groups.start.tolist(), groups.end.tolist(), strict=True)
    ):
        inside = [p for p in range(len(labels)) if grouped[p] == grouped[position]]
        assert inside == list(range(start, end))
    assert groups.K == max((labels == label).sum() for label in labels)


def test_a_batch_that_is_grouped_already_stays_in_place():
    labels = torch.tensor([5, 5, 2, 2, 9, 9, 1, 1])
    assert torch.equal(Groups.of(labels).order, torch.arange(8))


LABELS = {
    "two of each": [4, 4, 1, 1, 7, 7, 2, 2],
    "two of each, other classes": [1, 1, 9, 9, 4, 4, 3, 3],
    "other sizes": [4, 4, 4, 1, 7, 7, 2, 2],
    "two of each, twice the same class": [4, 4, 1, 1, 4, 4, 2, 2],
    "scattered": [4, 1, 7, 2, 2, 1, 7, 4],
    "fewer": [4, 4, 1, 1],
}


def test_what_is_reused_from_the_last_batch_does_not_change_the_next():
    used = GlobalPairLoss(MS, tile=4)
    for name in (*LABELS, *LABELS, *reversed(LABELS)):
        labels = torch.tensor(LABELS[name])
        X, _ = batch(m=len(labels))
        value, gradient = value_and_gradient(used, X, labels)
        expected, expected_gradient = value_and_gradient(dense(MS), X, labels)
        assert torch.allclose(value, expected, rtol=1e-12), name
        assert relative_error(gradient, expected_gradient) < 1e-12, name


def test_a_batch_with_the_same_runs_as_the_last_one_reuses_its_groups():
    groups = {name: Groups.of(torch.tensor(labels)) for name, labels in LABELS.items()}
    last = groups["two of each"]
    again = {name: Groups.of(torch.tensor(labels), last) for name, labels in LABELS.items()}
    assert [name for name, g in again.items() if g is last] == [*LABELS][:2]


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
@pytest.mark.parametrize("sweeps", [RowSweeps, SymmetricSweeps])
def test_tiles_in_small_parts(variant, sweeps):
    X, labels = batch()
    loss = make(variant)
    expected, expected_gradient = value_and_gradient(dense(loss), X, labels)
    for pairs, tile in ((1, 8), (7, 100), (40, 8), (40, 100), (None, 8)):
        in_parts = partial(sweeps, cutting=replace(CPU, part_pairs=pairs))
        fn = GlobalPairLoss(loss, tile=tile, kind=in_parts)
        value, gradient = value_and_gradient(fn, X, labels)
        assert torch.allclose(value, expected, rtol=1e-12)
        assert relative_error(gradient, expected_gradient) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [0.3, 1, 3])
@pytest.mark.parametrize("beta", [0.5, 50, 400])
@pytest.mark.parametrize("alpha", [2, 60])
@pytest.mark.parametrize("tile", [50, 200])
def test_multi_similarity_in_place_holds_for_any_exponent(beta, length, dtype, alpha, tile):
    loss = make_loss("multi_similarity", alpha=alpha, beta=beta, lam=0.5)
    X, labels = batch(m=120, classes=40)
    X = (length * X).to(dtype)
    expected, expected_gradient = value_and_gradient(dense(loss), X.double(), labels)
    value, gradient = value_and_gradient(GlobalPairLoss(loss, tile=tile), X, labels)
    within = 1e-12 if dtype == torch.float64 else 3e-5 * max(1, alpha / 50, beta / 50)
    assert value.item() == pytest.approx(expected.item(), rel=within)
    assert relative_error(gradient.double(), expected_gradient) < within


class Denormals(TorchDispatchMode):
    """Counts the denormal numbers in the results of operations on tiles, by operation."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        allocated = op._schema.name.startswith(("aten::empty", "aten::new_empty"))
        viewed = any(r.alias_info and not r.alias_info.is_write for r in op._schema.returns)
        for x in () if allocated or viewed else tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel() > 1000:
                denormal = (x != 0) & (x.abs() < torch.finfo(x.dtype).tiny)
                self.found[op._schema.name] += int(denormal.sum())
        return result


@pytest.mark.parametrize("tile", [50, 1024])
@pytest.mark.parametrize(
    ("alpha", "beta", "lam", "eps"),
    [
        *((2, 40, 0.5, 0.1), (2, 50, 1.0, 0.1)),  # the authors' code, the paper's text
        *((18, 76, 0.77, 0.39), (7.5, 48, 0.63, 0.72), (16, 157, 0.72, 0.34)),  # tuned
    ],
)
def test_no_denormal_number_arises(alpha, beta, lam, eps, tile):
    """Many processors work on them many times as slowly. From all negatives mined to few."""
    loss = make_loss("multi_similarity", alpha=alpha, beta=beta, lam=lam, eps=eps)
    for spread in (0, 0.5, 1, 2, 4):
        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(150) // 5
        centres, noise = torch.randn(2, 150, 32, generator=generator)
        X = spread * centres[labels] + 0.5 * centres[-1] + noise
        with Denormals() as denormals:
            GlobalPairLoss(loss, tile=tile)(normalize(X).requires_grad_(), labels)
        assert denormals.found.total() == 0, denormals.found


@pytest.mark.parametrize("loss", [MS, make_loss("multi_similarity", alpha=60, lam=3)], ids=str)
def test_a_batch_without_an_informative_pair_has_a_gradient_of_exact_zeros(loss):
    """Opposite classes: no negative is near the positives, and the exponents are far below e^-70."""
    X = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0]])
    labels = torch.tensor([0, 0, 1, 1])
    value, gradient = value_and_gradient(GlobalPairLoss(loss), X, labels)
    assert value == 0
    assert torch.equal(gradient, torch.zeros_like(X))


@pytest.mark.parametrize("tile", [2, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_pair_that_is_not_selected_has_a_weight_of_exactly_zero(tile, dtype):
    """Each class is near an axis of its own, and only the first two are near each other."""
    X = torch.tensor([[1.0, 0, 0], [0.6, 0.8, 0], [0.8, 0.6, 0], [0, 1.0, 0], [0, 0, 1], [0, 0, 1]])
    loss, labels = GlobalPairLoss(MS, tile=tile), torch.arange(6) // 2
    _, gradient = value_and_gradient(loss, X.to(dtype), labels)
    assert (gradient[:4, :2] != 0).all()
    assert (gradient[:4, 2] == 0).all()
    assert (gradient[4:] == 0).all()


@pytest.mark.parametrize("beta", [40, 54, 56, 63, 90])
@pytest.mark.parametrize("m", [1000, 10_000], ids=["one tile", "many"])
def test_multi_similarity_in_place_does_not_overflow(beta, m):
    """The largest possible z: positives opposite, and thousands of negatives equal to an anchor."""
    loss = make_loss("multi_similarity", beta=beta, lam=0.5)
    X = torch.zeros(m, 4)
    X[:, 0] = 1
    X[1::2, 0] = -1
    labels = torch.arange(m) // 2
    value, gradient = value_and_gradient(GlobalPairLoss(loss), X, labels)
    # every anchor: one positive at -1; of the negatives half at 1, and as many at -1
    positive = torch.tensor(3.0).exp().log1p() / 2
    negative = 0.5 + torch.tensor(m / 2 - 1).log() / beta
    assert value.item() == pytest.approx((positive + negative).item(), rel=1e-5)
    assert gradient.isfinite().all()


def test_labels_of_all_processes_that_do_not_fit_are_refused():
    X, labels = batch()
    fn = GlobalPairLoss(MS)
    assert torch.equal(fn(X, labels, all_labels=labels), fn(X, labels))
    with pytest.raises(ValueError, match=r"all 1 processes, on the CPU: 30 numbers, not \(29,\)"):
        fn(X, labels, all_labels=labels[1:])
    with pytest.raises(ValueError, match="the labels of process 0 are not those that all_labels"):
        fn(X, labels, all_labels=labels + 1)


def test_embeddings_that_are_not_normalised_are_noticed_once():
    X, labels = batch()
    loss_fn = GlobalPairLoss(MS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_fn(X, labels)
        loss_fn(X.bfloat16(), labels)
    with pytest.warns(UserWarning, match=r"not L2-normalised \(the longest has length 3\)"):
        loss_fn(3 * X, labels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_fn(3 * X, labels)
