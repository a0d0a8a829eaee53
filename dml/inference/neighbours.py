"""The exact nearest neighbours by dot product, by faiss if it is installed, else by torch."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from dml.distributed.precision import full_precision

Vectors = NDArray[np.float32]  # n x d
Nearest = tuple[Vectors, NDArray[np.int64]]
"""Similarities and rows of the set, q x k, nearest first."""

CHUNK = 256  # queries per product: 1 GB of similarities in a set of a million


def nearest(queries: Vectors, gallery: Vectors, k: int) -> Nearest:
    """The k rows of the gallery with the largest dot products, or all if it has fewer."""
    k = min(k, len(gallery))
    try:
        import faiss
    except ImportError:
        return nearest_by_torch(queries, gallery, k)
    S, places = faiss.knn(queries, gallery, k, metric=faiss.METRIC_INNER_PRODUCT)
    return S, places


def nearest_by_torch(queries: Vectors, gallery: Vectors, k: int) -> Nearest:
    G = torch.from_numpy(gallery)
    with full_precision(G.device):
        tops = [
            (torch.from_numpy(queries[i : i + CHUNK]) @ G.T).topk(k)
            for i in range(0, len(queries), CHUNK)
        ]
    S, places = (torch.cat(parts).numpy() for parts in zip(*tops, strict=True))
    return S, places
