"""A map of embeddings: points in two dimensions, neighbours close to each other.

The objective is UMAP's (McInnes et al. 2018) with equal weights of all edges. With the probability of an
edge q_ij = 1 / (1 + a |y_i - y_j|^(2b)), it is the cross-entropy of the graph of nearest neighbours:

    - sum over edges of log q_ij - sum over sampled pairs of log (1 - q_ij)

All edges move their points in every epoch. The start is the two principal components, so that the map is
a function of the embeddings alone.
"""

from __future__ import annotations

from contextlib import closing

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shards.output import Progress

A, B = 1.577, 0.895  # UMAP's curve for a smallest distance of 0.1
EPOCHS, SAMPLED, FARTHEST = 200, 5, 4.0


def layout(X: NDArray[np.float32], edges: NDArray[np.int64]) -> NDArray[np.float32]:
    """X: n x d. edges: pairs of rows, e x 2. Return n x 2, within 0 and 1."""
    Y = principal(torch.from_numpy(X))
    i, j = torch.from_numpy(edges).T
    i, j = torch.cat([i, j]), torch.cat([j, i])
    # a point with many edges must not move further than one with few
    degree = i.bincount(minlength=len(Y)).clamp(min=1)[:, None]
    generator = torch.Generator().manual_seed(0)
    with closing(Progress(EPOCHS, "epoch", label="map", leave=False)) as progress:
        for epoch in range(EPOCHS):
            k = torch.randint(len(Y), (SAMPLED, len(i)), generator=generator)
            move = torch.zeros_like(Y).index_add_(0, i, attraction(Y[i] - Y[j]))
            for sample in k:
                move.index_add_(0, i, repulsion(Y[i] - Y[sample]))
            Y += (1 - epoch / EPOCHS) * move / degree
            progress.update()
    low, high = Y.min(0).values, Y.max(0).values
    scaled: NDArray[np.float32] = ((Y - low) / (high - low).clamp(min=1e-9)).numpy()
    return scaled


def principal(X: Tensor) -> Tensor:
    """The two principal components, scaled to ten at most."""
    centred = X - X.mean(0)
    _, vectors = torch.linalg.eigh(centred.T @ centred)
    Y = centred @ vectors[:, -2:]
    # copies of an image would stay on one point for ever
    noise = torch.randn(Y.shape, generator=torch.Generator().manual_seed(1))
    scaled: Tensor = 10 * Y / Y.abs().max().clamp(min=1e-9) + 1e-3 * noise
    return scaled


def attraction(difference: Tensor) -> Tensor:
    """The gradient of log q by the first point of each pair."""
    d = difference.square().sum(1, keepdim=True).clamp(min=1e-9)
    return (-2 * A * B * d ** (B - 1) / (1 + A * d**B) * difference).clamp(-FARTHEST, FARTHEST)


def repulsion(difference: Tensor) -> Tensor:
    """The gradient of log (1 - q) by the first point of each pair, bounded where points meet."""
    d = difference.square().sum(1, keepdim=True)
    return (2 * B / ((0.001 + d) * (1 + A * d**B)) * difference).clamp(-FARTHEST, FARTHEST)
