"""YAML with the scalars of version 1.2.

PyYAML follows version 1.1, which reads 1e-5 as text, 010 as 8, 1:30 as 90 and no as false.
"""

import re
from typing import Any

import yaml


class _Reader(yaml.SafeLoader):
    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        keys = [key.value for key, _ in node.value]
        twice = [key for key in keys if keys.count(key) > 1]
        if twice:
            text = f"the key {twice[0]!r} appears twice"
            raise yaml.constructor.ConstructorError(None, None, text, node.start_mark)
        return mapping


class _Writer(yaml.SafeDumper):
    """Quotes text that `_Reader`, or a reader of YAML 1.1, would read as another type."""


_Reader.yaml_implicit_resolvers = {}
for _tag, _pattern in [
    ("null", r"null|~|"),
    ("bool", r"true|True|false|False"),
    ("int", r"[-+]?(0|[1-9][0-9_]*)"),
    ("float", r"[-+]?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?"),
]:
    _regex = re.compile(rf"^(?:{_pattern})$")
    yaml.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _regex, None, _Reader, _Writer)


def parse(text: str) -> Any:
    """The value of a YAML text; ValueError says in one line what is wrong with it."""
    try:
        return yaml.load(text, _Reader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ValueError(f"line {line} is not YAML: {error.problem}") from None
    # an explicit tag on the wrong text (!!bool x, !!int "") fails inside PyYAML with other errors
    except (yaml.YAMLError, ValueError, RecursionError, LookupError, AttributeError) as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None


def dump(tree: object) -> str:
    """The text that `parse` reads back as an equal value, even for a run named 1e-5."""
    return yaml.dump(tree, Dumper=_Writer, sort_keys=False)
