"""What runs left behind, read back: their state, their scores, and which differ in nothing but the
seed. No torch: a report can be made on a login node."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean, median
from typing import Any

from dml.config import EXECUTION, flatten, load
from dml.errors import ConfigError
from dml.run_folder.files import read_lines

FINISHED, FAILED, UNFINISHED, ABSENT = "finished", "failed", "unfinished", "never started"

# What a report ignores: how a run is carried out, its name and seed, and how often it is looked at.
# batch.size stands for batch.classes. With held-out classes eval.every_steps counts: it decides which
# steps there are to choose from.
IGNORED = EXECUTION | {
    *("run.name", "run.seed", "run.log_steps", "batch.classes"),
    *("eval.ks", "eval.every_steps", "eval.untrained"),
}


@dataclass(frozen=True)
class Seen:
    """An evaluation on the way."""

    split: str
    step: int
    images: int
    recall: float


@dataclass(frozen=True)
class Run:
    """settings: section.key -> value. planned: the steps it may take. note: why there is no result,
    and log: the last lines of it."""

    study: str
    name: str
    state: str
    settings: Mapping[str, Any]
    result: Mapping[str, Any]
    seen: tuple[Seen, ...] = ()
    images_per_second: float | None = None
    planned: int | None = None
    note: str = ""
    log: tuple[str, ...] = ()

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
    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but the seed. lost: those of its label that left no config."""

    runs: tuple[Run, ...]
    lost: tuple[Run, ...] = ()

    @property
    def label(self) -> str:
        return ", ".join(dict.fromkeys(run.label for run in self.runs))

    @property
    def settings(self) -> Mapping[str, Any]:
        """Those that all its runs share."""
        return _learned(self.runs[0])

    @property
    def seeds(self) -> int:
        return len({run.seed for run in self.runs}) + len(self.lost)

    @cached_property
    def finished(self) -> tuple[Run, ...]:
        """One a seed: the first."""
        done = [run for run in self.runs if run.state == FINISHED]
        return tuple({run.seed: run for run in reversed(done)}.values())[::-1]

    @property
    def again(self) -> tuple[Run, ...]:
        """Finished runs of a seed that another one stands for."""
        done = (run for run in self.runs if run.state == FINISHED)
        return tuple(run for run in done if run not in self.finished)

    def spread(self, key: str) -> Spread | None:
        """Over the finished seeds."""
        found = [x for run in self.finished if (x := run.number(key)) is not None]
        return Spread(mean(found), min(found), max(found), len(found)) if found else None


@dataclass(frozen=True)
class Study:
    """The runs of one folder, by its path below the root."""

    name: str
    runs: tuple[Run, ...]

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Of the runs that started, ordered by the columns; batch sizes, the first, vary fastest."""
        found: dict[str, list[Run]] = {}
        for run in self.runs:
            if run.settings:
                found.setdefault(json.dumps(_learned(run), sort_keys=True), []).append(run)

        def order(group: Group) -> list[tuple[float, str]]:
            return [_order(group.settings.get(key)) for key in reversed(self.columns)]

        lost = [run for run in self.runs if not run.settings]
        groups = []
        for runs in found.values():
            labels = {run.label for run in runs}
            groups.append(Group(tuple(runs), tuple(run for run in lost if run.label in labels)))
        return tuple(sorted(groups, key=order))

    @cached_property
    def varying(self) -> tuple[str, ...]:
        """The settings in which the groups differ."""
        keys = dict.fromkeys(key for learned in self._learned for key in learned)
        return tuple(k for k in keys if len({json.dumps(s.get(k)) for s in self._learned}) > 1)

    @cached_property
    def _learned(self) -> list[dict[str, Any]]:
        return [_learned(run) for run in self.runs if run.settings]

    @property
    def datasets(self) -> set[str]:
        return {group.settings["data.dataset"] for group in self.groups}

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Those of them that tell the groups apart: not one that follows from those before it."""
        kept: list[str] = []
        told = 1
        for key in self.varying:
            tried = [*kept, key]
            apart = {json.dumps([s.get(k) for k in tried]) for s in self._learned}
            if len(apart) > told:
                kept, told = tried, len(apart)
        return tuple(kept)

    def without_result(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.state != FINISHED)


def _learned(run: Run) -> dict[str, Any]:
    ignored = IGNORED - ({"eval.every_steps"} if run.settings["eval.validation_classes"] else set())
    return {key: value for key, value in run.settings.items() if key not in ignored}


def _order(value: object) -> tuple[float, str]:
    if isinstance(value, int | float):
        return float(value), ""
    return 0.0, "" if value is None else str(value)


def read_studies(root: Path, expected: Sequence[tuple[str, str]] = ()) -> tuple[Study, ...]:
    """Every run under a folder, by the folder it stands in; expected: (sweep, run), besides those
    that a sweep.json of launch/slurm.py names."""
    root = root.resolve()
    # a job that failed at once, for a bad config say, leaves nothing but failed.json
    files = [path for name in ("config.yaml", "failed.json") for path in root.rglob(name)]
    runs = [read_run(folder, root) for folder in sorted({path.parent for path in files})]
    there = {(run.study, run.name) for run in runs}
    submitted = [
        (_study(book.parent, root), name)
        for book in sorted(root.rglob("sweep.json"))
        for entry in _object(book).get("submissions", ())
        for name in entry["runs"]
    ]
    known = {study for study, _ in (*there, *submitted)}
    for sweep, name in expected:
        places = sorted(study for study in known if Path(study).name == sweep)
        submitted += [(study, name) for study in places or [sweep]]
    absent = (pair for pair in dict.fromkeys(submitted) if pair not in there)
    runs += [Run(*pair, ABSENT, {}, {}) for pair in absent]
    names = sorted({run.study for run in runs})
    return tuple(Study(name, tuple(run for run in runs if run.study == name)) for name in names)


def _study(folder: Path, root: Path) -> str:
    inside = folder != root and folder.is_relative_to(root)
    return folder.relative_to(root).as_posix() if inside else folder.name


def read_run(folder: Path, root: Path) -> Run:
    study, name = _study(folder.parent, root), folder.name
    failed = _object(folder / "failed.json")
    log = tuple(map(str, failed.get("log", ())))
    try:
        config = load(folder / "config.yaml")
    except ConfigError as error:
        note = failed.get("reason") or f"config.yaml: {error.problems[0]}"
        return Run(study, name, FAILED, {}, {}, note=note, log=log)
    settings = flatten(config)
    size = config.batch.classes * config.batch.per_class
    settings = {"batch.size": size, **settings}
    lines = _with_step(folder / "metrics.jsonl")
    timing = _with_step(folder / "timing.jsonl")
    speeds = [line["images_per_second"] for line in timing if "images_per_second" in line]
    seen = tuple(
        Seen(line["split"], line["step"], line["step"] * size, line["recall@1"])
        for line in lines
        if "split" in line and "recall@1" in line
    )
    result = _object(folder / "result.json")
    state, note = FINISHED, ""
    steps = _object(folder / "plan.json").get("steps")
    last = max((line["step"] for line in lines), default=0)
    if result:  # those of before this key lack it
        result = {"trained_steps": max(last, result.get("step", 0)), **result}
    else:
        state = FAILED if failed else UNFINISHED
        note = f"last seen at step {last:,}" + (f" of {steps:,}" if steps else "")
        note = f"{failed['reason']}; {note}" if failed.get("reason") else note
    return Run(
        study,
        name,
        state,
        settings,
        result,
        seen,
        median(speeds) if speeds else None,
        steps,
        note,
        log if state == FAILED else (),
    )


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _with_step(path: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(path) if "step" in line]
