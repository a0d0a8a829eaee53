"""Fair dealing: distinct cards, each as often as any other, as a pure function of the deal's number.

Batches are dealt from two kinds of decks: P classes from the deck of all classes, and M images from
the deck of a class. A deck is shuffled over and over; deal n takes the next `hand` cards of that
endless sequence, so every card is dealt equally often (to within one), and no deal depends on an
earlier one. Where a hand runs over the end of one shuffle into the next, the next shuffle is reordered
so that no card comes twice in the hand.

Randomness is a hash of (key, shuffle, card): the same on every machine and for every library version.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import numpy as np
from numpy.typing import NDArray

Cards = NDArray[np.int64]
_MASK = 2**64 - 1


def mix(*words: int) -> int:
    """A 64-bit hash of integers (splitmix64, chained)."""
    state = 0
    for word in words:
        state = (state + (word & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def hashes(size: int, key: int, first: int = 0) -> NDArray[np.uint64]:
    """`size` 64-bit hashes of a key, from number `first` on: the splitmix64 sequence of that seed."""
    with np.errstate(over="ignore"):
        x = np.arange(first, first + size, dtype=np.uint64)
        x = x * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def uniforms(size: int, key: int, first: int = 0) -> list[float]:
    """`size` numbers in [0, 1) of a key's sequence, from number `first` on."""
    numbers: list[float] = ((hashes(size, key, first) >> np.uint64(11)) * 2.0**-53).tolist()
    return numbers


def shuffled(size: int, key: int) -> Cards:
    """A permutation of 0 .. size - 1: cards sorted by their hash."""
    return np.argsort(hashes(size, key), kind="stable")


@dataclass(frozen=True)
class Deck:
    """`size` cards, dealt `hand` at a time."""

    size: int
    hand: int
    key: int

    def __post_init__(self) -> None:
        assert 0 < self.hand <= self.size

    def deal(self, n: int) -> tuple[Cards, Cards]:
        """The cards of deal n, and how often each was dealt before (the number of its shuffle)."""
        c, first = divmod(n * self.hand, self.size)
        over = max(0, first + self.hand - self.size)  # cards of the next shuffle
        cards = _shuffle(self, c)[first : first + self.hand]
        if over:
            cards = np.concatenate([cards, _shuffle(self, c + 1)[:over]])
        return cards, np.repeat((c, c + 1), (self.hand - over, over))

    def overhang(self, c: int) -> int:
        """The number of cards of shuffle c in the hand that runs over its end."""
        return (c + 1) * self.size % self.hand


@lru_cache(maxsize=4096)
def _shuffle(deck: Deck, c: int) -> Cards:
    """Shuffle c in its final order: its first cards are not yet in the hand that runs into it."""
    if c == 0 or deck.overhang(c - 1) == 0:
        return shuffled(deck.size, mix(deck.key, c))
    before = shuffled(deck.size, mix(deck.key, c - 1))
    if deck.size < 2 * deck.hand:
        # Reordering may have changed the tail of the shuffle before: start from the last shuffle at
        # whose start a hand began, and reorder all of them since.
        aligned = c - c % (deck.hand // gcd(deck.size, deck.hand))
        before = shuffled(deck.size, mix(deck.key, aligned))
        for earlier in range(aligned + 1, c):
            before = _reordered(deck, earlier, before)
    return _reordered(deck, c, before)


def _reordered(deck: Deck, c: int, before: Cards) -> Cards:
    held = before[deck.size - deck.overhang(c - 1) :] if deck.overhang(c - 1) else before[:0]
    cards = shuffled(deck.size, mix(deck.key, c))
    head = cards[~np.isin(cards, held)][: deck.hand - len(held)] if len(held) else cards[:0]
    return np.concatenate([head, cards[~np.isin(cards, head)]])
