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
    tune: {...}                           # settings chosen by held-out classes: launch/tune.py
    slurm: {nodes: 2, gpus_per_node: 8, processes_per_node: 8}

A later axis overrides an earlier one, and every axis overrides `set`. Parameters of a loss belong in
the same layer as its loss.name, or in a later one. The runs of configs/sweeps/NAME.yaml go into
NAME/ inside run.dir, which is `runs` unless the base or the sweep says otherwise; a run's name consists
of its labels and its seed: bs20-embedding_size64-slow-seed0.
"""

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from dml.config import Config, Loss, Run, find_config, load, parse, read_yaml
from dml.config.mixing import Sizes
from dml.errors import ConfigError
from dml.plan import Plan, built_sizes, plan
from dml.rules import Problem, did_you_mean, is_path, shortened, unknown_keys
from launch.axes import Overrides, Point, Problems, as_text, mapping, read_axes, read_point
from launch.resources import Resources, read_resources
from launch.tune import Search, read_search, read_seeds

KEYS = ("base", "seeds", "set", "grid", "variants", "tune", "slurm")
MOST_RUNS = 5_000
SHOWN = 50  # problems
FROM_THE_SWEEP = {"run.name", "run.seed"}  # made from the labels and the seeds
TUNE = "tune"  # the folder of the runs that settings are chosen by, inside that of the sweep


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

    @property
    def point(self) -> str:
        """The label of its point of the grid; empty if the sweep has no axes."""
        return self.name.removesuffix(f"seed{self.seed}").removesuffix("-")


@dataclass(frozen=True)
class Setting:
    """A setting that a search tries at a point of the grid.

    tried: its runs that evaluate held-out classes, one per seed of the search, with their whole length.
    final: its runs on the test classes, one per seed of the sweep.
    """

    label: str
    tried: tuple[SweepRun, ...]
    final: tuple[SweepRun, ...]


@dataclass(frozen=True)
class Sweep:
    """runs: with a search, those of the first setting of every point, in place of the chosen one.
    settings: those that are tried, by the point of the grid."""

    name: str
    runs: tuple[SweepRun, ...]
    path: str
    search: Search | None = None
    settings: Mapping[str, tuple[Setting, ...]] = field(default_factory=dict)


def read_sweep(path: str | Path, sets: Sequence[str] = ()) -> Sweep:
    """The runs of a sweep's file; SweepError lists every problem. sets: --set for every run."""
    path, problems = find_config(Path(path)), Problems()
    tree = _read_file(path)

    def unknown(key: object, value: object) -> Problem:
        fix = f"{did_you_mean(key, KEYS)}a sweep has {', '.join(KEYS)}"
        return Problem(str(key), value, "unknown key", fix)

    for problem in unknown_keys(tree, KEYS, unknown):
        problems.add(problem)
    files = _read_base(tree.get("base"), path, problems)
    seeds = read_seeds("seeds", tree.get("seeds", [0]), problems)
    common = read_point("set", "every run", tree.get("set", {}), problems)
    slurm = mapping("slurm", tree.get("slurm", {}), problems) | common.slurm
    last = {key: value for key, _, value in (text.partition("=") for text in sets)}
    axes = read_axes(_grid(tree, problems), problems)
    search = read_search(tree["tune"], problems) if "tune" in tree else None
    if search is None and any(point.tune for points in axes.values() for point in points):
        problems.add("grid: a point has axes to tune; add the section tune, or remove them")
    count = math.prod(map(len, axes.values())) * len(seeds)
    points = list(product(*axes.values())) if count <= MOST_RUNS else []
    tried = [search.settings(chosen, problems) if search else [] for chosen in points]
    if search:
        count += sum(map(len, tried)) * len(search.seeds)
    if count > MOST_RUNS:
        problems.add(f"{count:,} runs: the limit is {MOST_RUNS:,}; divide the sweep")
    if problems.runs:  # stop here: values of a broken part would be reported as missing
        read_resources(slurm, problems.add)
        raise SweepError(problems.lines(0), path)

    first = [*points[0], *tried[0][:1]]
    layers = [common.overrides, *(point.overrides for point in first), last]
    shared = _Shared(path, tuple(files), common.overrides, slurm, last, *_base_of(files, layers))
    runs, settings = list[SweepRun](), dict[str, tuple[Setting, ...]]()
    for chosen, options in zip(points, tried, strict=True):
        if search is None:
            runs += shared.runs(chosen, seeds, problems)
            continue
        found = tuple(_settings(shared, search, chosen, options, seeds, problems))
        runs += found[0].final
        settings["-".join(point.label for point in chosen)] = found
    every = [runs, [run for found in settings.values() for each in found for run in each.tried]]
    for name, times in (item for some in every for item in Counter(r.name for r in some).items()):
        if times > 1:
            problems.add(f"{times} runs would be called {name}; change a label")
    if problems.runs:
        raise SweepError(
            problems.lines(sum(map(len, tried)) * len(seeds) if search else count), path
        )
    return Sweep(path.stem, tuple(runs), str(path), search, settings)


def _grid(tree: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    grid = mapping("grid", tree.get("grid", {}), problems)
    variants = mapping("variants", tree.get("variants", {}), problems)
    if variants and "variant" in grid:
        problems.add("grid: variant: variants are an axis of this name; choose another")
    return {**grid, "variant": variants} if variants else grid


@dataclass(frozen=True)
class _Shared:
    """What the runs of a sweep's file share. loss and root: loss.name and run.dir of the base."""

    path: Path
    files: tuple[str, ...]
    common: Overrides
    slurm: Mapping[str, Any]
    last: Overrides
    loss: str
    root: str

    def runs(
        self,
        points: Sequence[Point],
        seeds: Sequence[int],
        problems: Problems,
        name: Sequence[str] | None = None,
        tuning: Overrides | None = None,
    ) -> Iterator[SweepRun]:
        """The runs of some points together, one per seed.

        name: the labels in their names, if not those of the points. tuning: for runs that settings are
        chosen by; not even --set overrides it.
        """
        labels = [point.label for point in points] if name is None else name
        inside = Path(self.path.stem, TUNE) if tuning else Path(self.path.stem)
        for seed in seeds:
            called = "-".join([*labels, f"seed{seed}"])
            layers = [self.common, *(point.overrides for point in points), self.last]
            overrides = _overlay(layers, self.loss) | (tuning or {})
            self._check(layers, overrides, called, problems)
            overrides |= {
                "run.name": as_text(called),
                "run.dir": _inside(overrides.get("run.dir", self.root), inside),
                "run.seed": as_text(seed),
            }
            texts = tuple(f"{key}={value}" for key, value in overrides.items())
            needs = {key: value for point in points for key, value in point.slurm.items()}
            report = partial(problems.add, run=called)
            resources = read_resources({**self.slurm, **needs}, report)
            try:
                config = load(self.files, texts)
            except ConfigError as error:
                problems.add_all(error.problems, called)
            else:
                yield SweepRun(called, seed, self.files, texts, config, resources)

    def _check(
        self, layers: Sequence[Overrides], overrides: Overrides, run: str, problems: Problems
    ) -> None:
        given = {k: v for layer in layers for k, v in layer.items() if k.startswith("loss.")}
        for key in sorted(given.keys() - overrides.keys()):
            text = (
                f"{key} = {shortened(given[key], 60)}: is lost, because a later layer sets another loss.name; set it "
                "beside that loss.name"
            )
            problems.add(text, run)
        for key in sorted(FROM_THE_SWEEP & overrides.keys()):
            problems.add(f"{key} = {shortened(overrides[key], 60)}: the sweep sets it; remove it")


def _settings(
    shared: _Shared,
    search: Search,
    chosen: Sequence[Point],
    options: Sequence[Point],
    seeds: Sequence[int],
    problems: Problems,
) -> Iterator[Setting]:
    labels = [point.label for point in chosen]
    for option in options:
        both = [*chosen, option]
        tried = shared.runs(both, search.seeds, problems, tuning=search.overrides)
        final = shared.runs(both, seeds, problems, labels)
        yield Setting(option.label, tuple(tried), tuple(final))


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


def _read_base(base: object, path: Path, problems: Problems) -> list[str]:
    files = base if isinstance(base, list) else [base]
    paths = [file for file in files if isinstance(file, str) and is_path(file)]
    if not paths or paths != files:
        rule = "must be the path of a config, or a list of paths"
        problems.add(Problem("base", base, rule, "for example base: ../sop.yaml"))
        return []
    return [os.path.normpath(path.parent / file) for file in paths]


def _inside(folder: str, name: Path) -> str:
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
    problems, plans = Problems(), []
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
