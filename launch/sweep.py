"""A study as a list of runs: a base config, a grid and seeds, expanded without torch.

    base: ../sop.yaml                     # or a list; paths are relative to the sweep's file
    seeds: [0, 1]
    set: {length.images: 64_000}          # for every run
    grid:                                 # every combination of the axes, in the order of the file
      batch:                              # named points, of any number of keys
        bs20: {batch.classes: 4, slurm: {nodes: 1}}     # `slurm` overrides the section below
        bs40: {batch.classes: 8}
      model.embedding_size: [64, 128]     # a config key: labels are made from the values
      optim.lr: {slow: 1e-4, fast: 1e-3}  # or given
    variants: {plain: {}, deep: {...}}    # one more axis, called variant
    slurm: {nodes: 2, gpus_per_node: 8, processes_per_node: 8}

A later axis overrides an earlier one, and every axis overrides `set`. Parameters of a loss belong in
the same layer as its loss.name, or in a later one. The runs of configs/sweeps/NAME.yaml go into
NAME/ inside run.dir, which is `runs` unless the base or the sweep says otherwise; a run's name consists
of its labels and its seed: bs20-embedding_size64-slow-seed0.
"""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from dml.config import Config, Loss, Run, find_config, load, parse, read_yaml
from dml.config.mixing import Sizes
from dml.errors import ConfigError
from dml.plan import Plan, built_sizes, plan
from dml.rules import Problem, did_you_mean, is_path, shortened, unknown_keys
from launch.resources import Resources, read_resources

LABEL = re.compile(r"\w[\w.+-]{0,99}")
TEXT = re.compile(r"(?!(?:true|false|null)$)[A-Za-z_/.][\w/.+-]*", re.IGNORECASE)
KEYS = ("base", "seeds", "set", "grid", "variants", "slurm")
MOST_RUNS = 5_000
SHOWN = 50  # problems
FROM_THE_SWEEP = {"run.name", "run.seed"}  # made from the labels and the seeds

Overrides = dict[str, str]  # section.key -> its value, as --set takes it


class SweepError(ValueError):
    """A sweep is wrong; every problem is listed."""

    def __init__(self, problems: Sequence[str], where: str | Path) -> None:
        super().__init__(problems, where)
        self.problems = tuple(problems)
        self.where = str(where)

    def __str__(self) -> str:
        count = f"{len(self.problems)} problem{'s' * (len(self.problems) != 1)}"
        more = [f"and {len(self.problems) - SHOWN:,} more"] * (len(self.problems) > SHOWN)
        return "\n  ".join([f"{count} in {self.where}:", *self.problems[:SHOWN], *more])


@dataclass(frozen=True)
class SweepRun:
    """files and sets: the --config and --set of dml/train.py."""

    name: str
    seed: int
    files: tuple[str, ...]
    sets: tuple[str, ...]
    config: Config
    resources: Resources

    @property
    def label(self) -> str:
        """The name without the seed; the name itself if the sweep has no axes."""
        return self.name.removesuffix(f"-seed{self.seed}")


@dataclass(frozen=True)
class Sweep:
    name: str
    runs: tuple[SweepRun, ...]
    path: str


@dataclass(frozen=True)
class _Point:
    label: str
    overrides: Overrides
    slurm: dict[str, Any]


class _Problems:
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


def read_sweep(path: str | Path, sets: Sequence[str] = ()) -> Sweep:
    """The runs of a sweep's file; SweepError lists every problem. sets: --set for every run."""
    path, problems = find_config(Path(path)), _Problems()
    tree = _read_file(path)

    def unknown(key: object, value: object) -> Problem:
        fix = f"{did_you_mean(key, KEYS)}a sweep has {', '.join(KEYS)}"
        return Problem(str(key), value, "unknown key", fix)

    for problem in unknown_keys(tree, KEYS, unknown):
        problems.add(problem)
    files = _read_base(tree.get("base"), path, problems)
    seeds = _read_seeds(tree.get("seeds", [0]), problems)
    common = _read_point("set", "every run", tree.get("set", {}), problems)
    slurm = _mapping("slurm", tree.get("slurm", {}), problems) | common.slurm
    last = {key: value for key, _, value in (text.partition("=") for text in sets)}
    axes = _read_axes(tree, problems)
    count = math.prod(map(len, axes.values())) * len(seeds)
    if count > MOST_RUNS:
        problems.add(f"{count:,} runs: the limit is {MOST_RUNS:,}; divide the sweep")
    if problems.runs:  # stop here: values of a broken part would be reported as missing
        read_resources(slurm, problems.add)
        raise SweepError(problems.lines(0), path)

    runs: list[SweepRun] = []
    points = list(product(product(*axes.values()), seeds))
    loss, root = _base_of(
        files, [common.overrides, *(point.overrides for point in points[0][0]), last]
    )
    for chosen, seed in points:
        labels = [point.label for point in chosen]
        name = "-".join([*labels, f"seed{seed}"])
        layers = [common.overrides, *(point.overrides for point in chosen), last]
        overrides = _overlay(layers, loss)
        given = {k: v for layer in layers for k, v in layer.items() if k.startswith("loss.")}
        for key in sorted(given.keys() - overrides.keys()):
            text = (
                f"{key} = {shortened(given[key], 60)}: is lost, because a later layer sets another loss.name; set it "
                "beside that loss.name"
            )
            problems.add(text, name)
        for key in sorted(FROM_THE_SWEEP & overrides.keys()):
            problems.add(f"{key} = {shortened(overrides[key], 60)}: the sweep sets it; remove it")
        overrides |= {
            "run.name": as_text(name),
            "run.dir": _inside(overrides.get("run.dir", root), path.stem),
            "run.seed": as_text(seed),
        }
        texts = tuple(f"{key}={value}" for key, value in overrides.items())
        needs = {key: value for point in chosen for key, value in point.slurm.items()}
        resources = read_resources({**slurm, **needs}, partial(problems.add, run=name))
        try:
            config = load(files, texts)
        except ConfigError as error:
            problems.add_all(error.problems, name)
            continue
        runs.append(SweepRun(name, seed, tuple(files), texts, config, resources))
    names = Counter(run.name for run in runs)
    for name in (name for name, count in names.items() if count > 1):
        problems.add(f"{names[name]} runs would be called {name}; change a label")
    if problems.runs:
        raise SweepError(problems.lines(len(points)), path)
    return Sweep(path.stem, tuple(runs), str(path))


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        tree = read_yaml(path)
    except OSError as error:
        raise SweepError([f"{path.absolute()}: {error.strerror}; check the path"], path) from None
    except ValueError as error:
        raise SweepError([f"{path}: {error}"], path) from None
    if not isinstance(tree, dict):
        raise SweepError([f"{path}: is not a mapping; a sweep has {', '.join(KEYS)}"], path)
    return tree


def _read_base(base: object, path: Path, problems: _Problems) -> list[str]:
    files = base if isinstance(base, list) else [base]
    paths = [file for file in files if isinstance(file, str) and is_path(file)]
    if not paths or paths != files:
        rule = "must be the path of a config, or a list of paths"
        problems.add(Problem("base", base, rule, "for example base: ../sop.yaml"))
        return []
    return [os.path.normpath(path.parent / file) for file in paths]


def _read_seeds(seeds: object, problems: _Problems) -> list[int]:
    whole = isinstance(seeds, list) and all(type(seed) is int and seed >= 0 for seed in seeds)
    if isinstance(seeds, list) and whole and seeds and len(set(seeds)) == len(seeds):
        return seeds
    rule = "must be a list of different whole numbers, at least 0"
    problems.add(Problem("seeds", seeds, rule, "for example seeds: [0, 1]"))
    return []


def _read_axes(tree: Mapping[str, Any], problems: _Problems) -> dict[str, list[_Point]]:
    grid = dict(_mapping("grid", tree.get("grid", {}), problems))
    variants = _mapping("variants", tree.get("variants", {}), problems)
    if variants and "variant" in grid:
        problems.add("grid: variant: variants are an axis of this name; choose another")
    if variants:
        grid["variant"] = variants
    axes: dict[str, list[_Point]] = {}
    for axis, given in grid.items():
        if isinstance(given, list):
            given = {_label(axis, value): value for value in given}
            if len(given) < len(grid[axis]):
                problems.add(Problem(axis, grid[axis], "has a value twice", "remove one"))
        elif not isinstance(given, dict):
            given = {}
        if not given:
            fix = (
                f"for example {axis}: {{small: {{batch.classes: 4}}, large: {{batch.classes: 8}}}}"
            )
            problems.add(Problem(axis, grid[axis], "must be a list or a mapping of points", fix))
        axes[axis] = [_read_point(axis, label, value, problems) for label, value in given.items()]
    return axes


def _read_point(axis: str, label: object, value: object, problems: _Problems) -> _Point:
    if not LABEL.fullmatch(str(label)) and axis != "set":
        fix = "use at most 100 letters, digits, and . + - _ after the first"
        problems.add(Problem(axis, label, "not a label", fix))
    if not isinstance(value, dict):
        if "." not in axis:
            fix = f"for example {label}: {{batch.classes: 4}}"
            problems.add(
                Problem(f"{axis}: {label}", value, "must be a mapping of config keys", fix)
            )
            return _Point(str(label), {}, {})
        value = {axis: value}
    given = {str(key): item for key, item in value.items()}
    slurm = _mapping(f"{axis}: {label}: slurm", given.pop("slurm", {}), problems)
    return _Point(str(label), {key: as_text(v) for key, v in given.items()}, slurm)


def _mapping(key: str, value: object, problems: _Problems) -> dict[str, Any]:
    if isinstance(value, dict):
        return {str(name): item for name, item in value.items()}
    problems.add(Problem(key, value, "must be a mapping", f"write {key}: {{...}}, or remove it"))
    return {}


def _label(axis: str, value: object) -> str:
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


def _inside(folder: str, name: str) -> str:
    try:
        return as_text(str(Path(str(parse(folder)), name)))
    except ValueError:
        return folder  # not YAML; loading the config reports it


def _base_of(files: Sequence[str], layers: Iterable[Overrides]) -> tuple[str, str]:
    """The base's loss.name and run.dir. The layers are added because a base alone need not be
    complete."""
    others = {**_overlay(layers, Loss.name), "run.name": "base"}
    own = {key: v for key, v in others.items() if not key.startswith("loss.") and key != "run.dir"}
    try:
        base = load(files, [f"{key}={value}" for key, value in own.items()])
    except ConfigError:  # reported with the runs
        return Loss.name, Run.dir
    return base.loss.name, as_text(base.run.dir)


def _overlay(layers: Iterable[Overrides], loss: str) -> Overrides:
    """Merge the layers; later ones win. A new length replaces the old one, as in the config, and
    another loss.name drops the parameters of the loss before."""
    merged: Overrides = {}
    for layer in layers:
        if any(key.startswith("length.") for key in layer):
            merged = {key: v for key, v in merged.items() if not key.startswith("length.")}
        before = merged.get("loss.name", loss)
        if layer.get("loss.name", before) != before:
            merged = {key: v for key, v in merged.items() if not key.startswith("loss.")}
        merged |= layer
    return merged


def choose(sweep: Sweep, names: Sequence[str]) -> Sweep:
    """The sweep with only the named runs; a name without its seed means all its seeds.

    No names choose all runs.
    """
    if not names:
        return sweep
    known = [*dict.fromkeys(name for run in sweep.runs for name in (run.label, run.name))]
    unknown = [name for name in names if name not in known]
    if unknown:
        hints = "".join(did_you_mean(name, known) for name in unknown)
        labels = ", ".join(dict.fromkeys(run.label for run in sweep.runs))
        seeds = ", ".join(dict.fromkeys(f"-seed{run.seed}" for run in sweep.runs))
        endings = "" if sweep.runs[0].label == sweep.runs[0].name else f", each with {seeds}"
        text = f"--only {' '.join(unknown)}: no such run; {hints}the runs are {labels}{endings}"
        raise SweepError([text], sweep.path)
    runs = tuple(run for run in sweep.runs if {run.name, run.label} & set(names))
    return replace(sweep, runs=runs)


def plan_all(sweep: Sweep) -> tuple[Plan, ...]:
    """The plan of every run for its number of processes; SweepError lists every problem."""
    problems, plans = _Problems(), []
    sizes: dict[tuple[str, ...], Sizes] = {}
    for run in sweep.runs:
        needs = run.resources
        problems.add_all(needs.problems(), run.name)
        try:
            shards = run.config.data.folders
            if shards not in sizes:
                sizes[shards] = built_sizes(run.config)
            plans.append(plan(run.config, needs.processes, *sizes[shards]))
        except ConfigError as error:
            problems.add_all(error.problems, run.name)
        except ValueError as error:  # ShardError: damaged shards
            problems.add(error, run.name)
    if problems.runs:
        raise SweepError(problems.lines(len(sweep.runs)), f"the plans of {sweep.path}")
    return tuple(plans)
