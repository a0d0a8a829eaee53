"""Retrieval against a double loop that sorts, against faiss and pytorch-metric-learning."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from batches import batch
from fleet import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from dml.data.batches import own_share
from dml.recall import NO_POSITIVE, Retrieval, recall_at_k, retrieval

# The SWIG of faiss makes types that Python warns of.
swig = pytest.mark.filterwarnings("ignore:builtin type .*:DeprecationWarning")


def naive(queries, labels, gallery, gallery_labels, first=None):
    """Sort the others of every query by similarity, wrong ones first among equals; then read the
    measures off the list, word for word. Rows of ahead, R-precision and MAP@R."""
    S = queries.double().numpy() @ gallery.double().numpy().T
    rows = []
    for i in range(len(queries)):
        ranked = sorted(
            (-S[i, j], bool(labels[i] == gallery_labels[j]))
            for j in range(len(gallery))
            if first is None or j != first + i
        )
        right = [found for _, found in ranked]
        R = sum(right)
        if R == 0:
            rows.append((NO_POSITIVE, 0.0, 0.0))
            continue
        precision_at = [sum(right[:k]) / k for k in range(1, R + 1)]
        average = sum(p for p, found in zip(precision_at, right, strict=False) if found) / R
        rows.append((right.index(True), precision_at[-1], average))
    return rows


def naive_recall(X, labels, ks, gallery=None, gallery_labels=None):
    if gallery is None:
        rows = naive(X, labels, X, labels, first=0)
    else:
        rows = naive(X, labels, gallery, gallery_labels)
    return {k: sum(ahead < k for ahead, _, _ in rows) / len(rows) for k in ks}


def same(result, rows):
    ahead, precision, average = zip(*rows, strict=True)
    assert result.ahead.tolist() == list(ahead)
    np.testing.assert_allclose(result.precision, precision, rtol=1e-12)
    np.testing.assert_allclose(result.average_precision, average, rtol=1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("chunk", [1, 7, 1024])
def test_recall_is_that_of_a_double_loop(seed, chunk):
    X, labels = batch(m=60, d=6, classes=12, spread=1.5, seed=seed)
    ks = [1, 2, 4, 8, 100]
    result = recall_at_k(X, labels, ks, chunk=chunk)
    assert result == pytest.approx(naive_recall(X, labels, ks))
    assert 0 < result[1] < result[8] < 1  # the single sample never succeeds, not even at 100
    assert result[100] == pytest.approx(59 / 60)


def test_query_and_gallery():
    X, labels = batch(m=60, d=6, classes=12, spread=1.5)
    expected = naive_recall(X[:25], labels[:25], [1, 10], X[25:], labels[25:])
    assert recall_at_k(X[:25], labels[:25], [1, 10], X[25:], labels[25:]) == pytest.approx(expected)
    assert recall_at_k(X[:25], labels[:25], 1, X[25:].float(), labels[25:]).keys() == {1}
    # in a gallery of its own, a query finds itself
    assert recall_at_k(X, labels, [1], X, labels) == {1: 1.0}


def integers(n, d, seed=0):
    """Small ones: dot products are exact, and ties many."""
    return torch.randint(-2, 3, (n, d), generator=torch.Generator().manual_seed(seed)).float()


SIZES = torch.tensor([30, 1, 2, 15, 1, 7, 4])
UNEVEN = torch.arange(7).repeat_interleave(SIZES)[torch.arange(60) * 7 % 60]  # shuffled
SETS = {
    "random": batch(m=60, d=6, classes=12, spread=1.5),
    "random float32": batch(m=60, d=6, classes=12, spread=1.5, dtype=torch.float32),
    "all equal": (torch.ones(60, 3), UNEVEN),
    "equal across classes": (integers(20, 4).repeat(3, 1), UNEVEN),
    "one image a class": (integers(60, 4), torch.arange(60)),
    "two images a class": (integers(60, 4), torch.arange(60) // 2),
    "all one class": (integers(60, 4), torch.zeros(60, dtype=torch.int64)),
    "uneven classes": (integers(60, 3, seed=1), UNEVEN),
    "only negative similarities": (60 * torch.eye(60) - 1, UNEVEN),
    "labels far apart": (integers(60, 4), UNEVEN * 10**15 - 7),
}


@pytest.mark.parametrize("chunk", [1, 7, 60, 1024])
@pytest.mark.parametrize("name", SETS)
def test_all_measures_are_those_of_a_double_loop(name, chunk):
    X, labels = SETS[name]
    result = retrieval(X, labels, X, labels, first=0, chunk=chunk)
    same(result, naive(X, labels, X, labels, first=0))
    assert recall_at_k(X, labels, [1, 3], chunk=chunk) == {
        1: result.summary(1)["recall@1"],
        3: result.summary(3)["recall@3"],
    }


@pytest.mark.parametrize("chunk", [1, 7, 1024])
@pytest.mark.parametrize("shift", [0, -3])
def test_all_measures_between_two_sets(chunk, shift):
    """Some queries have no positive, some classes no query; with -3 all similarities are < 0."""
    X, gallery = integers(25, 3).abs() + 1, integers(70, 3, seed=1) + shift
    labels, gallery_labels = torch.arange(25) % 9, torch.arange(70) % 13 + 3
    result = retrieval(X, labels, gallery, gallery_labels, first=None, chunk=chunk)
    same(result, naive(X, labels, gallery, gallery_labels))
    assert 0 < (result.ahead == NO_POSITIVE).sum() < 25


def test_in_shop_by_hand():
    """Queries are unit axes, so that the gallery, transposed, is the table of similarities.

    a finds a b a c b: R = 2, ahead 0, 1 of the 2 nearest, MAP@R = 1/2 (1/1) = 1/2
    b finds c b a b a: R = 2, ahead 1 (c ties with b), 1 of 2, MAP@R = 1/2 (1/2) = 1/4
    c finds c b a a b: R = 1, ahead 0, 1 of 1, MAP@R = 1
    d is not in the gallery: it fails
    """
    a, b, c, d = range(4)
    gallery_labels = torch.tensor([a, b, a, b, c])
    S = torch.tensor(
        [
            [0.9, 0.8, 0.7, 0.1, 0.2],  # a
            [0.1, 0.2, 0.3, 0.5, 0.5],  # b
            [0.1, 0.4, 0.3, 0.0, 0.9],  # c
            [0.9, 0.8, 0.7, 0.6, 0.5],  # d
        ]
    )
    result = retrieval(torch.eye(4), torch.tensor([a, b, c, d]), S.T, gallery_labels, first=None)
    assert result.ahead.tolist() == [0, 1, 0, NO_POSITIVE]
    assert result.precision.tolist() == [0.5, 0.5, 1, 0]
    assert result.average_precision.tolist() == [0.5, 0.25, 1, 0]
    assert result.summary([1, 2, 10]) == {
        "recall@1": 0.5,
        "recall@2": 0.75,
        "recall@10": 0.75,
        "r_precision": 0.5,
        "map@r": 0.4375,
    }


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(-2, 2), st.integers(0, 3)), min_size=2))
def test_ties_count_against_the_model(samples):
    """Small integers: dot products are exact, and ties many."""
    X = torch.tensor([s[:2] for s in samples], dtype=torch.float32)
    labels = torch.tensor([s[2] for s in samples])
    same(retrieval(X, labels, X, labels, first=0, chunk=3), naive(X, labels, X, labels, first=0))
    expected = naive_recall(X, labels, [1, 2, 5])
    assert recall_at_k(X, labels, [1, 2, 5], chunk=3) == pytest.approx(expected)


@pytest.mark.parametrize("n", [97, 1025, 2051])
@pytest.mark.parametrize("d", [3, 128])
def test_a_collapsed_model_scores_nothing(n, d):
    """All embeddings equal: everything ties, and no hit may come from rounding."""
    X = normalize(torch.ones(n, d), dim=1)
    assert recall_at_k(X, torch.arange(n) // 2, [1, 10], chunk=1024) == {1: 0.0, 10: 0.0}


@pytest.mark.parametrize("n", [5, 34, 97, 1025, 5009])
@pytest.mark.parametrize("queries", [1, 6, 15, 33])
def test_equal_vectors_tie_wherever_they_stand(n, queries):
    """One vector n times: BLAS may round it differently at different columns, and a positive would
    win or lose by its place."""
    generator = torch.Generator().manual_seed(n)
    for d in (11, 64, 384, 512):
        gallery = torch.randn(1, d, generator=generator).repeat(n, 1)
        Q = torch.randn(queries, d, generator=generator)
        for place in (0, n // 2, n - 1):
            labels = torch.zeros(n, dtype=torch.int64)
            labels[place] = 1
            ones = torch.ones(queries, dtype=torch.int64)
            result = retrieval(Q, ones, gallery, labels, first=None)
            assert (result.ahead == n - 1).all()


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_processes_measure_their_own_queries(size):
    X, labels = SETS["equal across classes"]
    parts = []
    for rank in range(size):  # with 100 processes, some have no query
        own = own_share(60, rank, size)
        rows = slice(own.start, own.stop)
        parts.append(retrieval(X[rows], labels[rows], X, labels, first=own.start, chunk=8))
    joined = Retrieval(
        torch.cat([part.ahead for part in parts]),
        torch.cat([part.precision for part in parts]),
        torch.cat([part.average_precision for part in parts]),
    )
    same(joined, naive(X, labels, X, labels, first=0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    X, labels = batch(m=60, d=6, classes=12, spread=1.5)
    X = X.to(dtype)
    same(retrieval(X, labels, X, labels, first=0), naive(X, labels, X, labels, first=0))


@swig
def test_faiss_finds_the_same():
    faiss = pytest.importorskip("faiss")
    X, labels = batch(m=500, d=16, classes=80, spread=1.5, dtype=torch.float32)
    index = faiss.IndexFlatIP(16)
    index.add(X.numpy())
    found = torch.from_numpy(index.search(X.numpy(), 101)[1])
    others = found[found != torch.arange(500)[:, None]].view(500, 100)
    right = labels[others] == labels[:, None]
    expected = {k: right[:, :k].any(1).double().mean().item() for k in (1, 10, 100)}
    assert recall_at_k(X, labels, [1, 10, 100], chunk=64) == expected
    assert expected[1] < expected[10] < expected[100]


@swig
def test_pytorch_metric_learning_finds_the_same():
    """It leaves out queries without positives, so here there are none."""
    faiss = pytest.importorskip("faiss")
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
    from pytorch_metric_learning.utils.inference import FaissKNN

    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(100).repeat_interleave(5)[torch.randperm(500, generator=generator)]
    labels = labels % 97  # three classes of ten
    centres = torch.randn(100, 16, generator=generator)
    X = normalize(centres[labels] + 1.2 * torch.randn(500, 16, generator=generator), dim=1)
    theirs = AccuracyCalculator(
        include=("precision_at_1", "r_precision", "mean_average_precision_at_r"),
        knn_func=FaissKNN(index_init_fn=faiss.IndexFlatIP),
        device=torch.device("cpu"),
    )

    def compare(ours, accuracy):
        assert ours["recall@1"] == pytest.approx(accuracy["precision_at_1"])
        assert ours["r_precision"] == pytest.approx(accuracy["r_precision"])
        assert ours["map@r"] == pytest.approx(accuracy["mean_average_precision_at_r"])
        assert 0.1 < ours["map@r"] < ours["r_precision"] < 0.9

    compare(
        retrieval(X, labels, X, labels, first=0).summary(1),
        theirs.get_accuracy(X, labels),
    )
    Q, own, G, other = X[:200], labels[:200], X[200:], labels[200:]
    known = torch.isin(own, other)
    Q, own = Q[known], own[known]
    compare(
        retrieval(Q, own, G, other, first=None).summary(1),
        theirs.get_accuracy(Q, own, G, other, ref_includes_query=False),
    )


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_is_that_of_a_chunk():
    """64 x 20,000 similarities are 5 MiB, all of 4,000 queries 305; in a process of its own."""
    script = """
import torch
from measure import MIB, extra_memory
from dml.recall import retrieval
torch.manual_seed(0)
X, labels = torch.randn(20_000, 8), torch.arange(20_000) // 5
retrieval(X[:64], labels[:64], X[:99], labels[:99], first=0)  # threads start here
print(extra_memory(lambda: retrieval(X[:4000], labels[:4000], X, labels, first=0, chunk=64)) / MIB)
"""
    command = [sys.executable, "-c", script]
    paths = [str(ROOT / "benchmarks"), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 50


def test_bad_input_is_one_clear_sentence():
    X, labels = batch()
    with pytest.raises(ValueError, match=r"ks must be positive whole numbers, not \[0, 1\]"):
        recall_at_k(X, labels, [0, 1])
    with pytest.raises(ValueError, match="give both or neither"):
        recall_at_k(X, labels, [1], gallery=X)
    with pytest.raises(ValueError, match=r"\(30, 8\) and \(29,\)"):
        recall_at_k(X, labels[1:], [1])
    with pytest.raises(ValueError, match="queries have 8 dimensions but the gallery 4"):
        recall_at_k(X, labels, [1], X[:, :4], labels)
    with pytest.raises(ValueError, match=r"embeddings must be floating point, not torch\.int64"):
        recall_at_k(X.long(), labels, [1])
    with pytest.raises(ValueError, match="chunk must be at least 1"):
        recall_at_k(X, labels, [1], chunk=0)
    with pytest.raises(ValueError, match="10 queries from row 25 of a gallery of 30"):
        retrieval(X[:10], labels[:10], X, labels, first=25)
    with pytest.raises(ValueError, match="other labels; set first=None if"):
        retrieval(X[:10], labels[:10] + 1, X, labels, first=0)
    with pytest.raises(ValueError, match="ks must be positive whole numbers"):
        retrieval(X, labels, X, labels, first=0).summary([])
    X[2] = torch.nan
    with pytest.raises(ValueError, match="1 of 30 rows of embeddings hold NaN"):
        recall_at_k(X, labels, [1])
