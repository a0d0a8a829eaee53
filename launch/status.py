"""Where the runs of a sweep stand: read from their folders, and from Slurm's queue."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median

from dml.config import Config, load
from dml.errors import ConfigError
from dml.plan import Plan
from dml.run_folder.files import read_json, read_lines, try_lock
from dml.run_folder.folder import differences
from launch.job import job_of
from launch.outcome import FAILED, RESTARTS, RESULT, last_step
from launch.submission import LOGS, Queued
from launch.sweep import SweepError, SweepRun

AT_WORK = ".local"  # locked while a run is worked on here; the training has a lock of its own
# pending: not yet started; requeued: started before, and waiting to go on
PENDING, REQUEUED, RUNNING = "pending", "requeued", "running"
# stopped: cancelled, or its node was lost; the same command goes on with it
NEW, STOPPED, FAILURE, DONE = "new", "stopped", "failed", "finished"
OTHER = "other config"  # what is in its folder is not this run
UNKNOWN = "unknown"  # submitted, but there is no queue to ask
ACTIVE = (PENDING, REQUEUED, RUNNING)
RECENT = 10  # lines of timing to foretell from


@dataclass(frozen=True)
class Standing:
    """Of one run."""

    name: str
    state: str
    plan: Plan | None
    step: int = 0
    recall: float | None = None
    eta: timedelta | None = None
    note: str = ""
    log: Sequence[str] = ()


def standing(
    run: SweepRun, plan: Plan | None, queue: Mapping[str, Queued] | None, jobs: Mapping[str, str]
) -> Standing:
    """queue: None if it cannot be asked. jobs: run -> its last job."""
    folder, job = Path(job_of(run).folder), queue.get(run.name) if queue else None
    changed = changes(folder / "config.yaml", run.config)
    if changed:
        return Standing(run.name, OTHER, plan, note="; ".join(changed))
    result, failed = read_json(folder / RESULT), read_json(folder / FAILED)
    if result is not None:
        return Standing(run.name, DONE, plan, result["step"], result.get("recall@1"))
    step, recall, eta = progress(folder, plan)
    if job is not None and not (failed and job.state == "COMPLETING"):
        state = state_of(job)
        note = job.job if job.state == "RUNNING" else f"{job.job}: {job.state}, {job.reason}"
        return Standing(
            run.name, state, plan, step, recall, eta if state == RUNNING else None, note
        )
    if failed is not None:
        reason, log = failed["reason"], failed["log"]
        return Standing(run.name, FAILURE, plan, step, recall, None, reason, log)
    if at_work(folder):
        return Standing(run.name, RUNNING, plan, step, recall, eta, "here")
    if run.name in jobs and queue is None:
        return Standing(
            run.name, UNKNOWN, plan, step, recall, None, f"submitted as {jobs[run.name]}"
        )
    if run.name in jobs or folder.exists():
        return Standing(run.name, STOPPED, plan, step, recall, None, whereabouts(run, jobs))
    return Standing(run.name, NEW, plan)


def changes(path: Path, config: Config) -> list[str]:
    """Between a run's config.yaml, if there is one, and the config it should be of."""
    try:
        before = load(path) if path.exists() else config
    except ConfigError as error:
        return [f"{path} is not a config of this version ({error.problems[0]})"]
    return differences(before, config)


def whereabouts(run: SweepRun, jobs: Mapping[str, str]) -> str:
    """By a run that has stopped: what it noted, or where its log is."""
    noted = (read_json(Path(job_of(run).folder, RESTARTS)) or {}).get("note")
    if noted or run.name not in jobs:
        return noted or ""
    job = jobs[run.name]
    log = Path(run.config.run.dir, LOGS, f"{job}_0_log.out")
    return f"{job} has left the queue; {f'its log: {log}' if log.exists() else 'it has no log'}"


def state_of(job: Queued) -> str:
    if job.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD"):
        return REQUEUED if job.restarts else PENDING
    return RUNNING  # or about to, or about to end


def progress(folder: Path, plan: Plan | None) -> tuple[int, float | None, timedelta | None]:
    """The last step noted, the last Recall@1, and the time that is left."""
    lines = read_lines(folder / "metrics.jsonl")
    step = max([last_step(folder), *(line.get("step", 0) for line in lines)])
    scores = [line["recall@1"] for line in lines if "recall@1" in line]
    timing = read_lines(folder / "timing.jsonl")
    speeds = [line["images_per_second"] for line in timing if line.get("images_per_second")]
    eta = None
    if speeds and plan:
        left = (plan.steps - step) * plan.batch_size / median(speeds[-RECENT:])
        eta = timedelta(seconds=round(left))
    return step, scores[-1] if scores else None, eta


# ---- runs on this machine -------------------------------------------------------------------------


@contextmanager
def work_on(folder: Path) -> Iterator[int]:
    """Holds the run; the lock goes to the processes too, and lasts until the last one has ended."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / AT_WORK).open("w") as file:
        if not try_lock(file):
            raise SweepError(["another launcher is at work on it; wait for it"], folder)
        yield file.fileno()


def at_work(folder: Path) -> bool:
    try:
        with (folder / AT_WORK).open() as file:
            return not try_lock(file, shared=True)
    except FileNotFoundError:
        return False


# ---- for people -----------------------------------------------------------------------------------


def table(standings: Sequence[Standing]) -> str:
    head = ("run", "state", "batch", "processes", "images", "step", "Recall@1", "left", "")
    rows = [head, *(row(each) for each in standings)]
    widths = [max(len(line[i]) for line in rows) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if i in (0, 1, 8) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in rows
    ]
    for each in standings:
        if each.state == FAILURE:
            lines += ["", f"{each.name} failed: {each.note}", *(f"  | {x}" for x in each.log)]
    return "\n".join(lines)


def row(each: Standing) -> tuple[str, ...]:
    plan = each.plan
    return (
        each.name,
        each.state,
        f"{plan.batch_size:,}" if plan else "",
        f"{plan.processes:,}" if plan else "",
        f"{plan.images:,}" if plan else "",
        f"{each.step:,}/{plan.steps:,}" if plan else f"{each.step:,}",
        "" if each.recall is None else f"{each.recall:.2%}",
        "" if each.eta is None else f"~{each.eta}",
        "" if each.state == FAILURE else each.note,
    )


def summary(standings: Sequence[Standing]) -> str:
    states = (NEW, PENDING, REQUEUED, RUNNING, UNKNOWN, STOPPED, FAILURE, OTHER, DONE)
    counts = {state: sum(each.state == state for each in standings) for state in states}
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count)
