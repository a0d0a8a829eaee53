"""Fair dealing: distinct cards, each as often as any other, as a pure function of the deal's number.

Batches are dealt from two kinds of decks: P classes from the deck of all classes, and M images from
the deck of a class. A deck is shuffled over and over; deal n takes the next `hand` cards of that
endless sequence, so every card is dealt equally often (to within one), and no deal depends on an
earlier one. Where a hand runs over the end of one shuffle into the next, the next shuffle is reordered
so that no card comes twice in the hand.

A `GroupedDeck` keeps the cards of a group together, so that most hands are of one group.

Randomness is a hash of (key, shuffle, card): the same on every machine and for every library version.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import numpy as np
from numpy.typing import NDArray

Cards = NDArray[np.int64]
Keys = NDArray[np.uint64]
_MASK = 2**64 - 1
_KEPT = 4  # shuffles that a deck remembers


def mix(*words: int) -> int:
    """A 64-bit hash of integers (splitmix64, chained)."""
    state = 0
    for word in words:
        state = (state + (word & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def mix_each(*words: int | NDArray[np.integer]) -> Keys:
    """`mix` for every element of arrays of non-negative integers, which broadcast."""
    state = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):
        for word in words:
            state = state + np.asarray(word).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
            state = _scrambled(state)
    return state


def hashes(size: int, key: int | Keys, first: int = 0) -> NDArray[np.uint64]:
    """`size` 64-bit hashes of a key, or of each key, from number `first` on: the splitmix64 sequence of
    that seed."""
    with np.errstate(over="ignore"):
        x = np.arange(first, first + size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return _scrambled(x + np.asarray(key, np.uint64)[..., None])


def _scrambled(x: Keys) -> Keys:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(size: int, key: int, first: int = 0) -> list[float]:
    """`size` numbers in [0, 1) of a key's sequence, from number `first` on."""
    numbers: list[float] = ((hashes(size, key, first) >> np.uint64(11)) * 2.0**-53).tolist()
    return numbers


def shuffled(size: int, key: int | Keys) -> Cards:
    """A permutation of 0 .. size - 1, or one for each key: cards sorted by their hash."""
    return np.argsort(hashes(size, key), axis=-1, kind="stable")


class Deck:
    """`size` cards, dealt `hand` at a time. With K keys these are K decks that are dealt together, and
    every array of cards has K rows."""

    def __init__(self, size: int, hand: int, key: int | Keys) -> None:
        assert 0 < hand <= size
        self.size, self.hand, self.key = size, hand, key
        self._kept: dict[int, Cards] = {}

    def deal(self, n: int) -> tuple[Cards, Cards]:
        """The cards of deal n, and how often each was dealt before (the number of its shuffle)."""
        c, first = divmod(n * self.hand, self.size)
        over = max(0, first + self.hand - self.size)  # cards of the next shuffle
        cards = self.shuffle(c)[..., first : first + self.hand]
        if over:
            cards = np.concatenate([cards, self.shuffle(c + 1)[..., :over]], axis=-1)
        return cards, np.repeat((c, c + 1), (self.hand - over, over))

    def shuffle(self, c: int) -> Cards:
        """Shuffle c in its final order: its first cards are not yet in the hand that runs into it."""
        if c not in self._kept:
            while len(self._kept) >= _KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[c] = self._final(c)
        return self._kept[c]

    def fresh(self, c: int) -> Cards:
        """Shuffle c before any reordering."""
        key = mix(self.key, c) if isinstance(self.key, int) else mix_each(self.key, c)
        return shuffled(self.size, key)

    def overhang(self, c: int) -> int:
        """The number of cards of shuffle c in the hand that runs over its end."""
        return (c + 1) * self.size % self.hand

    def _final(self, c: int) -> Cards:
        if c == 0 or self.overhang(c - 1) == 0:
            return self.fresh(c)
        if self.size >= 2 * self.hand:
            return self._reordered(c, self.fresh(c - 1))
        # Reordering may have changed the tail of the shuffle before: start from the last shuffle at
        # whose start a hand began, and reorder all of them since.
        aligned = c - c % (self.hand // gcd(self.size, self.hand))
        cards = self.fresh(aligned)
        for later in range(aligned + 1, c + 1):
            cards = self._reordered(later, cards)
        return cards

    def _reordered(self, c: int, before: Cards) -> Cards:
        """Shuffle c after the shuffle `before`: first come as many cards as its last hand lacks, none
        of which that hand has already."""
        cards, over = self.fresh(c), self.overhang(c - 1)
        if not over:
            return cards
        held = np.zeros(cards.shape, dtype=np.bool_)
        np.put_along_axis(held, before[..., self.size - over :], True, axis=-1)
        free = ~np.take_along_axis(held, cards, axis=-1)
        head = free & (np.cumsum(free, axis=-1) <= self.hand - over)
        return np.take_along_axis(cards, np.argsort(~head, axis=-1, kind="stable"), axis=-1)


class GroupedDeck(Deck):
    """Cards in groups: 0 .. groups[0] - 1 are the first, and so on. A shuffle has the groups one after
    another, so a hand has the cards of one group, and of the next where that group ends.

    Hands are dealt in a random order within each shuffle, since the next one would be of the same
    group.
    """

    def __init__(self, groups: Sequence[int], hand: int, key: int) -> None:
        super().__init__(sum(groups), hand, key)
        self.groups, self.seed = groups, key

    def deal(self, n: int) -> tuple[Cards, Cards]:
        c = n * self.hand // self.size
        first, end = (-(-each * self.size // self.hand) for each in (c, c + 1))
        order = shuffled(end - first, mix(self.seed, c, 2))
        return super().deal(first + int(order[n - first]))

    def fresh(self, c: int) -> Cards:
        rank = np.argsort(shuffled(len(self.groups), mix(self.seed, c, 1)))
        group = np.repeat(rank, self.groups)
        return np.lexsort((hashes(self.size, mix(self.seed, c)), group))
