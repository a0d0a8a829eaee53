"""What a search takes before it is started: runs, steps, images and hours of every rung and point."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launch.estimate import MEASURED, format_hours, speed_of
from launch.halving import Tuned, kept, lengths, whole_lengths
from launch.status import align
from launch.sweep import Sweep, SweepRun


@dataclass(frozen=True)
class Budget:
    """What the search and the runs on the test classes take at a point, from the start; of settings that
    differ in length or batch, the largest. rungs and test: the number of runs, and the steps of each.
    speed: images per second, and how it is known."""

    point: str
    settings: int
    rungs: tuple[tuple[int, int], ...]
    test: tuple[int, int]
    steps: int
    batch_size: int
    speed: tuple[float | None, str]

    @property
    def runs(self) -> int:
        return self.rungs[0][0] + self.test[0]

    @property
    def images(self) -> int:
        return self.steps * self.batch_size

    @property
    def hours(self) -> float | None:
        return self.images / self.speed[0] / 3600 if self.speed[0] else None

    def cells(self) -> tuple[str, ...]:
        rungs = [f"{runs} x {steps:,}" if runs else "" for runs, steps in (*self.rungs, self.test)]
        hours = "" if self.hours is None else f"{format_hours(self.hours)} {self.speed[1]}"
        amounts = f"{self.steps:,}", f"{self.images:,}", hours
        return (self.point, str(self.settings), *rungs, *amounts)


def budget(sweep: Sweep, each: Tuned, whole: Mapping[str, int]) -> Budget:
    search, settings = sweep.search, sweep.settings[each.point]
    assert search is not None
    tried = [run for setting in settings for run in setting.tried]
    wanted = {run.name for run in sweep.runs}
    final = [run for run in settings[0].final if run.name in wanted]
    whole_length = max(whole[run.name] for run in tried)
    anew = any(run.config.optim.schedule == "cosine" for run in tried)
    count, before, rungs = len(settings), 0, list[tuple[int, int]]()
    total = len(final) * whole_length
    for steps in lengths(search, whole_length)[0]:
        runs = count * len(search.seeds) if count > 1 else 0
        rungs.append((runs, steps))
        total += runs * (steps - before)
        before, count = 0 if anew else steps, kept(search, count)
    size = max(run.config.batch.classes * run.config.batch.per_class for run in tried)
    begun = [run for rung in each.rungs for trial in rung for run in trial.runs]
    point, test = each.point or sweep.name, (len(final), whole_length)
    return Budget(point, len(settings), tuple(rungs), test, total, size, _speed([*begun, *final]))


def _speed(runs: Sequence[SweepRun]) -> tuple[float | None, str]:
    found = [speed_of(run) for run in runs]
    return next((speed for speed in found if speed[1] == MEASURED), found[-1])


def budget_table(sweep: Sweep, found: Sequence[Tuned]) -> str:
    whole = whole_lengths(sweep)
    budgets = [budget(sweep, each, whole) for each in found]
    rungs = [f"rung {rung + 1}" for rung in range(len(budgets[0].rungs))]
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
