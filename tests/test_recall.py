"""Recall@K against a double loop that sorts."""

import pytest
import torch
from batches import batch
from hypothesis import given, settings
from hypothesis import strategies as st

from dml.recall import recall_at_k


def naive_recall(X, labels, ks, gallery=None, gallery_labels=None):
    """Sort the others of every query by similarity, wrong ones first among equals."""
    own = gallery is None
    others, other_labels = (X, labels) if own else (gallery, gallery_labels)
    hits = dict.fromkeys(ks, 0)
    for i in range(len(X)):
        ranked = sorted(
            (-(X[i] * others[j]).sum().item(), bool(labels[i] == other_labels[j]))
            for j in range(len(others))
            if not (own and j == i)
        )
        for k in ks:
            hits[k] += any(right for _, right in ranked[:k])
    return {k: hits[k] / len(X) for k in ks}


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


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(-2, 2), st.integers(0, 3)), min_size=2))
def test_ties_count_against_the_model(samples):
    """Small integers: dot products are exact, and ties many."""
    X = torch.tensor([s[:2] for s in samples], dtype=torch.float32)
    labels = torch.tensor([s[2] for s in samples])
    expected = naive_recall(X, labels, [1, 2, 5])
    assert recall_at_k(X, labels, [1, 2, 5], chunk=3) == pytest.approx(expected)


@pytest.mark.parametrize("n", [97, 1025, 2051])
@pytest.mark.parametrize("d", [3, 128])
def test_a_collapsed_model_scores_nothing(n, d):
    """All embeddings equal: everything ties, and no hit may come from rounding."""
    X = torch.nn.functional.normalize(torch.ones(n, d), dim=1)
    assert recall_at_k(X, torch.arange(n) // 2, [1, 10], chunk=1024) == {1: 0.0, 10: 0.0}


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
    X[2] = torch.nan
    with pytest.raises(ValueError, match="1 of 30 rows of embeddings hold NaN"):
        recall_at_k(X, labels, [1])
