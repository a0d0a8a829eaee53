"""The state of the runs of a sweep, read from their folders and from Slurm's queue."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from dml.config import Config
from dml.errors import ConfigError
from dml.plan import Plan
from dml.run_folder.files import DamagedError
from dml.run_folder.folder import PATIENCE, differences, folder_of, is_of_length
from launch.outcome import last_checkpoint_step
from launch.run_files import (
    CONFIG,
    read_config,
    read_failed,
    read_metrics,
    read_planned_steps,
    read_restarts,
    read_result,
    read_speeds,
)
from launch.submission import LOGS, QueuedJob
from launch.sweep import SweepError, SweepRun
from shards.files import is_locked, open_lock, try_lock

LOCAL_LOCK = ".local"  # held while this machine works on a run; the training has a lock of its own
# pending: never started; requeued: waits to be resumed
PENDING, REQUEUED, RUNNING = "pending", "requeued", "running"
# stopped: cancelled, or its node was lost; submitting the sweep again resumes it
NEW, STOPPED, FAILURE, DONE = "new", "stopped", "failed", "finished"
OTHER = "other config"  # its folder holds a run of another config
DAMAGED = "damaged"  # a file in its folder cannot be used
UNKNOWN = "unknown"  # submitted, but the queue cannot be read
ACTIVE = (PENDING, REQUEUED, RUNNING)
RECENT_LINES = 10  # of timing.jsonl, for the speed
LONGEST_SECONDS = 10**9  # of the time that is left: 30 years


@dataclass(frozen=True)
class RunStatus:
    name: str
    state: str
    plan: Plan | None
    step: int = 0
    recall: float | None = None
    left: timedelta | None = None
    note: str = ""
    log: Sequence[str] = ()


def status_of(
    run: SweepRun,
    plan: Plan | None,
    queue: Mapping[str, QueuedJob] | None,
    jobs: Mapping[str, str],
) -> RunStatus:
    """queue: None if it cannot be read. jobs: run -> its last job."""
    try:
        return _status_of(run, plan, queue, jobs)
    except DamagedError as error:
        note = str(error)
    except OSError as error:
        note = f"{error.filename}: {error.strerror}"
    return RunStatus(run.name, DAMAGED, plan, note=note)


def _status_of(
    run: SweepRun,
    plan: Plan | None,
    queue: Mapping[str, QueuedJob] | None,
    jobs: Mapping[str, str],
) -> RunStatus:
    folder, job = folder_of(run.config), queue.get(run.name) if queue else None
    changed = changed_settings(folder, run.config)
    if changed:
        return RunStatus(run.name, OTHER, plan, note="; ".join(changed))
    result, failed = read_result(folder), read_failed(folder)
    if result is not None and is_complete(result, run.config, plan):
        recall = result.get("recall@1", result.get("validation_recall@1"))
        return RunStatus(run.name, DONE, plan, result["step"], recall)
    step, recall, left = progress(folder, plan)
    if job is not None and not (failed and job.state == "COMPLETING"):
        state = state_of(job)
        note = job.job if job.state == "RUNNING" else f"{job.job}: {job.state}, {job.reason}"
        left = left if state == RUNNING else None
        return RunStatus(run.name, state, plan, step, recall, left, note)
    if failed is not None:
        reason, log = failed["reason"], failed.get("log") or ()
        return RunStatus(run.name, FAILURE, plan, step, recall, None, reason, log)
    if is_running_here(folder):
        return RunStatus(run.name, RUNNING, plan, step, recall, left, "here")
    if run.name in jobs and queue is None:
        note = f"submitted as {jobs[run.name]}"
        return RunStatus(run.name, UNKNOWN, plan, step, recall, None, note)
    if run.name in jobs or folder.exists():
        return RunStatus(run.name, STOPPED, plan, step, recall, None, why_stopped(run, jobs))
    return RunStatus(run.name, NEW, plan)


def is_complete(result: Mapping[str, Any], config: Config, plan: Plan | None) -> bool:
    """Whether a result is of the length that the run is to have. If the length is as before, the plan
    of the training decides: the one made here may not know the shards."""
    folder, steps = folder_of(config), plan.steps if plan else None
    if not (folder / CONFIG).exists() or read_config(folder).length == config.length:
        try:
            steps = read_planned_steps(folder)
        except DamagedError:  # the result counts; the next start writes another plan
            return True
    return steps is None or is_of_length(result, steps)


def changed_settings(folder: Path, config: Config) -> list[str]:
    """The differences between a run's config.yaml, if there is one, and the config it should have."""
    path = folder / CONFIG
    try:
        before = read_config(folder) if os.path.lexists(path) else config
    except ConfigError as error:
        return [f"{path} is not a config of this version ({error.problems[0]})"]
    return differences(before, config)


def why_stopped(run: SweepRun, jobs: Mapping[str, str]) -> str:
    """The note that a stopped run left, or the path of its log."""
    note = read_restarts(folder_of(run.config)).get("note")
    if note or run.name not in jobs:
        return note or ""
    job = jobs[run.name]
    log = Path(run.config.run.dir, LOGS, f"{job}_0_log.out")
    return f"{job} has left the queue; {f'its log: {log}' if log.exists() else 'it has no log'}"


def state_of(job: QueuedJob) -> str:
    if job.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD"):
        return REQUEUED if job.restarts else PENDING
    return RUNNING  # or starting, or ending


def progress(folder: Path, plan: Plan | None) -> tuple[int, float | None, timedelta | None]:
    """The last step, the last Recall@1, and the time that is left."""
    lines = read_metrics(folder)
    step = max([last_checkpoint_step(folder), *(line["step"] for line in lines)])
    recalls = [line["recall@1"] for line in lines if line.get("recall@1") is not None]
    speed, left = measured_speed(folder), None
    if speed and plan:
        seconds = (plan.steps - step) * plan.batch_size / speed
        left = timedelta(seconds=round(min(max(seconds, 0), LONGEST_SECONDS)))
    return step, recalls[-1] if recalls else None, left


def measured_speed(folder: Path) -> float | None:
    """Images per second of all processes of a run together: the median of the last lines."""
    speeds = read_speeds(folder)[-RECENT_LINES:]
    return median(speeds) if speeds else None


# ---- runs on this machine -------------------------------------------------------------------------


@contextmanager
def hold_run(folder: Path) -> Iterator[int]:
    """Lock a run. Its processes inherit the lock, so it lasts until the last of them has ended."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        file = open_lock(folder / LOCAL_LOCK)
    except OSError as error:
        problem = f"{error.filename} cannot be locked: {error.strerror}; remove it"
        raise SweepError([problem], folder) from None
    with file:
        if not try_lock(file, patience=PATIENCE):  # of processes that were killed a moment ago
            raise SweepError(["another launcher is working on this run; wait for it"], folder)
        yield file.fileno()


def is_running_here(folder: Path) -> bool:
    return is_locked(folder / LOCAL_LOCK)


def wait_for_leaving(runs: Sequence[SweepRun]) -> None:
    """Processes whose launcher was killed save and leave within seconds. Until then their runs look as if
    another launcher worked on them."""
    deadline = time.monotonic() + PATIENCE
    folders = [folder_of(run.config) for run in runs]
    while any(map(seems_running, folders)) and time.monotonic() < deadline:
        time.sleep(0.1)


def seems_running(folder: Path) -> bool:
    try:
        return is_running_here(folder)
    except OSError:  # `status_of` says what is wrong with its lock
        return False


# ---- text -----------------------------------------------------------------------------------------


def status_table(
    statuses: Sequence[RunStatus], columns: Mapping[str, Sequence[str]] | None = None
) -> str:
    """A line per run, then the log of every run that failed. columns: more of them, before the note."""
    columns = columns or {}
    header = ("run", "state", "batch", "processes", "images", "step", "Recall@1", "left", *columns)
    rows = [
        (*_cells(each), *(values[i] for values in columns.values()), _note(each))
        for i, each in enumerate(statuses)
    ]
    lines = [align([(*header, ""), *rows], left=(0, 1, len(header)))]
    for each in statuses:
        if each.state == FAILURE:
            lines += ["", f"{each.name} failed: {each.note}", *(f"  | {x}" for x in each.log)]
    return "\n".join(lines)


def align(rows: Sequence[Sequence[str]], left: Sequence[int]) -> str:
    """The rows as text in columns; left: the columns that are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _cells(each: RunStatus) -> tuple[str, ...]:
    plan = each.plan
    return (
        each.name,
        each.state,
        f"{plan.batch_size:,}" if plan else "",
        f"{plan.processes:,}" if plan else "",
        f"{plan.images:,}" if plan else "",
        f"{each.step:,}/{plan.steps:,}" if plan else f"{each.step:,}",
        "" if each.recall is None else f"{each.recall:.2%}",
        "" if each.left is None else f"~{each.left}",
    )


def _note(each: RunStatus) -> str:
    return "" if each.state == FAILURE else each.note  # a failure is shown below the table


def format_status(each: RunStatus) -> str:
    recall = "" if each.recall is None else f", Recall@1 {each.recall:.2%}"
    return f"{each.state}{recall}{': ' * bool(each.note)}{each.note}"


def count_states(statuses: Sequence[RunStatus]) -> str:
    states = (NEW, PENDING, REQUEUED, RUNNING, UNKNOWN, STOPPED, FAILURE, OTHER, DAMAGED, DONE)
    counts = {state: sum(each.state == state for each in statuses) for state in states}
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count)
