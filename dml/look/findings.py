"""What a page tells about one run, from embeddings and labels alone.

A query i has its K nearest neighbours, and s+ is its similarity to the nearest image of its own class.

confused classes    a and b: the nearest neighbour of a query of one is of the other
likely label error  two neighbours of i, of similarities s1 >= s2, agree on a class c that is not i's, and

                        suspicion_i = (s1 + s2) / 2 - s+  > 0

                    for the class c with the largest such mean. One neighbour alone proves nothing.
                    An image that is alone in its class is not suspected.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dml.inference.neighbours import nearest
from dml.look.images import Gallery
from dml.recall import retrieval

NEIGHBOURS = 10
LONGEST = 1000  # entries of a list
EXAMPLES = 8  # of a pair of classes

Vectors = NDArray[np.float32]
Places = NDArray[np.int64]


@dataclass(frozen=True)
class Confused:
    """Two classes, and queries of either whose nearest neighbour is of the other."""

    classes: tuple[int, int]
    count: int
    examples: Sequence[tuple[int, int]]  # query, its nearest neighbour


@dataclass(frozen=True)
class Suspect:
    query: int
    other: int  # the class that its neighbours agree on
    suspicion: float


@dataclass(frozen=True, eq=False)
class Findings:
    """ahead: images of other classes that are nearer than the nearest of the query's own class. own: that
    image, or -1 if the class has no other."""

    scores: dict[str, float]
    places: Places  # queries x NEIGHBOURS, numbers of images
    similarities: Vectors
    ahead: Places
    own: Places
    own_similarity: Vectors
    confused: Sequence[Confused]
    suspects: Sequence[Suspect]


def findings(X: Vectors, gallery: Gallery, ks: Sequence[int]) -> Findings:
    y, q = gallery.labels, gallery.queries
    G, g = X[gallery.searched], y[gallery.searched]
    measured = retrieval(
        *(torch.from_numpy(a) for a in (X[:q], y[:q], G, g)), first=0 if gallery.mutual else None
    )
    S, places = neighbours(X, gallery)
    own, own_similarity = nearest_of_own_class(X, gallery)
    return Findings(
        scores=measured.summary(ks),
        places=places,
        similarities=S,
        ahead=measured.ahead.numpy().clip(max=len(g)),
        own=own,
        own_similarity=own_similarity,
        confused=confused_classes(places, S, y),
        suspects=suspicious_labels(places, S, y, own, own_similarity),
    )


def neighbours(X: Vectors, gallery: Gallery) -> tuple[Vectors, Places]:
    """Similarities and numbers of the nearest images of every query, never the query itself."""
    q, first = gallery.queries, gallery.searched.start
    S, found = nearest(X[:q], X[gallery.searched], NEIGHBOURS + gallery.mutual)
    if not gallery.mutual:
        return S, found + first
    itself = found == np.arange(q)[:, None]
    itself[~itself.any(1), -1] = True  # copies of it fill the list: drop the last one
    kept = (q, found.shape[1] - 1)
    return S[~itself].reshape(kept), found[~itself].reshape(kept)


def nearest_of_own_class(X: Vectors, gallery: Gallery) -> tuple[Places, Vectors]:
    q, first = gallery.queries, gallery.searched.start
    own, similarity = np.full(q, -1, np.int64), np.full(q, -1, np.float32)
    members = by_class(gallery.labels[gallery.searched])
    for label, queries in by_class(gallery.labels[:q]).items():
        if label not in members:
            continue
        others = members[label] + first
        S = X[queries] @ X[others].T
        S[queries[:, None] == others] = -np.inf
        best = S.argmax(1)
        top = S[np.arange(len(queries)), best]
        found = np.isfinite(top)
        own[queries[found]], similarity[queries[found]] = others[best[found]], top[found]
    return own, similarity


def by_class(labels: NDArray[np.int64]) -> dict[int, Places]:
    order = np.argsort(labels, kind="stable")
    names, starts = np.unique(labels[order], return_index=True)
    return dict(zip(names.tolist(), np.split(order, starts[1:]), strict=True))


def confused_classes(places: Places, S: Vectors, y: NDArray[np.int64]) -> list[Confused]:
    """The pairs with the most queries first; among equals, the pair with the most similar images."""
    first = places[:, 0]
    pairs: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i in np.flatnonzero(y[: len(places)] != y[first]).tolist():
        a, b = sorted((int(y[i]), int(y[first[i]])))
        pairs[a, b].append(i)
    nearest_first = {
        pair: sorted(members, key=lambda i: -S[i, 0]) for pair, members in pairs.items()
    }
    order = sorted(
        nearest_first.items(), key=lambda item: (-len(item[1]), -S[item[1][0], 0], item[0])
    )
    return [
        Confused(pair, len(members), [(i, int(first[i])) for i in members[:EXAMPLES]])
        for pair, members in order[:LONGEST]
    ]


def suspicious_labels(
    places: Places, S: Vectors, y: NDArray[np.int64], own: Places, own_similarity: Vectors
) -> list[Suspect]:
    """The most suspicious first."""
    found = []
    for i, row in enumerate(y[places].tolist()):
        several = {c for c, count in Counter(row).items() if count >= 2} - {int(y[i])}
        means = ((S[i, np.equal(row, c)][:2].mean(), c) for c in several)
        mean, other = max(means, default=(-np.inf, -1))
        if own[i] >= 0 and mean > own_similarity[i]:
            found.append(Suspect(i, other, float(mean - own_similarity[i])))
    return sorted(found, key=lambda suspect: -suspect.suspicion)[:LONGEST]
