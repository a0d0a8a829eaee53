"""What to expect of the runs of a sweep before they are started: the paper's score, and the hours.

Hours are images / (images per second), for training alone. The speed is the one that the run itself
has measured (timing.jsonl), or else `images_per_second` of the sweep, which is an assumption.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dml.plan import Plan
from dml.run_folder.files import DamagedError
from dml.run_folder.folder import folder_of
from launch.paper import paper_score, read_tables, tables_for
from launch.records import ABSENT, Run, Study, settings_of
from launch.status import DONE, RunStatus, measured_speed
from launch.sweep import Sweep, SweepRun

MEASURED, ASSUMED = "measured", "assumed"


@dataclass(frozen=True)
class Estimate:
    """hours: to train the whole run; hours_left: from its last step. None: no speed is known."""

    hours: float | None
    hours_left: float | None
    source: str
    gpus: int

    def __str__(self) -> str:
        return "" if self.hours is None else f"{format_hours(self.hours)} {self.source}"


def estimate(run: SweepRun, plan: Plan, status: RunStatus) -> Estimate:
    gpus = run.resources.nodes * run.resources.gpus_per_node
    speed, source = speed_of(run)
    if speed is None:
        return Estimate(None, None, "", gpus)
    hours = plan.images / speed / 3600
    share_left = 0 if status.state == DONE else 1 - status.step / plan.steps
    return Estimate(hours, share_left * hours, source, gpus)


def speed_of(run: SweepRun) -> tuple[float | None, str]:
    """Images per second of all processes together, and how it is known; None if it is not."""
    try:
        speed = measured_speed(folder_of(run.config))
    except DamagedError:  # --status names a file that it needs; here the assumed speed will do
        speed = None
    if speed is not None:
        return speed, MEASURED
    assumed = run.resources.images_per_second
    return (None, "") if assumed is None else (assumed * run.resources.processes, ASSUMED)


def total_hours(estimates: Sequence[Estimate]) -> str:
    """A line with the sum over the runs, in GPU hours where they use GPUs."""
    known = [each for each in estimates if each.hours is not None]
    if not known:
        return "hours unknown: set images_per_second in the sweep's slurm section, or --images-per-second"
    sums = []
    for unit, members in (
        ("GPU hours", [each for each in known if each.gpus]),
        ("hours", [each for each in known if not each.gpus]),
    ):
        if members:
            hours = sum((each.hours or 0) * (each.gpus or 1) for each in members)
            left = sum((each.hours_left or 0) * (each.gpus or 1) for each in members)
            done = "" if left == hours else f" ({format_hours(left)} left)"
            sums.append(f"{format_hours(hours)} {unit}{done}")
    sources = [
        f"{count} {source}"
        for source in (MEASURED, ASSUMED)
        if (count := sum(each.source == source for each in known))
    ]
    sources += [f"{len(estimates) - len(known)} unknown"] * (len(known) < len(estimates))
    return (
        f"estimate: {' and '.join(sums)} of training (speeds: {', '.join(sources)}), without "
        "evaluations"
    )


def paper_scores(sweep: Sweep) -> dict[str, str]:
    """Run -> the paper's Recall@1 in percent, where it has one for this dataset and these settings."""
    runs = [Run(sweep.name, run.name, ABSENT, settings_of(run.config), {}) for run in sweep.runs]
    tables = tables_for(Study(sweep.name, tuple(runs)), read_tables())
    scores = {run.name: paper_score(run.settings, tables) for run in runs}
    return {
        name: "" if score is None else f"{score.recall:.{score.table.digits}f}"
        for name, score in scores.items()
    }


def format_hours(hours: float) -> str:
    return f"{hours:.2f}" if hours < 10 else f"{hours:,.1f}"
