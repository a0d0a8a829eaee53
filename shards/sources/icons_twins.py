"""Twins, which are drawings that look the same, and the synonyms that they reveal.

Twins in two classes contradict the labels: either the classes are one concept with two names
(add-circle, circle-plus), or a drawing has an odd name. `synonyms` finds the first kind; the caller
drops the drawings of the second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

# Correlations. A plus and a minus on the same filled folder exceed TWIN, but rarely SAME.
TWIN = 0.97
SAME = 0.99
BLOCK = 4096  # drawings: a block of correlations takes 64 MB

# Two classes are one concept if at least SHARED drawings of each are the same as one of the other, and
# at most a share BOTH of the families draws both: a family that draws both means different things
# (plus user and minus user: 76% of the families; infinite and infinity: 10%).
SHARED = 2
BOTH = 0.3
NAMES = 6  # at most, per concept: stops chains such as circle, record, dot, full moon

Twins = list[tuple[int, int, float]]


def standardised(ink: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Drawings as vectors of mean 0 and length 1; their dot products are correlations."""
    flat = ink.reshape(len(ink), -1).astype(np.float32)
    flat -= flat.mean(1, keepdims=True)
    flat /= np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-6)
    return flat


def twins(ink: NDArray[np.uint8]) -> Twins:
    """All (i, j, correlation) with i < j and correlation > TWIN among drawings [n, side, side].

    The means of 2 x 2 pixels (times 2) are an orthogonal projection P, which can only shorten
    |x - y|^2 = 2 - 2 x.y. So x.y > TWIN implies Px.Py - |Px|^2/2 - |Py|^2/2 > TWIN - 1: a product
    of a quarter of the length finds every candidate.
    """
    fine = standardised(ink)
    n, side, _ = ink.shape
    coarse = fine.reshape(n, side // 2, 2, side // 2, 2).sum((2, 4)).reshape(n, -1) / 2
    half = -(coarse**2).sum(1, keepdims=True) / 2
    rows = np.hstack([coarse, half, np.ones_like(half)])
    columns = np.hstack([coarse, np.ones_like(half), half])
    found: Twins = []
    for a in range(0, n, BLOCK):
        for b in range(a, n, BLOCK):
            near = rows[a : a + BLOCK] @ columns[b : b + BLOCK].T > TWIN - 1 - 1e-5
            i, j = np.divmod(np.flatnonzero(near), near.shape[1])
            i, j = i[a + i < b + j] + a, j[a + i < b + j] + b
            correlation = np.einsum("nd,nd->n", fine[i], fine[j])
            keep = correlation > TWIN
            found += zip(
                i[keep].tolist(), j[keep].tolist(), correlation[keep].tolist(), strict=True
            )
    return found


def synonyms(classes: Sequence[str], families: Sequence[str], found: Twins) -> dict[str, str]:
    """class -> the class it is merged into, for those that change. The class that most families draw
    gives its name.

    Pairs that share the most drawings are merged first; a merge that would give a concept more than
    NAMES names is left out.
    """
    drawn: defaultdict[str, set[str]] = defaultdict(set)  # class -> families that draw it
    for name, family in zip(classes, families, strict=True):
        drawn[name].add(family)
    shared: defaultdict[tuple[str, str], tuple[set[int], set[int]]]
    shared = defaultdict(lambda: (set(), set()))
    # pair of classes -> families that use one drawing for both
    alias: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for i, j, correlation in found:
        if classes[i] != classes[j] and correlation > SAME:
            first, second = sorted((i, j), key=lambda k: classes[k])
            pair = classes[first], classes[second]
            shared[pair][0].add(first)
            shared[pair][1].add(second)
            if families[i] == families[j]:
                alias[pair].add(families[i])

    def told_apart(one: str, other: str) -> bool:
        smaller = min(len(drawn[one]), len(drawn[other]))
        return len((drawn[one] & drawn[other]) - alias[one, other]) > BOTH * smaller

    alike = {pair: min(map(len, sides)) for pair, sides in shared.items() if not told_apart(*pair)}
    ties = [(count, *pair) for pair, count in alike.items() if count >= SHARED]
    ties += [(0, *pair) for pair in reworded(drawn, alike) if not told_apart(*pair)]
    group = {name: frozenset([name]) for name in drawn}
    for _, one, other in sorted(ties, reverse=True):
        union = group[one] | group[other]
        if len(union) <= NAMES:
            group.update(dict.fromkeys(union, union))
    best = {
        names: max(names, key=lambda each: (len(drawn[each]), each)) for names in group.values()
    }
    return {name: best[names] for name, names in group.items() if best[names] != name}


def reworded(names: Iterable[str], alike: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Pairs of names that differ by one word and its synonym. Two words are synonyms if at least
    SHARED pairs of classes that are drawn alike differ by them: add and plus, from add-circle and
    circle-plus, add-square and square-plus."""
    contexts_of: defaultdict[tuple[str, str], set[frozenset[str]]] = defaultdict(set)
    for one, other in alike:
        ours, theirs = set(one.split()), set(other.split())
        if len(ours - theirs) == len(theirs - ours) == 1:
            pair = min(ours - theirs), min(theirs - ours)
            contexts_of[pair].add(frozenset(ours & theirs))
    same = defaultdict[str, set[str]](set)
    for (word, synonym), contexts in contexts_of.items():
        if len(contexts | contexts_of.get((synonym, word), set())) >= SHARED:
            same[word].add(synonym)
            same[synonym].add(word)
    known = set(names)
    for name in sorted(known):
        for word in name.split():
            for synonym in sorted(same[word]):
                other = " ".join(sorted([*(set(name.split()) - {word}), synonym]))
                if name < other and other in known:
                    yield name, other
