"""The axes of a grid: named points, or the values of a config key, read from a sweep's file."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dml.rules import Problem

LABEL = re.compile(r"\w[\w.+-]{0,99}")
TEXT = re.compile(r"(?!(?:true|false|null)$)[A-Za-z_/.][\w/.+-]*", re.IGNORECASE)

Overrides = dict[str, str]  # section.key -> its value, as --set takes it


class Problems:
    """Problems in the order they were found; one that many runs share is listed once."""

    def __init__(self) -> None:
        self.runs: dict[str, list[str]] = {}

    def add(self, problem: object, run: str | None = None) -> None:
        self.runs.setdefault(str(problem), []).extend([run] if run else [])

    def add_all(self, problems: Iterable[object], run: str) -> None:
        for problem in problems:
            self.add(problem, run)

    def lines(self, total: int) -> list[str]:
        return [f"{_which(runs, total)}{text}" for text, runs in self.runs.items()]


def _which(runs: Sequence[str], total: int) -> str:
    if not runs:
        return ""
    if len(runs) == total > 1:
        return "every run: "
    more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
    return f"{runs[0]}{more}: "


@dataclass(frozen=True)
class Point:
    """A point of an axis. slurm: its own resources. tune: its own axes of the search, as written."""

    label: str
    overrides: Overrides
    slurm: dict[str, Any] = field(default_factory=dict)
    tune: dict[str, Any] = field(default_factory=dict)


def read_axes(grid: Mapping[str, Any], problems: Problems) -> dict[str, list[Point]]:
    """The points of every axis, in the order of the file."""
    axes: dict[str, list[Point]] = {}
    for axis, given in grid.items():
        if isinstance(given, list):
            given = {label_of(axis, value): value for value in given}
            if len(given) < len(grid[axis]):
                problems.add(Problem(axis, grid[axis], "has a value twice", "remove one"))
        elif not isinstance(given, dict):
            given = {}
        if not given:
            fix = (
                f"for example {axis}: {{small: {{batch.classes: 4}}, large: {{batch.classes: 8}}}}"
            )
            problems.add(Problem(axis, grid[axis], "must be a list or a mapping of points", fix))
        axes[axis] = [read_point(axis, label, value, problems) for label, value in given.items()]
    return axes


def read_point(axis: str, label: object, value: object, problems: Problems) -> Point:
    if not LABEL.fullmatch(str(label)) and axis != "set":
        fix = "use at most 100 letters, digits, and . + - _ after the first"
        problems.add(Problem(axis, label, "not a label", fix))
    if not isinstance(value, dict):
        if "." not in axis:
            fix = f"for example {label}: {{batch.classes: 4}}"
            problems.add(
                Problem(f"{axis}: {label}", value, "must be a mapping of config keys", fix)
            )
            return Point(str(label), {})
        value = {axis: value}
    given = {str(key): item for key, item in value.items()}
    slurm, tune = (
        mapping(f"{axis}: {label}: {key}", given.pop(key, {}), problems)
        for key in ("slurm", "tune")
    )
    return Point(str(label), {key: as_text(v) for key, v in given.items()}, slurm, tune)


def mapping(key: str, value: object, problems: Problems) -> dict[str, Any]:
    if isinstance(value, dict):
        return {str(name): item for name, item in value.items()}
    problems.add(Problem(key, value, "must be a mapping", f"write {key}: {{...}}, or remove it"))
    return {}


def label_of(axis: str, value: object) -> str:
    """The label of a value on a key's axis: embedding_size64, or the text itself."""
    text = (
        value
        if isinstance(value, str)
        else axis.rpartition(".")[2] + json.dumps(value, default=str)
    )
    return re.sub(r"[^\w.+-]+", "-", text).strip("-")


def as_text(value: object) -> str:
    """The value as text that --set reads back."""
    plain = isinstance(value, str) and TEXT.fullmatch(value)
    return str(value) if plain else json.dumps(value, ensure_ascii=False, default=str)
