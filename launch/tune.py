"""The section `tune` of a sweep: which settings are tried at every point of its grid, and how long.

    tune:
      grid:                                 # axes as in the grid of the sweep: every combination
        optim.lr: [1e-4, 3e-4, 1e-3]
        optim.weight_decay: {from: 1e-5, to: 1e-3, log: true}     # or a range, with samples
      samples: 12                           # this many at random instead of every combination
      validation_classes: 0.2               # share of the training classes that decides
      seeds: [0]                            # a setting's score is the mean over them
      share: 0.5                            # of a run's length, which the longest runs of the search have
      rungs: 3                              # successive halving: runs of 1/9 and of 1/3 of that,
      factor: 3                             #   and whole ones; the best third goes on to the next rung
      evaluations: 2                        # of the held-out classes, in a run of the first rung

A point of the sweep's grid may have axes of its own: ms: {loss.name: multi_similarity, tune:
{loss.beta: [40, 50]}}. The same random numbers serve every point, so points with the same axes try
the same settings. launch/halving.py decides; the chosen setting is then run with the `seeds` of the
sweep on the test classes.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dml.config.keys import PART
from dml.rules import Problem, Rule, between, did_you_mean, fit, unknown_keys
from launch.axes import Overrides, Point, Problems, as_text, label_of, mapping, read_axes

DIGITS = 3  # significant digits of a random value, so that its label says all of it
MOST_SETTINGS = 5_000
ATTEMPTS = 100  # per random setting, to find one that is not there yet
OPEN_SHARE = Rule("above 0 and below 1", lambda x: 0 < x < 1)
KEYS = (
    *("grid", "samples", "validation_classes", "seeds"),
    *("share", "rungs", "factor", "evaluations"),
)
RANGE = {"from", "to"}


@dataclass(frozen=True)
class Range:
    """Random values of a config key between two bounds; log: uniform in the logarithm."""

    key: str
    low: float
    high: float
    log: bool

    def draw(self, numbers: random.Random) -> Point:
        if self.log:
            value = math.exp(numbers.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = numbers.uniform(self.low, self.high)
        whole = type(self.low) is type(self.high) is int
        value = round(value) if whole else float(f"{value:.{DIGITS}g}")
        return Point(label_of(self.key, value), {self.key: as_text(value)})


@dataclass(frozen=True)
class Search:
    """The section as read. grid: its axes, as written."""

    grid: Mapping[str, Any]
    validation_classes: float
    samples: int | None = None
    seeds: tuple[int, ...] = (0,)
    share: float = 1.0
    rungs: int = 1
    factor: int = 3
    evaluations: int = 1

    @property
    def overrides(self) -> Overrides:
        """What makes a run one to choose by: it never sees the test classes. launch/halving.py sets its
        length and eval.every_steps."""
        return {
            "eval.validation_classes": as_text(self.validation_classes),
            "eval.every_steps": "1",
            "eval.patience": "null",
            "eval.untrained": "false",
            "eval.frozen": "false",
            "eval.test": "false",
        }

    def settings(self, chosen: Sequence[Point], problems: Problems) -> list[Point]:
        """The settings to try at a point of the sweep's grid."""
        own = {axis: given for point in chosen for axis, given in point.tune.items()}
        grid = {**self.grid, **own}
        ranges = {axis: given for axis, given in grid.items() if _is_range(given)}
        lists = {axis: given for axis, given in grid.items() if axis not in ranges}
        axes: dict[str, list[Point] | Range] = {
            **read_axes(lists, problems),
            **{axis: _range(axis, given, problems) for axis, given in ranges.items()},
        }
        ordered = [axes[axis] for axis in grid]
        if not ordered:
            fix = "for example grid: {optim.lr: [1e-4, 1e-3]}"
            problems.add(Problem("tune.grid", dict(grid), "has no axis", fix))
        elif ranges and self.samples is None:
            fix = "say how many random settings to try, for example samples: 12"
            problems.add(Problem("tune.samples", None, "is required with a range", fix))
        elif not problems.runs:
            return [_joined(points) for points in self._combinations(ordered, problems)]
        return []

    def _combinations(
        self, axes: Sequence[list[Point] | Range], problems: Problems
    ) -> list[tuple[Point, ...]]:
        numbers, lists = random.Random(0), [axis for axis in axes if isinstance(axis, list)]
        if len(lists) == len(axes):
            found = math.prod(map(len, lists))
            wanted = found if self.samples is None else self.samples
            if wanted <= min(found, MOST_SETTINGS):
                chosen = sorted(numbers.sample(range(found), wanted))
                return [_combination(lists, i) for i in chosen]
        else:
            wanted, drawn = self.samples or 0, dict[str, tuple[Point, ...]]()
            for _ in range(ATTEMPTS * wanted):
                if len(drawn) == wanted:
                    break
                points = tuple(
                    numbers.choice(axis) if isinstance(axis, list) else axis.draw(numbers)
                    for axis in axes
                )
                drawn.setdefault(_joined(points).label, points)
            if len(drawn) == wanted:
                return list(drawn.values())
            found = len(drawn)
        rule, fix = (
            f"there are only {found:,} different settings",
            "ask for fewer, or widen the grid",
        )
        if found > MOST_SETTINGS:
            rule = f"there are {found:,} settings, and at most {MOST_SETTINGS:,} can be tried"
            fix = "for example samples: 12, for as many random ones"
        problems.add(Problem("tune.samples", self.samples, rule, fix))
        return []


def _combination(lists: Sequence[list[Point]], i: int) -> tuple[Point, ...]:
    """Number i of the combinations, of which the last axis varies fastest."""
    points: list[Point] = []
    for axis in reversed(lists):
        i, position = divmod(i, len(axis))
        points.append(axis[position])
    return tuple(reversed(points))


def _joined(points: Sequence[Point]) -> Point:
    """One point of all axes; a later axis overrides an earlier one."""
    overrides = {key: value for point in points for key, value in point.overrides.items()}
    slurm = {key: value for point in points for key, value in point.slurm.items()}
    return Point("-".join(point.label for point in points), overrides, slurm)


def _is_range(given: object) -> bool:
    return isinstance(given, dict) and bool(RANGE & given.keys())


def _range(axis: str, given: Mapping[str, Any], problems: Problems) -> Range:
    low, high, log = (given.get(key, False) for key in ("from", "to", "log"))
    numbers = all(type(x) in (int, float) and math.isfinite(x) for x in (low, high))
    sound = numbers and low < high and (low > 0 or not log) and type(log) is bool
    if not sound or given.keys() - RANGE - {"log"} or "." not in axis:
        rule = "a range of a config key has from, a larger to, and perhaps log: true, if both are above 0"
        fix = "for example optim.lr: {from: 1e-5, to: 1e-3, log: true}"
        problems.add(Problem(f"tune.grid: {axis}", dict(given), rule, fix))
        return Range(axis, 0, 1, False)
    return Range(axis, low, high, log)


def read_seeds(key: str, seeds: object, problems: Problems) -> list[int]:
    whole = isinstance(seeds, list) and all(type(seed) is int and seed >= 0 for seed in seeds)
    if isinstance(seeds, list) and whole and seeds and len(set(seeds)) == len(seeds):
        return seeds
    rule = "must be a list of different whole numbers, at least 0"
    problems.add(Problem(key, seeds, rule, "for example seeds: [0, 1]"))
    return []


def read_search(given: object, problems: Problems) -> Search | None:
    tree = mapping("tune", given, problems)

    def unknown(key: str, value: object) -> Problem:
        fix = f"{did_you_mean(key, KEYS)}tune has {', '.join(KEYS)}"
        return Problem(f"tune.{key}", value, "unknown key", fix)

    for problem in unknown_keys(tree, KEYS, unknown):
        problems.add(problem)
    values: dict[str, Any] = {"grid": mapping("tune.grid", tree.get("grid", {}), problems)}
    if "seeds" in tree:
        values["seeds"] = tuple(read_seeds("tune.seeds", tree["seeds"], problems))
    for key, kind, rule in (
        ("validation_classes", float, OPEN_SHARE),
        ("samples", int, between(1, MOST_SETTINGS)),
        ("share", float, PART),
        ("rungs", int, between(1, 10)),
        ("factor", int, between(2, 100)),
        ("evaluations", int, between(1, 1_000)),
    ):
        if key in tree:
            try:
                values[key] = fit(tree[key], kind, rule)
            except ValueError as error:
                fix = "see the head of launch/tune.py"
                problems.add(Problem(f"tune.{key}", tree[key], str(error), fix))
    if "validation_classes" not in tree:
        fix = "for example validation_classes: 0.2, a fifth of the training classes"
        problems.add(Problem("tune.validation_classes", None, "is required", fix))
    return Search(**values) if "validation_classes" in values else None
