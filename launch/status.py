"""Where the runs of a sweep stand: read from their folders, and from Slurm's queue."""

import fcntl
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from dml.plan import Plan
from launch.job import job_of
from launch.outcome import FAILED, RESULT, last_step, read_json
from launch.submission import Queued
from launch.sweep import SweepRun

AT_WORK = ".local"  # locked while a run is worked on here; the training has a lock of its own
# pending: not yet started; requeued: started before, and waiting to go on
PENDING, REQUEUED, RUNNING = "pending", "requeued", "running"
# stopped: cancelled, or its node was lost; the same command goes on with it
NEW, STOPPED, FAILURE, DONE = "new", "stopped", "failed", "finished"
ACTIVE = (PENDING, REQUEUED, RUNNING)
RECENT = 10  # lines of timing to foretell from


@dataclass(frozen=True)
class Standing:
    """Of one run."""

    name: str
    state: str
    plan: Plan
    step: int = 0
    recall: float | None = None
    eta: timedelta | None = None
    note: str = ""
    log: Sequence[str] = ()


def standing(run: SweepRun, plan: Plan, queue: Mapping[str, Queued]) -> Standing:
    folder, job = Path(job_of(run).folder), queue.get(run.name)
    result, failed = read_json(folder / RESULT), read_json(folder / FAILED)
    if result is not None:
        return Standing(run.name, DONE, plan, result["step"], result["recall@1"])
    step, recall, eta = progress(folder, plan)
    if job is not None and not (failed and job.state == "COMPLETING"):
        state = state_of(job)
        note = f"{job.job}: {job.reason}" if state != RUNNING else job.job
        return Standing(
            run.name, state, plan, step, recall, eta if state == RUNNING else None, note
        )
    if failed is not None:
        reason, log = failed["reason"], failed["log"]
        return Standing(run.name, FAILURE, plan, step, recall, None, reason, log)
    if at_work(folder):
        return Standing(run.name, RUNNING, plan, step, recall, eta, "here")
    return Standing(run.name, STOPPED if folder.exists() else NEW, plan, step, recall)


def state_of(job: Queued) -> str:
    if job.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD"):
        return REQUEUED if job.restarts else PENDING
    return RUNNING  # or about to, or about to end


def progress(folder: Path, plan: Plan) -> tuple[int, float | None, timedelta | None]:
    """The last step noted, the last Recall@1, and the time that is left."""
    lines = read_lines(folder / "metrics.jsonl")
    step = max([last_step(folder), *(line["step"] for line in lines)])
    scores = [line["recall@1"] for line in lines if "split" in line]
    speeds = [line["images_per_second"] for line in read_lines(folder / "timing.jsonl")]
    eta = None
    if speeds:
        left = (plan.steps - step) * plan.batch_size / median(speeds[-RECENT:])
        eta = timedelta(seconds=round(left))
    return step, scores[-1] if scores else None, eta


def read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    whole = text[: text.rfind("\n") + 1]  # the last may be being written
    return [json.loads(line) for line in whole.splitlines()]


# ---- runs on this machine -------------------------------------------------------------------------


@contextmanager
def work_on(folder: Path) -> Iterator[int]:
    """Holds the run; the lock goes to the processes too, and lasts until the last one has ended."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / AT_WORK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file.fileno()


def at_work(folder: Path) -> bool:
    try:
        with (folder / AT_WORK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
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
        f"{plan.batch_size:,}",
        f"{plan.processes:,}",
        f"{plan.images:,}",
        f"{each.step:,}/{plan.steps:,}",
        "" if each.recall is None else f"{each.recall:.2%}",
        "" if each.eta is None else str(each.eta),
        "" if each.state == FAILURE else each.note,
    )


def summary(standings: Sequence[Standing]) -> str:
    states = (NEW, PENDING, REQUEUED, RUNNING, STOPPED, FAILURE, DONE)
    counts = {state: sum(each.state == state for each in standings) for state in states}
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count)
