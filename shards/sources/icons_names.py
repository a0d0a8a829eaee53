"""The concept in an icon's name: `user-circles-outline` and `circle-user-24` both mean "circle user".

The rules use the names of all sets together, so that they follow how designers use a word:
- style words (outline, bold, 24) are dropped at the ends of a name; ambiguous ones (line, light) only
  in a set that uses them in many names, so that `chart-line` keeps its line
- a number at the end counts variants (`tree-2`) and is dropped, unless most families that number a
  word count past three: then the number is the subject (`dice-5`)
- a plural becomes a singular, unless several families draw both (user and users are different icons)
- two words that others write as one are joined (light bulb, lightbulb); their order does not matter
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

# always style at the end of a name
ALWAYS = "outline outlined filled solid duotone twotone alt alternate variant"
# style if they end (COMMON) or begin (LEADING) many names of a set
COMMON = (
    "fill line lined bold light thin regular round rounded sharp linear broken remix negative stroke"
    " o f r duo two tone mini micro small compact simple minimalistic expressive ltr rtl print 24px"
    " 10 11 12 14 15 16 20 24 26 28 32 48"
)
LEADING = "baseline outline round sharp twotone bx bxs ios md i"
SHARE = 0.04  # of a set's names: "line" ends 40% of Remix Icon's and 3% of Gravity UI's (charts)

# "times" is the multiplication sign of Font Awesome and of sets that follow it, not a plural
NO_PLURALS = "times lens gas news mars canvas atlas glasses scissors clothes trousers series"
NUMBERS = {word: str(n) for n, word in enumerate(("one", "two", "three", "four", "five"), 1)}
USAGE = 4  # families that must do the same for it to count as usage

Words = tuple[str, ...]


def split(name: str) -> Words:
    """The words of a name; a number after three letters or more is a word (`lib2`, not `mp3`)."""
    return tuple(re.sub(r"(?<=[a-z]{3})(\d+)(?=-|$)", r"-\1", name).strip("-").split("-"))


def without_style(names: Iterable[str]) -> dict[str, Words]:
    """The words of every name of a set, without style words; at least one word is kept."""
    words = {name: tuple(filter(None, split(name))) for name in names}
    last = Counter(word for each in words.values() for word in set(each[-3:]))
    first = Counter(each[0] for each in words.values() if each)
    enough = SHARE * len(words)
    trailing = {*ALWAYS.split(), *(word for word in COMMON.split() if last[word] > enough)}
    leading = {word for word in LEADING.split() if first[word] > enough}

    def strip(each: Words) -> Words:
        while len(each) > 1 and each[-1] in trailing:
            each = each[:-1]
        while len(each) > 1 and each[0] in leading:
            each = each[1:]
        return each

    return {name: strip(each) for name, each in words.items()}


def numbered(words: Words) -> tuple[Words, int | None]:
    """A name without the number at its end, and that number; None if there is none."""
    *head, tail = words
    tail = NUMBERS.get(tail, tail)
    return (
        (tuple(head), int(tail)) if head and tail.isdecimal() and len(tail) < 3 else (words, None)
    )


def singular(word: str) -> str:
    if (
        len(word) < 4
        or word in NO_PLURALS.split()
        or word.endswith(("ss", "us", "is", "js", "ics"))
    ):
        return word
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("ches", "shes", "sses", "xes")):
        return word[:-2]
    return word.removesuffix("s")


class Language:
    """How the families together use numbers, plurals and compounds."""

    def __init__(self, names_of: Mapping[str, Sequence[Words]]) -> None:
        """`names_of`: family -> its names, without style words."""
        counted: defaultdict[Words, dict[str, set[int]]] = defaultdict(dict)
        plural: defaultdict[str, set[str]] = defaultdict(set)
        # word, or two words in sequence -> families that use them
        written: defaultdict[Words, set[str]] = defaultdict(set)
        for family, names in names_of.items():
            known = set(names)
            for name in names:
                head, number = numbered(name)
                if number is not None and number < 10:
                    counted[head].setdefault(family, set()).add(number)
                for i, word in enumerate(name):
                    written[word,].add(family)
                    written[name[i : i + 2]].add(family)
                    one = singular(word)
                    if one != word and (*name[:i], one, *name[i + 1 :]) in known:
                        plural[word].add(family)
        self.enumerated = {
            head
            for head, by in counted.items()
            if len(by) >= USAGE and 2 * sum(max(counts) > 3 for counts in by.values()) > len(by)
        }
        self.plurals = {word for word, by in plural.items() if len(by) >= USAGE}
        # Compounds are spelled as most families spell them: light bulb -> lightbulb,
        # arrowright -> arrow right
        self.joined: dict[Words, str] = {}
        self.parted: dict[str, Words] = {}
        for pair, by in written.items():
            word = "".join(pair)
            if len(pair) == 2 and min(map(len, pair)) > 1 and (word,) in written:
                if len(written[word,]) > len(by):
                    self.joined[pair] = word
                else:
                    self.parted[word] = pair

    def concept(self, words: Words) -> str:
        head, number = numbered(words)
        if number is not None:
            words = (*head, str(number)) if head in self.enumerated else head
        words = tuple(part for word in words for part in self.parted.get(word, (word,)))
        spelled: list[str] = []
        for word in words:
            if spelled and (spelled[-1], word) in self.joined:
                spelled[-1] = self.joined[spelled[-1], word]
            else:
                spelled.append(word)
        return " ".join(
            sorted(word if word in self.plurals else singular(word) for word in spelled)
        )
