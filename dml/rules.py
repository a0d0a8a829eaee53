"""Rules for values, and the text of a problem when a value breaks one.

The config reports all problems of a run together; `make_loss` applies the same rules.
"""

import difflib
import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from numbers import Integral
from typing import Any, get_args, get_origin

SHOWN = 60  # characters of a value in a text
LISTED = 10  # unknown keys that are listed one by one


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a setting, in one line."""

    key: str
    value: object
    rule: str
    fix: str
    source: str | None = None

    def __str__(self) -> str:
        given = "" if self.value is None and self.source is None else f" = {shown(self.value)}"
        source = f" ({self.source})" if self.source else ""
        return f"{shortened(self.key, 200)}{given}{source}: {self.rule}; {self.fix}"


def shown(value: object) -> str:
    """repr(value), shortened without making the whole of it."""
    text, parts = "", _parts(value)
    while len(text) <= SHOWN and (part := next(parts, None)) is not None:
        text += part
    return shortened(text, SHOWN)


def shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def _parts(value: object) -> Iterator[str]:
    """The text of repr(value), piece by piece."""
    if isinstance(value, dict):
        yield "{"
        for i, (key, item) in enumerate(value.items()):
            yield ", " * bool(i)
            yield from _parts(key)
            yield ": "
            yield from _parts(item)
        yield "}"
    elif isinstance(value, list):
        yield "["
        for i, item in enumerate(value):
            yield ", " * bool(i)
            yield from _parts(item)
        yield "]"
    elif isinstance(value, str):
        yield repr(value[: SHOWN + 1])
    elif isinstance(value, int) and value.bit_length() > 1000:  # Python prints 4,300 digits at most
        yield f"a number of about {round(value.bit_length() * math.log10(2)):,} digits"
    else:
        yield repr(value)


def did_you_mean(word: object, choices: Iterable[str], prefix: str = "") -> str:
    text = word if isinstance(word, str) else shown(word)
    close = difflib.get_close_matches(text, list(choices), 1) if len(text) <= SHOWN else []
    return f"did you mean {prefix}{close[0]}? " if close else ""


def unknown_keys(
    given: Mapping[Any, Any], known: Container[Any], problem: Callable[[Any, Any], Problem]
) -> list[Problem]:
    """The problems of the keys that are not known; the last one stands for many."""
    keys = [key for key in given if key not in known]
    found = [problem(key, given[key]) for key in keys[:LISTED]]
    if len(keys) > LISTED:
        last = found[-1]
        found[-1] = replace(last, key=f"{last.key} and {len(keys) - LISTED:,} more")
    return found


@dataclass(frozen=True)
class Rule:
    """What a value must satisfy beyond its type."""

    text: str
    holds: Callable[[Any], bool]
    choices: tuple[str, ...] = ()


def at_least(bound: int) -> Rule:
    return Rule(f"at least {bound}", lambda value: bool(value >= bound))


def between(low: int, high: int) -> Rule:
    return Rule(f"at least {low}, at most {high:,}", lambda value: bool(low <= value <= high))


def one_of(choices: Iterable[str]) -> Rule:
    names = tuple(choices)
    return Rule(f"one of {', '.join(names)}", lambda value: value in names, names)


def is_path(text: str) -> bool:
    """Whether the operating system can take a text for a path."""
    try:
        names = text.encode().split(
            b"/"
        )  # not surrogates, which stand for bytes that are not UTF-8
    except UnicodeEncodeError:
        return False
    return "\0" not in text and len(text) <= 2_000 and all(len(name) <= 255 for name in names)


ANY = Rule("", lambda value: True)
POSITIVE = Rule("above 0", lambda value: bool(value > 0))

WHOLE_NUMBERS, NUMBERS, TEXTS = tuple[int, ...], tuple[float, ...], tuple[str, ...]
_KINDS: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "text",
    WHOLE_NUMBERS: "a list of whole numbers",
    NUMBERS: "a list of finite numbers",
    TEXTS: "a list of texts",
}


def fit(value: object, kind: Any, rule: Rule = ANY) -> Any:
    """The value as `kind`, or ValueError with what it must be. true is not 1, and "10" is not 10.

    kind: bool, int, float, str, or WHOLE_NUMBERS, NUMBERS, TEXTS.
    """
    value = _as_list(value, kind) if get_origin(kind) is tuple else _as_one(value, kind)
    if value is None or not rule.holds(value):
        raise ValueError(", ".join(filter(None, [f"must be {_KINDS[kind]}", rule.text])))
    return value


def _as_one(value: object, kind: Any) -> Any:
    """The value as `kind`; None if it is none."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        value = int(value)  # also from numpy
    elif isinstance(value, float):
        value = float(value)
    if kind is float and type(value) is int and abs(value) < 2**53:  # larger ones may not be exact
        value = float(value)
    finite = not isinstance(value, float) or math.isfinite(value)
    return value if type(value) is kind and finite else None


def _as_list(value: object, kind: Any) -> tuple[Any, ...] | None:
    """The value as a tuple of what `kind` is of; None if it is none."""
    if not isinstance(value, list | tuple):
        return None
    items = tuple(_as_one(item, get_args(kind)[0]) for item in value)
    return None if None in items else items


PATH = Rule("a path, not empty", lambda text: bool(text) and is_path(text))
PATHS = Rule(
    "a path, not empty, or a list of different paths",
    lambda given: (
        PATH.holds(given)
        if isinstance(given, str)
        else bool(given) and len(set(given)) == len(given) and all(map(PATH.holds, given))
    ),
)
MOST_STEPS = 10**9
STEPS = between(1, MOST_STEPS)
INCREASING = Rule(
    f"positive and strictly increasing, at most {MOST_STEPS:,}",
    lambda ks: all(a < b for a, b in pairwise((0, *ks, MOST_STEPS + 1))),
)
KS = Rule(f"not empty, {INCREASING.text}", lambda ks: bool(ks) and INCREASING.holds(ks))
SEED = Rule("at least 0, below 2^63", lambda x: 0 <= x < 2**63)
SHARE = Rule("at least 0 and below 1", lambda x: 0 <= x < 1)
FOLDER_NAME = Rule(
    "printable, without a slash, not empty, not starting with a dot, at most 200 bytes",
    lambda name: (
        name.isprintable() and not re.match(r"$|\.|.*/", name) and len(name.encode()) <= 200
    ),
)
