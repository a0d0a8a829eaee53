"""What runs left behind: their state, their scores, and which of them differ only in the seed.

No torch is needed, so a report can be made on a login node.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import sqrt
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from dml.config import EXECUTION, Config, flatten
from dml.errors import ConfigError
from dml.run_folder.files import DamagedError
from dml.run_folder.folder import is_of_length
from launch.run_files import (
    CONFIG,
    read_config,
    read_failed,
    read_metrics,
    read_planned_steps,
    read_result,
    read_speeds,
)
from launch.run_files import FAILED as FAILED_FILE
from launch.submission import SUBMISSIONS_FILE, read_submissions
from launch.sweep import TUNE

FINISHED, FAILED, UNFINISHED, ABSENT = "finished", "failed", "unfinished", "never started"
DAMAGED = "damaged"  # a file of it cannot be used

MOST_POINTS = 40  # of a curve of what is measured at every line of metrics.jsonl

# The settings that do not make another row of a report: how a run is carried out, its name and seed,
# and how often it is measured. batch.size stands for batch.classes. With held-out classes
# eval.every_steps does count, because it decides which steps the best one is chosen from.
IGNORED = EXECUTION | {
    *("run.name", "run.seed", "run.log_steps", "batch.classes"),
    *("eval.ks", "eval.every_steps", "eval.untrained"),
}


@dataclass(frozen=True)
class Measured:
    """A share that was measured during training: Recall@1 of a split, or of steps without pairs."""

    split: str
    step: int
    images: int
    share: float


@dataclass(frozen=True)
class Run:
    """settings: section.key -> value. planned: its length in steps. note: why there is no result.
    log: the last lines of its log. folder: None if it never started. without_pairs: the share of steps
    without an informative pair, up to some of its steps."""

    study: str
    name: str
    state: str
    settings: Mapping[str, Any]
    result: Mapping[str, Any]
    evaluations: tuple[Measured, ...] = ()
    images_per_second: float | None = None
    planned: int | None = None
    note: str = ""
    log: tuple[str, ...] = ()
    folder: Path | None = None
    without_pairs: tuple[Measured, ...] = ()

    @property
    def frozen(self) -> Mapping[str, float]:
        """The scores of the features that it began with, if it has evaluated them (eval.frozen)."""
        scores = self.result.get("frozen")
        return scores if isinstance(scores, dict) and "recall@1" in scores else {}

    @property
    def label(self) -> str:
        return re.sub(r"-?seed\d+$", "", self.name) or self.study

    @property
    def seed(self) -> Any:
        return self.settings.get("run.seed", "")

    def number(self, key: str) -> float | None:
        value = self.images_per_second if key == "images_per_second" else self.result.get(key)
        return value if isinstance(value, int | float) else None


@dataclass(frozen=True)
class Spread:
    """error: the standard error of the mean, s / sqrt(n); 0 for a single value, which has none."""

    mean: float
    error: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        n = len(values)
        error = stdev(values) / sqrt(n) if n > 1 else 0.0
        return cls(mean(values), error, min(values), max(values), n)


@dataclass(frozen=True)
class Group:
    """Runs that differ only in the seed. without_config: runs of its label that left no config."""

    runs: tuple[Run, ...]
    without_config: tuple[Run, ...] = ()

    @property
    def label(self) -> str:
        return ", ".join(dict.fromkeys(run.label for run in self.runs))

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings that all its runs share."""
        return learning_settings(self.runs[0])

    @property
    def seeds(self) -> int:
        return len({run.seed for run in self.runs}) + len(self.without_config)

    @cached_property
    def finished(self) -> tuple[Run, ...]:
        """The first finished run of every seed."""
        done = [run for run in self.runs if run.state == FINISHED]
        return tuple({run.seed: run for run in reversed(done)}.values())[::-1]

    @property
    def repeats(self) -> tuple[Run, ...]:
        """Finished runs of a seed that another run has already."""
        done = (run for run in self.runs if run.state == FINISHED)
        return tuple(run for run in done if run not in self.finished)

    def spread(self, key: str) -> Spread | None:
        """Mean, standard error, lowest and highest value over the finished seeds."""
        found = [x for run in self.finished if (x := run.number(key)) is not None]
        return Spread.of(found) if found else None


@dataclass(frozen=True)
class Study:
    """The runs of one folder; name: its path below the root. tuned: the settings that a search chose."""

    name: str
    runs: tuple[Run, ...]
    tuned: tuple[str, ...] = ()

    @cached_property
    def score(self) -> str:
        """What the study is about: Recall@1 of the test classes, or of held-out classes if none of its
        runs has seen the test classes."""
        tested = any(run.number("recall@1") is not None for run in self.runs)
        chosen_by = any(run.number("validation_recall@1") is not None for run in self.runs)
        return "validation_recall@1" if chosen_by and not tested else "recall@1"

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups of the runs that started, ordered by the columns; the first varies fastest."""
        found: dict[str, list[Run]] = {}
        for run in self.runs:
            if run.settings:
                found.setdefault(json.dumps(learning_settings(run), sort_keys=True), []).append(run)

        def order(group: Group) -> list[tuple[float, str]]:
            return [_order(group.settings.get(key)) for key in reversed(self.columns)]

        others = [run for run in self.runs if not run.settings]
        groups = []
        for runs in found.values():
            labels = {run.label for run in runs}
            groups.append(Group(tuple(runs), tuple(run for run in others if run.label in labels)))
        return tuple(sorted(groups, key=order))

    @cached_property
    def varying(self) -> tuple[str, ...]:
        """The settings in which the groups differ."""
        keys = dict.fromkeys(key for settings in self._settings for key in settings)
        return tuple(k for k in keys if len({json.dumps(s.get(k)) for s in self._settings}) > 1)

    @cached_property
    def _settings(self) -> list[dict[str, Any]]:
        return [learning_settings(run) for run in self.runs if run.settings]

    @property
    def datasets(self) -> set[str]:
        return {group.settings["data.dataset"] for group in self.groups}

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The varying settings without those that are determined by the ones before them."""
        kept: list[str] = []
        count = 1
        for key in self.varying:
            tried = [*kept, key]
            values = {json.dumps([s.get(k) for k in tried]) for s in self._settings}
            if len(values) > count:
                kept, count = tried, len(values)
        return tuple(kept)

    @property
    def shown(self) -> tuple[str, ...]:
        """The columns, and the settings that a search chose for each of them."""
        return (
            *self.columns,
            *(k for k in self.varying if k in self.tuned and k not in self.columns),
        )

    def without_result(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.state != FINISHED)


def settings_of(config: Config) -> dict[str, Any]:
    """section.key -> value, and the batch size."""
    return {"batch.size": config.batch.classes * config.batch.per_class, **flatten(config)}


def learning_settings(run: Run) -> dict[str, Any]:
    """The settings that say what a run learns; runs that agree in them are one row of a report."""
    ignored = IGNORED - ({"eval.every_steps"} if run.settings["eval.validation_classes"] else set())
    return {key: value for key, value in run.settings.items() if key not in ignored}


def _order(value: object) -> tuple[float, str]:
    if isinstance(value, int | float):
        return float(value), ""
    return 0.0, "" if value is None else str(value)


def read_studies(root: Path, expected: Sequence[tuple[str, str]] = ()) -> tuple[Study, ...]:
    """The studies below a folder; expected: (sweep, run) of runs that may never have started, in
    addition to those that launch/slurm.py recorded in a sweep.json."""
    root = root.resolve()
    # A job that fails at once, by a bad config for example, leaves only failed.json.
    files = {Path(folder): {*inner, *names} for folder, inner, names in os.walk(root)}
    runs = [read_run(each, root) for each in sorted(files) if files[each] & {CONFIG, FAILED_FILE}]
    there = {(run.study, run.name) for run in runs}
    submitted = [
        (_study(folder, root), name)
        for folder in sorted(files)
        if SUBMISSIONS_FILE in files[folder]
        for entry in read_submissions(folder)
        for name in entry["runs"]
    ]
    known = {study for study, _ in (*there, *submitted)}
    for sweep, name in expected:
        places = sorted(study for study in known if Path(study).name == sweep)
        submitted += [(study, name) for study in places or [sweep]]
    absent = (pair for pair in dict.fromkeys(submitted) if pair not in there)
    runs += [Run(*pair, ABSENT, {}, {}) for pair in absent]
    names = sorted({run.study for run in runs})
    studies = {name: Study(name, tuple(run for run in runs if run.study == name)) for name in names}
    return tuple(replace(each, tuned=_tuned(each, studies, root)) for each in studies.values())


def _tuned(study: Study, studies: Mapping[str, Study], root: Path) -> tuple[str, ...]:
    """The settings in which the runs of the study's search differ."""
    inside = "" if study.name == root.name else f"{study.name}/"
    search = studies.get(f"{inside}{TUNE}")
    keys = search.varying if search and search is not study else ()
    return tuple(key for key in keys if not key.startswith(("length.", "eval.")))


def _study(folder: Path, root: Path) -> str:
    inside = folder != root and folder.is_relative_to(root)
    return folder.relative_to(root).as_posix() if inside else folder.name


def read_run(folder: Path, root: Path) -> Run:
    study, name = _study(folder.parent, root), folder.name
    try:
        return replace(_read_run(folder, study, name), folder=folder)
    except DamagedError as error:
        note = str(error)
    except OSError as error:
        note = f"{error.filename}: {error.strerror}"
    return Run(study, name, DAMAGED, {}, {}, note=note, folder=folder)


def _read_run(folder: Path, study: str, name: str) -> Run:
    failed, result = read_failed(folder) or {}, read_result(folder) or {}
    steps = read_planned_steps(folder)
    log = tuple(failed.get("log") or ())
    try:
        config = read_config(folder)
    except (ConfigError, DamagedError) as error:
        if isinstance(error, DamagedError) and not failed:
            raise
        why = f"config.yaml: {error.problems[0]}" if isinstance(error, ConfigError) else error
        return Run(study, name, FAILED, {}, {}, note=failed.get("reason") or str(why), log=log)
    settings = settings_of(config)
    size = settings["batch.size"]
    lines, speeds = read_metrics(folder), read_speeds(folder)
    evaluations = tuple(
        Measured(line["split"], line["step"], line["step"] * size, line["recall@1"])
        for line in lines
        if line.get("split") is not None and line.get("recall@1") is not None
    )
    told = [line for line in lines if line.get("steps_without_pairs") is not None]
    without_pairs = tuple(
        Measured("train", line["step"], line["step"] * size, line["steps_without_pairs"])
        for line in told[:: -(-len(told) // MOST_POINTS) or 1]
    )
    state, note = FINISHED, ""
    last = max((line["step"] for line in lines), default=0)
    if result and steps and not is_of_length(result, steps):  # it is being trained longer
        result = {}
    if result:  # runs of earlier versions have no trained_steps
        result = {"trained_steps": max(last, result["step"]), **result}
        before = result.get("untrained")
        result["untrained_recall@1"] = before.get("recall@1") if isinstance(before, dict) else None
    else:
        state = FAILED if failed else UNFINISHED
        note = f"last seen at step {last:,}" + (f" of {steps:,}" if steps else "")
        note = f"{failed['reason']}; {note}" if failed else note
    return Run(
        study,
        name,
        state,
        settings,
        result,
        evaluations,
        median(speeds) if speeds else None,
        steps,
        note,
        log if state == FAILED else (),
        without_pairs=without_pairs,
    )
