"""What runs left behind, read back: their state, their scores, and which differ in nothing but the
seed. No torch: a report can be made on a login node."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean, median
from typing import Any

from dml.config import ConfigError, load, to_dict

FINISHED, FAILED, UNFINISHED, ABSENT = "finished", "failed", "unfinished", "never started"

# How a run is carried out and looked at; what is learned does not depend on it. batch.size stands for
# batch.classes.
IGNORED = {
    *("run.name", "run.dir", "run.seed", "run.log_steps", "save.every_minutes", "batch.classes"),
    *("data.shards", "data.workers", "data.prefetch", "engine.tile", "engine.micro_batch"),
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
    """settings: section.key -> value. note: why there is no result, and log: the last lines of it."""

    study: str
    name: str
    state: str
    settings: Mapping[str, Any]
    result: Mapping[str, Any]
    seen: tuple[Seen, ...] = ()
    images_per_second: float | None = None
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
    """Runs that differ in nothing but the seed."""

    runs: tuple[Run, ...]

    @property
    def label(self) -> str:
        return ", ".join(dict.fromkeys(run.label for run in self.runs))

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.runs[0].settings

    def spread(self, key: str) -> Spread | None:
        """Over the finished runs."""
        finished = [run for run in self.runs if run.state == FINISHED]
        found = [x for run in finished if (x := run.number(key)) is not None]
        return Spread(mean(found), min(found), max(found), len(found)) if found else None


@dataclass(frozen=True)
class Study:
    """The runs of one folder."""

    name: str
    runs: tuple[Run, ...]

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Of the runs that started, ordered by what varies; batch sizes, the first, vary fastest."""
        found: dict[str, list[Run]] = {}
        for run in self.runs:
            if run.settings:
                found.setdefault(json.dumps(_learned(run), sort_keys=True), []).append(run)

        def order(group: Group) -> list[tuple[float, str]]:
            return [_order(group.settings.get(key)) for key in reversed(self.varying)]

        return tuple(sorted((Group(tuple(runs)) for runs in found.values()), key=order))

    @cached_property
    def varying(self) -> tuple[str, ...]:
        """The settings in which the groups differ."""
        settings = [_learned(run) for run in self.runs if run.settings]
        keys = dict.fromkeys(key for learned in settings for key in learned)
        return tuple(k for k in keys if len({json.dumps(s.get(k)) for s in settings}) > 1)

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
            apart = {json.dumps([g.settings.get(k) for k in tried]) for g in self.groups}
            if len(apart) > told:
                kept, told = tried, len(apart)
        return tuple(kept)

    def without_result(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.state != FINISHED)


def _learned(run: Run) -> dict[str, Any]:
    return {key: value for key, value in run.settings.items() if key not in IGNORED}


def _order(value: object) -> tuple[float, str]:
    if isinstance(value, int | float):
        return float(value), ""
    return 0.0, "" if value is None else str(value)


def read_studies(root: Path, expected: Sequence[tuple[str, str]] = ()) -> tuple[Study, ...]:
    """Every run under a folder, by the folder it stands in; expected: (study, run) of a sweep."""
    # a job that failed at once, for a bad config say, leaves nothing but failed.json
    files = [path for name in ("config.yaml", "failed.json") for path in root.rglob(name)]
    runs = [read_run(folder) for folder in sorted({path.parent for path in files})]
    there = {(run.study, run.name) for run in runs}
    runs += [Run(*pair, ABSENT, {}, {}) for pair in expected if pair not in there]
    names = sorted({run.study for run in runs})
    return tuple(Study(name, tuple(run for run in runs if run.study == name)) for name in names)


def read_run(folder: Path) -> Run:
    folder = folder.resolve()
    study, name = folder.parent.name, folder.name
    failed = _object(folder / "failed.json")
    log = tuple(map(str, failed.get("log", ())))
    try:
        config = load(folder / "config.yaml")
    except ConfigError as error:
        note = failed.get("reason") or f"config.yaml: {error.problems[0]}"
        return Run(study, name, FAILED, {}, {}, note=note, log=log)
    settings = {f"{s}.{k}": v for s, values in to_dict(config).items() for k, v in values.items()}
    size = config.batch.classes * config.batch.per_class
    settings = {"batch.size": size, **settings}
    lines = list(_lines(folder / "metrics.jsonl"))
    timing = _lines(folder / "timing.jsonl")
    speeds = [line["images_per_second"] for line in timing if "images_per_second" in line]
    seen = tuple(
        Seen(line["split"], line["step"], line["step"] * size, line["recall@1"])
        for line in lines
        if "split" in line and "recall@1" in line
    )
    result = _object(folder / "result.json")
    state, note = FINISHED, ""
    if not result:
        steps = _object(folder / "plan.json").get("steps")
        last = max((line["step"] for line in lines), default=0)
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
        note,
        log if state == FAILED else (),
    )


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            content = json.loads(line)
        except ValueError:  # a run that was killed may leave half a line
            continue
        if isinstance(content, dict) and "step" in content:
            yield content
