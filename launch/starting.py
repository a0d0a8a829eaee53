"""Starting the runs of a sweep: submitted to Slurm, or run on this machine one after another.

With a search, what can be run follows from what has ended (launch/halving.py), so both go on until
nothing is left that they have not started themselves.
"""

import signal
import sys
import time
from collections.abc import Sequence
from contextlib import closing

from dml.plan import Plan, missing_files
from dml.train import INTERRUPTED
from launch.halving import search_table, searches, stages
from launch.slurm_commands import SlurmError
from launch.status import (
    ACTIVE,
    DAMAGED,
    DONE,
    FAILURE,
    NEW,
    OTHER,
    STOPPED,
    RunStatus,
    count_states,
    format_status,
    status_of,
    wait_for_leaving,
)
from launch.submission import (
    QueuedJob,
    cancel,
    last_jobs,
    queued_jobs,
    submit,
    sweep_folder,
)
from launch.sweep import Sweep, SweepError, SweepRun, plan_all
from shards.output import Progress, program_name

SUCCESS, RUN_FAILED, MISTAKE = 0, 1, 2

Plans = Sequence[Plan | None]
Identity = tuple[str, int | None]  # the name of a run and its length: on another rung it is another


def complain(error: object) -> None:
    print(f"{program_name('launch/slurm.py')}: {error}", file=sys.stderr)


def collect_status(sweep: Sweep, plans: Plans, *, queue_optional: bool = False) -> list[RunStatus]:
    """The status of every run. queue_optional: if Slurm's queue cannot be read, go on without it."""
    folder = sweep_folder(sweep.runs)
    jobs = last_jobs(folder)
    try:
        queue: dict[str, QueuedJob] | None = queued_jobs(folder)
    except SlurmError as error:
        if not queue_optional:
            raise
        queue = None
        complain(f"the queue is unknown: {error}")
    pairs = zip(sweep.runs, plans, strict=True)
    return [status_of(run, plan, queue, jobs) for run, plan in pairs]


def format_summary(sweep: Sweep, statuses: Sequence[RunStatus]) -> str:
    return f"{sweep.name}: {count_states(statuses)}, in {sweep_folder(sweep.runs).absolute()}"


def runs_to_start(
    sweep: Sweep, statuses: Sequence[RunStatus], *, failed: bool = False
) -> list[SweepRun]:
    """The runs that are neither finished nor in the queue. failed: also those that failed."""
    states = (NEW, STOPPED, FAILURE) if failed else (NEW, STOPPED)
    pairs = zip(sweep.runs, statuses, strict=True)
    return [run for run, status in pairs if status.state in states]


def find_problems(
    sweep: Sweep, statuses: Sequence[RunStatus], todo: Sequence[SweepRun]
) -> list[str]:
    """What would stop the runs: folders that hold other runs, damaged files and missing ones."""
    problems = [
        f"{sweep_folder(sweep.runs) / each.name} is a run of another config: {each.note}; set "
        "run.dir or remove the folder"
        for each in statuses
        if each.state == OTHER
    ]
    problems += [f"{each.name}: {each.note}" for each in statuses if each.state == DAMAGED]
    needed: dict[str, str] = {}  # problem -> the first run that has it
    for run in todo:
        for problem in missing_files(run.config):
            needed.setdefault(problem, run.name)
    return [*problems, *(f"{run}: {problem}" for problem, run in needed.items())]


def checked_runs_to_start(
    sweep: Sweep, statuses: Sequence[RunStatus], *, failed: bool
) -> list[SweepRun]:
    """The runs to start; SweepError if something would stop them."""
    todo = runs_to_start(sweep, statuses, failed=failed)
    problems = find_problems(sweep, statuses, todo)
    if problems:
        raise SweepError(problems, sweep.path)
    return todo


def submit_all(sweep: Sweep, failed: bool, interval: float | None) -> int:
    """Submit what can be run now; with an interval, stay until the search and its runs have ended."""
    submitted: set[Identity] = set()
    while True:
        active = [submit_runs(stage, failed, submitted) for stage in stages(sweep)]
        if not interval:
            break
        if not any(active):
            return final_code(sweep)
        try:
            time.sleep(interval)
        except KeyboardInterrupt:
            print("the jobs in the queue go on; the same command submits what follows them")
            return INTERRUPTED
    if any(each.open_runs for each in searches(sweep)):
        print(
            "when these runs have ended, the same command submits those that follow; --watch 60 would "
            "stay and do it"
        )
    return SUCCESS


def submit_runs(sweep: Sweep, failed: bool, submitted: set[Identity]) -> bool:
    """Whether runs of it are in the queue. submitted: the runs that are not to be submitted again."""
    statuses = collect_status(sweep, plan_all(sweep))
    found = checked_runs_to_start(sweep, statuses, failed=failed)
    runs = [run for run in found if identity(run) not in submitted]
    submitted.update(map(identity, runs))
    jobs = submit(sweep.name, runs) if runs else []
    as_jobs = f" as job {', '.join(jobs)}" if jobs else ""
    print(format_summary(sweep, statuses))
    print(
        f"submitted {len(runs)} of {len(sweep.runs)} runs{as_jobs}; --status shows them", flush=True
    )
    if not failed and any(each.state == FAILURE for each in statuses):
        print("some runs failed: --status shows why, --resubmit-failed starts them again")
    return bool(runs) or any(each.state in ACTIVE for each in statuses)


def identity(run: SweepRun) -> Identity:
    return run.name, run.config.length.steps


def final_code(sweep: Sweep) -> int:
    """Whether all runs have ended well, and every point has a setting."""
    if any(each.chosen is None for each in searches(sweep)):
        return RUN_FAILED
    states = [
        each.state for stage in stages(sweep) for each in collect_status(stage, plan_all(stage))
    ]
    return SUCCESS if all(state in (DONE, *ACTIVE) for state in states) else RUN_FAILED


def cancel_jobs(sweep: Sweep) -> int:
    count = 0
    for stage in stages(sweep):
        names = {run.name for run in stage.runs}
        queue = queued_jobs(sweep_folder(stage.runs))
        jobs = [job for name, job in queue.items() if name in names]
        cancel(jobs)
        count += len(jobs)
    print(f"cancelled {count} jobs; submit the sweep again to resume them")
    return SUCCESS


def run_local(sweep: Sweep, failed: bool) -> int:
    """Run what can be run now, until nothing is left."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # handled like Ctrl-C
    started: set[Identity] = set()
    try:
        while True:
            before = len(started)
            for stage in stages(sweep):
                if run_stage(stage, failed, started) == INTERRUPTED:
                    return INTERRUPTED
            if not sweep.search or len(started) == before:
                return final_code(sweep)
            print(f"{search_table(sweep, searches(sweep))}\n", flush=True)
    except KeyboardInterrupt:
        print("interrupted between two runs; the same command goes on", flush=True)
        return INTERRUPTED


def run_stage(sweep: Sweep, failed: bool, started: set[Identity]) -> int:
    """started: the runs that are not to be started again."""
    from launch.local import run_here

    plans = plan_all(sweep)
    wait_for_leaving(sweep.runs)
    statuses = collect_status(sweep, plans)
    todo = checked_runs_to_start(sweep, statuses, failed=failed)
    print(format_summary(sweep, statuses), flush=True)
    for number, (run, plan) in enumerate(zip(sweep.runs, plans, strict=True), 1):
        if run not in todo or identity(run) in started:
            continue
        started.add(identity(run))
        label = f"{number}/{len(plans)} {run.name}"
        try:
            done = status_of(run, plan, {}, {}).step
            bar = Progress(plan.steps, "step", label=label, done=done, leave=False)
            with closing(bar):

                def update(run: SweepRun = run, plan: Plan = plan, bar: Progress = bar) -> None:
                    bar.update(status_of(run, plan, {}, {}).step - bar.done)

                run_here(run, update)
        except KeyboardInterrupt:
            print(f"{label}: interrupted; the same command resumes it", flush=True)
            return INTERRUPTED
        print(f"{label}: {format_status(status_of(run, plan, {}, {}))}", flush=True)
    print(format_summary(sweep, collect_status(sweep, plans)), flush=True)
    return SUCCESS
