"""Rules for values, and the text of a problem when a value breaks one.

The config reports all problems of a run together; `make_loss` applies the same rules.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a setting, in one line."""

    key: str
    value: object
    rule: str
    fix: str
    source: str | None = None

    def __str__(self) -> str:
        shown = repr(self.value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        given = "" if self.value is None and self.source is None else f" = {shown}"
        source = f" ({self.source})" if self.source else ""
        return f"{self.key}{given}{source}: {self.rule}; {self.fix}"


def did_you_mean(word: object, choices: Iterable[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(str(word), list(choices), 1)
    return f"did you mean {prefix}{close[0]}? " if close else ""


@dataclass(frozen=True)
class Rule:
    """What a value must satisfy beyond its type."""

    text: str
    holds: Callable[[Any], bool]
    choices: tuple[str, ...] = ()


def at_least(bound: int) -> Rule:
    return Rule(f"at least {bound}", lambda value: bool(value >= bound))


def one_of(choices: Iterable[str]) -> Rule:
    names = tuple(choices)
    return Rule(f"one of {', '.join(names)}", lambda value: value in names, names)


ANY = Rule("", lambda value: True)
POSITIVE = Rule("above 0", lambda value: bool(value > 0))

_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "text",
    tuple: "a list of whole numbers",
}


def fit(value: object, kind: type, rule: Rule = ANY) -> Any:
    """The value as `kind`, or ValueError with what it must be. true is not 1, and "10" is not 10."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        value = int(value)  # also from numpy
    elif isinstance(value, float):
        value = float(value)
    if kind is float and type(value) is int and abs(value) < 2**53:  # larger ones may not be exact
        value = float(value)
    if kind is tuple and isinstance(value, list) and all(type(item) is int for item in value):
        value = tuple(value)
    finite = not isinstance(value, float) or math.isfinite(value)
    if type(value) is not kind or not finite or not rule.holds(value):
        raise ValueError(", ".join(filter(None, [f"must be {_KINDS[kind]}", rule.text])))
    return value


NOT_EMPTY = Rule("not empty", bool)
INCREASING = Rule(
    "positive and strictly increasing", lambda ks: all(a < b for a, b in pairwise((0, *ks)))
)
KS = Rule(f"not empty, {INCREASING.text}", lambda ks: bool(ks) and INCREASING.holds(ks))
SEED = Rule("at least 0, below 2^63", lambda x: 0 <= x < 2**63)
SHARE = Rule("at least 0 and below 1", lambda x: 0 <= x < 1)
FOLDER_NAME = Rule(
    "printable, without a slash, not empty, not starting with a dot",
    lambda name: name.isprintable() and not re.match(r"$|\.|.*/", name),
)
