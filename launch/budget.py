"""What a search takes before it is started: runs, steps, images and hours of every rung and point."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launch.estimate import MEASURED, format_hours, speed_of
from launch.halving import Tuned, kept, lengths, whole_lengths
from launch.status import align
from launch.sweep import Sweep, SweepRun


@dataclass(frozen=True)
class Part:
    """Runs of one rung, or those on the test classes. low, high: the steps of a run, which may differ
    between settings. steps, images: of all runs together, at most."""

    runs: int
    low: int
    high: int
    steps: int
    images: int

    def __str__(self) -> str:
        steps = f"{self.low:,}" if self.low == self.high else f"{self.low:,} to {self.high:,}"
        return f"{self.runs} x {steps}" if self.runs else ""


@dataclass(frozen=True)
class Budget:
    """What the search and the runs on the test classes take at a point, from the start. speed: images per
    second, and how it is known."""

    point: str
    settings: int
    parts: tuple[Part, ...]
    speed: tuple[float | None, str]

    @property
    def runs(self) -> int:
        return self.parts[0].runs + self.parts[-1].runs

    @property
    def steps(self) -> int:
        return sum(part.steps for part in self.parts)

    @property
    def images(self) -> int:
        return sum(part.images for part in self.parts)

    @property
    def hours(self) -> float | None:
        return self.images / self.speed[0] / 3600 if self.speed[0] else None

    def cells(self) -> tuple[str, ...]:
        hours = "" if self.hours is None else f"{format_hours(self.hours)} {self.speed[1]}"
        amounts = f"{self.steps:,}", f"{self.images:,}", hours
        return (self.point, str(self.settings), *map(str, self.parts), *amounts)


def budget(sweep: Sweep, each: Tuned, whole: Mapping[str, int]) -> Budget:
    """whole: run of the search -> its whole length."""
    search, settings = sweep.search, sweep.settings[each.point]
    assert search is not None
    first = [setting.tried[0] for setting in settings]
    sizes = [run.config.batch.classes * run.config.batch.per_class for run in first]
    of_rungs = [lengths(search, whole[run.name])[0] for run in first]
    anew = [run.config.optim.schedule == "cosine" for run in first]
    count, parts = len(settings), list[Part]()
    for rung in range(search.rungs):
        steps = [length[rung] for length in of_rungs]
        before = [
            0 if rung == 0 or each_anew else length[rung - 1]
            for length, each_anew in zip(of_rungs, anew, strict=True)
        ]
        added = [now - then for now, then in zip(steps, before, strict=True)]
        # a single setting is chosen without a run
        parts.append(_part(count * (count > 1), len(search.seeds), steps, added, sizes))
        count = kept(search, count)
    wanted = {run.name for run in sweep.runs}
    final = [run for run in settings[0].final if run.name in wanted]
    lasting = [whole[run.name] for run in first]
    parts.append(_part(1, len(final), lasting, lasting, sizes))
    begun = [run for rung in each.rungs for trial in rung for run in trial.runs]
    point, speed = each.point or sweep.name, _speed([*begun, *final])
    return Budget(point, len(settings), tuple(parts), speed)


def _part(
    count: int, seeds: int, steps: Sequence[int], added: Sequence[int], sizes: Sequence[int]
) -> Part:
    """count: of settings that are not known yet, so the largest are counted. added: the steps that a run
    of each setting makes here."""
    images = [each * size for each, size in zip(added, sizes, strict=True)]
    total_steps, total_images = (seeds * sum(sorted(x)[len(x) - count :]) for x in (added, images))
    return Part(count * seeds, min(steps), max(steps), total_steps, total_images)


def _speed(runs: Sequence[SweepRun]) -> tuple[float | None, str]:
    found = [speed_of(run) for run in runs]
    return next((speed for speed in found if speed[1] == MEASURED), found[-1])


def budget_table(sweep: Sweep, found: Sequence[Tuned]) -> str:
    whole = whole_lengths(sweep)
    budgets = [budget(sweep, each, whole) for each in found]
    rungs = [f"rung {rung + 1}" for rung in range(len(budgets[0].parts) - 1)]
    header = ("point", "settings", *rungs, "test", "steps", "images", "hours")
    hours = [each.hours for each in budgets if each.hours is not None]
    time = f", {format_hours(sum(hours))} hours of training" if len(hours) == len(budgets) else ""
    runs, steps, images = (
        sum(getattr(each, key) for each in budgets) for key in ("runs", "steps", "images")
    )
    text = f"budget: {runs:,} runs, {steps:,} steps, {images:,} images{time}, without evaluations"
    tried = sorted({each.settings for each in budgets})
    if len(tried) > 1:
        text += f"\nthe budgets are not the same: {tried[0]} to {tried[-1]} settings per point"
    return f"{align([header, *(each.cells() for each in budgets)], left=(0,))}\n\n{text}"
