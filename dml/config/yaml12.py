"""YAML with the scalars of version 1.2, of bounded size.

PyYAML follows version 1.1, which reads 1e-5 as text, 010 as 8, 1:30 as 90 and no as false. It also
expands aliases of aliases without limit: some lines of YAML can stand for more than fits into memory.
"""

import re
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from dml.rules import shortened

# Characters of a file, and of its value with every alias expanded. Our own have 4,000 at most; PyYAML
# reads about 100,000 per second.
LONGEST = 2**18
DEEPEST = 50  # levels of lists and mappings
TOO_DEEP = f"lists or mappings are nested more than {DEEPEST} levels deep"
ENDLESS = (2 * LONGEST, 0)  # a node counts at least one character, which `{a, b}` does not spend
DIGITS = 400  # of a number; the largest that is finite has 309
TAG = "tag:yaml.org,2002:"


class _Reader(yaml.SafeLoader):
    levels = 0  # of the node that is composed

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuses a text as soon as it is too deep: PyYAML takes a second for a thousand levels."""
        self.levels += 1
        if self.levels > DEEPEST:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, TOO_DEEP, mark)
        node = super().compose_node(parent, index)
        self.levels -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        first: dict[Any, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.value in first:
                text = (
                    f"the key {key.value[:60]!r} is there twice, first in line {first[key.value]}"
                )
                raise yaml.constructor.ConstructorError(None, None, text, key.start_mark)
            first[key.value] = line
        return mapping

    def flatten_mapping(self, node: Any) -> None:
        """Version 1.2 has no merge keys (<<)."""

    def construct_number(self, node: Any) -> int | float:
        text = self.construct_scalar(node).replace("_", "")
        kind = int if node.tag == f"{TAG}int" else float
        try:
            if len(text) <= DIGITS:
                return kind(text)
            problem = f"a number of {len(text):,} digits"
        except ValueError:
            problem = f"{text[:60]!r} is not a number"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


class _Writer(yaml.SafeDumper):
    """Quotes text that `_Reader`, or a reader of YAML 1.1, would read as another type."""


_Reader.yaml_implicit_resolvers = {}
for _tag, _pattern in [
    ("null", r"null|~|"),
    ("bool", r"true|True|false|False"),
    ("int", r"[-+]?(0|[1-9][0-9_]*)"),
    ("float", r"[-+]?([0-9][0-9_]*(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?"),
]:
    _regex = re.compile(rf"^(?:{_pattern})$")
    yaml.add_implicit_resolver(f"{TAG}{_tag}", _regex, None, _Reader, _Writer)
_Reader.yaml_constructors = dict(_Reader.yaml_constructors)
for _tag in ("timestamp", "binary", "omap", "pairs", "set"):  # no value of a config
    del _Reader.yaml_constructors[f"{TAG}{_tag}"]
for _tag in ("int", "float"):
    _Reader.add_constructor(f"{TAG}{_tag}", _Reader.construct_number)


def read_yaml(path: Path) -> Any:
    """The value of a YAML file. OSError if it cannot be read; ValueError as for `parse`."""
    with path.open("rb") as file:
        data = file.read(LONGEST + 1)
    if len(data) > LONGEST:
        raise ValueError(f"is longer than {LONGEST:,} bytes")
    try:
        return parse(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None


def parse(text: str) -> Any:
    """The value of a YAML text; ValueError says in one line what is wrong with it."""
    return deepcopy(_parsed(text))


@lru_cache(maxsize=64)  # PyYAML is slow, and each run of a sweep has the same base
def _parsed(text: str) -> Any:
    if len(text) > LONGEST:
        raise ValueError(f"is longer than {LONGEST:,} characters")
    try:
        reader = _Reader(text)
        node = reader.get_single_node()
        if node is None:
            return None
        _measure(node, {}, DEEPEST)
        return reader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ValueError(
            f"line {line} is not YAML: {shortened(error.problem or '', 200)}"
        ) from None
    # an explicit tag on the wrong text (!!bool x) fails inside PyYAML with other errors
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"not YAML: {shortened(problem, 200)}") from None


def _measure(node: Any, known: dict[int, tuple[int, int]], levels: int) -> tuple[int, int]:
    """How long and how deeply nested a node is with every alias expanded; an error if it is too long
    or has more than so many levels. known: by the id of a node."""
    length, depth = known.get(id(node), (0, 0))
    if not length and levels:
        known[id(node)] = ENDLESS  # an alias inside its own anchor
        if isinstance(node, yaml.ScalarNode):
            parts = []
        elif isinstance(node, yaml.MappingNode):
            parts = [_measure(each, known, levels - 1) for pair in node.value for each in pair]
        else:
            parts = [_measure(each, known, levels - 1) for each in node.value]
        own = len(node.value) if isinstance(node, yaml.ScalarNode) else 0
        length = 1 + own + sum(length for length, _ in parts)
        depth = 1 + max((depth for _, depth in parts), default=0)
        known[id(node)] = length, depth
    if length >= ENDLESS[0]:
        problem = f"its aliases (*) stand for more than {LONGEST:,} characters"
    elif not levels or depth > levels:
        problem = TOO_DEEP
    else:
        return length, depth
    raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def dump(tree: object) -> str:
    """The text that `parse` reads back as an equal value, even for a run named 1e-5."""
    return yaml.dump(tree, Dumper=_Writer, sort_keys=False)
