"""Images that are almost the same although they are in different classes, or in different splits.

A similarity of embeddings near 1 may only say that the model confuses two things. So near-duplicates are
neighbours whose pixels agree, too: small grey versions that correlate above TWIN, as when icons are packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dml.inference.neighbours import nearest
from dml.look.findings import LONGEST, Places, Vectors
from dml.look.sheets import Grey

TWIN = 0.97
CHUNK = 4096  # pairs compared at a time


@dataclass(frozen=True)
class Copy:
    """Two images by their numbers, and the correlation of their pixels."""

    images: tuple[int, int]
    correlation: float


def correlations(grey: Grey, pairs: Places) -> Vectors:
    """Of pairs of images, p x 2. An image of one colour correlates only with its like."""
    found = np.empty(len(pairs), np.float32)
    for start in range(0, len(pairs), CHUNK):
        a, b = (grey[pairs[start : start + CHUNK, side]].astype(np.float32) for side in (0, 1))
        same = (a == b).all((1, 2))
        a, b = (x.reshape(len(x), -1) - x.mean((1, 2))[:, None] for x in (a, b))
        norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        products = (a * b).sum(1) / np.maximum(norms, 1e-6)
        found[start : start + CHUNK] = np.where(same, 1, products)
    return found


def near_duplicates(grey: Grey, pairs: Places) -> list[Copy]:
    """The pairs whose pixels agree, the most alike first."""
    correlation = correlations(grey, pairs)
    order = np.argsort(-correlation, kind="stable")
    alike = order[correlation[order] >= TWIN][:LONGEST]
    return [Copy((int(pairs[p, 0]), int(pairs[p, 1])), float(correlation[p])) for p in alike]


def across_classes(places: Places, y: NDArray[np.int64]) -> Places:
    """Pairs of neighbours of different classes, each once, p x 2."""
    i = np.repeat(np.arange(len(places)), places.shape[1])
    pairs = np.stack([i, places.ravel()], 1)
    pairs = pairs[y[pairs[:, 0]] != y[pairs[:, 1]]]
    unique: Places = np.unique(np.sort(pairs, 1), axis=0)
    return unique


def across_splits(X: Vectors, others: Vectors) -> Places:
    """Every image with the nearest of another split, the most similar pairs only, p x 2."""
    if not len(others):
        return np.empty((0, 2), np.int64)
    S, found = nearest(X, others, 1)
    order = np.argsort(-S[:, 0], kind="stable")[:LONGEST]
    return np.stack([order, found[order, 0]], 1)


def numbered(pairs: Sequence[Places], first: int) -> tuple[list[int], list[Places]]:
    """Give the images of other splits numbers from `first` on. Return which they are, and the pairs in
    these numbers."""
    which = np.unique(np.concatenate([p[:, 1] for p in pairs]))
    renamed = [np.stack([p[:, 0], first + np.searchsorted(which, p[:, 1])], 1) for p in pairs]
    return which.tolist(), renamed
