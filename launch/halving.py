"""Successive halving: which settings of a sweep's search go on, and which one is chosen.

On the first rung every setting is run for a part of its length; the best 1/factor of them go on to the
next rung, on which runs are `factor` times as long. The score of a setting is the best Recall@1 of the
held-out classes up to the length of the rung, as a mean over the seeds of the search; a setting that
diverges is out. The best of the last rung, or the only one that is left, is chosen.

Nothing is stored: what is known follows from the folders of the runs, so a search that was killed goes
on where it ended. A run goes on to the next rung as the same run, made longer. With a cosine schedule
that is not possible, because the learning rate of every step depends on the length: then every rung
has runs of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from dml.config import Length
from dml.run_folder.files import DamagedError
from dml.run_folder.folder import folder_of, is_of_length
from dml.train import DIVERGED
from launch.axes import as_text
from launch.run_files import read_failed, read_metrics, read_planned_steps, read_result
from launch.status import align, changed_settings
from launch.sweep import Setting, Sweep, SweepRun, plan_all
from launch.tune import Search


@dataclass(frozen=True)
class Trial:
    """A setting on a rung. runs: one per seed, of the rung's length. score: None if it is not known yet,
    or if a run diverged."""

    setting: Setting
    runs: tuple[SweepRun, ...]
    score: float | None
    diverged: bool

    @property
    def is_known(self) -> bool:
        return self.diverged or self.score is not None


@dataclass(frozen=True)
class Tuned:
    """Where the search at a point stands. point: its label. rungs: those that have begun, of which the
    last may have unknown scores. chosen: None until the search has ended, or if every setting diverged.
    """

    point: str
    rungs: tuple[tuple[Trial, ...], ...]
    chosen: Setting | None

    @property
    def has_failed(self) -> bool:
        return bool(self.rungs) and all(trial.diverged for trial in self.rungs[-1])

    @property
    def open_runs(self) -> tuple[SweepRun, ...]:
        """The runs of the last rung, as long as the search has not ended."""
        if self.chosen or self.has_failed:
            return ()
        return tuple(run for trial in self.rungs[-1] for run in trial.runs)


def lengths(search: Search, steps: int) -> tuple[tuple[int, ...], int]:
    """The steps of a run on every rung, and the steps between its evaluations. steps: its whole length.
    Several rungs round it down, so that every rung ends with an evaluation."""
    steps = max(1, round(steps * search.share))
    if search.rungs == 1:
        return (steps,), max(1, steps // search.evaluations)
    first = max(1, steps // search.factor ** (search.rungs - 1))
    every = max(1, first // search.evaluations)
    first -= first % every
    return tuple(first * search.factor**rung for rung in range(search.rungs)), every


def kept(search: Search, count: int) -> int:
    """How many of so many settings go on to the next rung."""
    return -(-count // search.factor)


def on_rung(run: SweepRun, search: Search, steps: int, rung: int) -> SweepRun:
    """A run of the search with the length that it has on a rung. steps: its whole length."""
    of_rungs, every = lengths(search, steps)
    anew = search.rungs > 1 and run.config.optim.schedule == "cosine"
    name = f"{run.point}-rung{rung + 1}-seed{run.seed}" if anew else run.name
    changes = {
        "run.name": as_text(name),
        "length.steps": as_text(of_rungs[rung]),
        "eval.every_steps": as_text(every),
    }
    keys = [text.partition("=")[0] for text in run.sets]
    rest = [
        text
        for key, text in zip(keys, run.sets, strict=True)
        if key not in changes and not key.startswith("length.")
    ]
    sets = (*rest, *(f"{key}={value}" for key, value in changes.items()))
    config = replace(
        run.config,
        run=replace(run.config.run, name=name),
        length=Length(steps=of_rungs[rung]),
        eval=replace(run.config.eval, every_steps=every),
    )
    return replace(run, name=name, sets=sets, config=config)


def score_of(run: SweepRun) -> tuple[float | None, bool]:
    """The best Recall@1 of the held-out classes up to the length of a run, None if it is not known; and
    whether the run diverged. It is known as well if the run has been made longer since."""
    folder, steps = folder_of(run.config), run.config.length.steps or 0
    try:
        if changed_settings(folder, run.config):
            return None, False
        result, planned = read_result(folder), read_planned_steps(folder) or 0
        if result and is_of_length(result, steps):
            return result.get("validation_recall@1"), False
        if planned > steps:
            found = [
                line["recall@1"]
                for line in read_metrics(folder)
                if line.get("split") == "validation" and line["step"] <= steps
            ]
            return max((x for x in found if x is not None), default=None), False
        failed = read_failed(folder)
    except (DamagedError, OSError):  # --status names it
        return None, False
    return None, bool(failed and failed.get("code") == DIVERGED)


def trial_of(setting: Setting, search: Search, steps: Mapping[str, int], rung: int) -> Trial:
    runs = tuple(on_rung(run, search, steps[run.name], rung) for run in setting.tried)
    scores = [score_of(run) for run in runs]
    diverged = any(failed for _, failed in scores)
    known = [score for score, _ in scores if score is not None]
    return Trial(setting, runs, mean(known) if len(known) == len(runs) else None, diverged)


def tuned(
    point: str, settings: Sequence[Setting], search: Search, steps: Mapping[str, int]
) -> Tuned:
    """Where the search at a point stands. steps: run -> its whole length."""
    rungs: list[tuple[Trial, ...]] = []
    for rung in range(search.rungs):
        if len(settings) == 1:
            break
        trials = tuple(trial_of(setting, search, steps, rung) for setting in settings)
        rungs.append(trials)
        if not all(trial.is_known for trial in trials) or all(trial.diverged for trial in trials):
            return Tuned(point, tuple(rungs), None)
        sound = [trial for trial in trials if not trial.diverged]
        best = sorted(
            sound, key=lambda trial: -(trial.score or 0)
        )  # of equals the first in the file
        last = rung == search.rungs - 1
        settings = [trial.setting for trial in best[: 1 if last else kept(search, len(trials))]]
    return Tuned(point, tuple(rungs), settings[0])


def whole_lengths(sweep: Sweep) -> dict[str, int]:
    """The steps of every run of the search at its whole length; SweepError lists the problems of the
    plans, also of those on the test classes."""
    tried = [run for found in sweep.settings.values() for each in found for run in each.tried]
    final = [run for found in sweep.settings.values() for each in found for run in each.final]
    plans = plan_all(replace(sweep, runs=(*tried, *final)))
    return {run.name: plan.steps for run, plan in zip(tried, plans, strict=False)}


def searches(sweep: Sweep) -> tuple[Tuned, ...]:
    """Where the search stands at every point that the sweep has runs of."""
    if sweep.search is None:
        return ()
    steps = whole_lengths(sweep)
    points = dict.fromkeys(run.point for run in sweep.runs)
    return tuple(tuned(point, sweep.settings[point], sweep.search, steps) for point in points)


def stages(sweep: Sweep) -> tuple[Sweep, ...]:
    """What can be run now: the sweep itself, or with a search its open rungs, and the runs of the chosen
    settings on the test classes."""
    if sweep.search is None:
        return (sweep,)
    found, wanted = searches(sweep), {run.name for run in sweep.runs}
    trials = tuple(run for each in found for run in each.open_runs)
    final = [run for each in found if each.chosen for run in each.chosen.final]
    chosen = tuple(run for run in final if run.name in wanted)
    parts = {f"{sweep.name}-tune": trials, sweep.name: chosen}
    return tuple(Sweep(name, runs, sweep.path) for name, runs in parts.items() if runs)


def search_rows(sweep: Sweep, found: Sequence[Tuned]) -> list[tuple[str, ...]]:
    """The state of the search in a table, with its header: a line per point."""
    rungs = sweep.search.rungs if sweep.search else 0
    rows: list[tuple[str, ...]] = [("point", "settings", "rung", "known", "best so far", "chosen")]
    for each in found:
        last = each.rungs[-1] if each.rungs else ()
        scored = [trial for rung in each.rungs[-1:] for trial in rung if trial.score is not None]
        best = max(scored, key=lambda trial: trial.score or 0, default=None)
        chosen = each.chosen.label if each.chosen else "every setting diverged" * each.has_failed
        rows.append(
            (
                each.point or sweep.name,
                str(len(sweep.settings[each.point])),
                f"{len(each.rungs)} of {rungs}",
                f"{sum(trial.is_known for trial in last)} of {len(last)}",
                f"{best.setting.label} {best.score:.2%}" if best else "",
                chosen,
            )
        )
    return rows


def search_table(sweep: Sweep, found: Sequence[Tuned]) -> str:
    return align(search_rows(sweep, found), left=(0, 4, 5))
