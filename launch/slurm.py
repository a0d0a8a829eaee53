"""Run a sweep on a Slurm cluster, or on this machine.

    python launch/slurm.py --sweep configs/sweeps/sop_batch_size.yaml --dry-run
    python launch/slurm.py --sweep configs/sweeps/sop_batch_size.yaml --partition gpu
    python launch/slurm.py --sweep configs/sweeps/sop_batch_size.yaml --status
    python launch/slurm.py --sweep configs/sweeps/sop_batch_size.yaml --only bs1000-seed0 --print-config

Every run is planned before anything is submitted. The same command again skips the runs that are
finished or in the queue, and submits the others. Exit codes: 0 done, 1 a run failed, 2 a mistake in
the command or the sweep, 75 interrupted.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from dml.config import add_set, to_yaml
from dml.plan import Plan, missing_files
from dml.train import INTERRUPTED
from launch.estimate import estimate, paper_scores, total_hours
from launch.resources import RESOURCE_HELP, flag, read_flag, takes_many
from launch.slurm_commands import SlurmError
from launch.status import (
    ACTIVE,
    DAMAGED,
    DONE,
    FAILURE,
    NEW,
    OTHER,
    STOPPED,
    UNKNOWN,
    RunStatus,
    count_states,
    format_status,
    status_of,
    status_table,
)
from launch.submission import (
    QueuedJob,
    batch_script,
    cancel,
    group_by_resources,
    last_jobs,
    lock_sweep,
    queued_jobs,
    submit,
    sweep_folder,
)
from launch.sweep import Sweep, SweepError, SweepRun, choose, plan_all, read_sweep
from shards.output import Progress, exit_code, program_name

SUCCESS, RUN_FAILED, MISTAKE = 0, 1, 2

Plans = Sequence[Plan | None]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        whole = read(arguments)
        sweep = choose(whole, arguments.only)
        if arguments.print_config:
            return print_config(sweep)
        if arguments.status:
            return show_status(sweep, arguments.watch)
        if arguments.cancel:
            with lock_sweep(sweep_folder(sweep.runs)):
                return cancel_jobs(sweep)
        if arguments.executor == "local":
            refuse_several_nodes(sweep)
        plans = plan_all(sweep)
        if arguments.dry_run:
            return dry_run(sweep, plans, paper_scores(whole), arguments.executor)
        with lock_sweep(sweep_folder(sweep.runs)):
            if arguments.executor == "local":
                return run_local(sweep, plans, arguments.resubmit_failed)
            return submit_runs(sweep, plans, arguments.resubmit_failed)
    except (SweepError, SlurmError) as error:
        complain(error)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "submitit":
            raise
        complain("submitit is not installed; pip install -e '.[slurm]'")
    return MISTAKE


def complain(error: object) -> None:
    print(f"{program_name('launch/slurm.py')}: {error}", file=sys.stderr)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=program_name("launch/slurm.py"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sweep", required=True, metavar="FILE", help="configs/sweeps/NAME.yaml")
    parser.add_argument("--executor", choices=("slurm", "local"), default="slurm")
    parser.add_argument(
        "--only",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="only these runs; a name without its seed means all its seeds",
    )
    action = parser.add_mutually_exclusive_group()
    for name, text in {
        "--dry-run": "print the runs, their estimated hours and the batch scripts; submit nothing",
        "--status": "print the state of the runs",
        "--cancel": "cancel this sweep's jobs; their checkpoints are kept",
        "--resubmit-failed": "also start the runs that failed",
        "--print-config": "print the config of one run, chosen with --only, as YAML",
    }.items():
        action.add_argument(name, action="store_true", help=text)
    parser.add_argument(
        "--watch", type=float, metavar="SECONDS", help="with --status: repeat it at this interval"
    )
    add_set(parser, "override values in every run")
    resources = parser.add_argument_group("resources of every run, instead of the sweep's")
    for key, text in RESOURCE_HELP.items():
        resources.add_argument(
            flag(key), metavar="X", help=text, nargs="+" if takes_many(key) else None
        )
    arguments = parser.parse_args(argv)
    if arguments.watch is not None and not (arguments.status and 0 < arguments.watch <= 1e6):
        parser.error("--watch SECONDS needs --status and a number above 0, at most 1e6")
    return arguments


def read(arguments: argparse.Namespace) -> Sweep:
    """All runs of the sweep, with the resources of the flags."""
    problems: list[str] = []
    given: dict[str, Any] = {}
    for key in RESOURCE_HELP:
        words = getattr(arguments, key)
        if words is not None:
            try:
                given[key] = read_flag(key, words)
            except ValueError as error:
                text = words if isinstance(words, str) else " ".join(words)
                problems.append(f"{flag(key)} {text}: {error}")
    try:
        sweep = read_sweep(arguments.sweep, arguments.set)
    except SweepError as error:
        raise SweepError([*problems, *error.problems], error.where) from None
    if problems:
        raise SweepError(problems, arguments.sweep)
    runs = tuple(replace(run, resources=replace(run.resources, **given)) for run in sweep.runs)
    return replace(sweep, runs=runs)


def refuse_several_nodes(sweep: Sweep) -> None:
    names = [run.name for run in sweep.runs if run.resources.nodes > 1]
    if names:
        text = f"{names[0]} asks for more than one node; for this machine set --nodes 1"
        raise SweepError([text], sweep.path)


# ---- what there is --------------------------------------------------------------------------------


def print_config(sweep: Sweep) -> int:
    if len(sweep.runs) != 1:
        names = ", ".join(run.name for run in sweep.runs)
        text = (
            f"--print-config prints one run, not {len(sweep.runs)}; choose one with --only: {names}"
        )
        raise SweepError([text], sweep.path)
    print(to_yaml(sweep.runs[0].config), end="")
    return SUCCESS


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


def show_status(sweep: Sweep, interval: float | None) -> int:
    plans: Plans = [None] * len(sweep.runs)
    try:
        plans = plan_all(sweep)
    except SweepError as error:
        complain(f"the numbers of the plans are missing: {error}")
    try:
        while True:
            statuses = collect_status(sweep, plans, queue_optional=True)
            if interval and sys.stdout.isatty():
                print("\033[2J\033[H", end="")
            print(f"{status_table(statuses)}\n\n{format_summary(sweep, statuses)}", flush=True)
            if not interval or not any(each.state in (*ACTIVE, UNKNOWN) for each in statuses):
                return SUCCESS
            time.sleep(interval)
    except KeyboardInterrupt:
        return SUCCESS


def dry_run(sweep: Sweep, plans: Sequence[Plan], scores: dict[str, str], executor: str) -> int:
    statuses = collect_status(sweep, plans, queue_optional=True)
    estimates = [
        estimate(run, plan, status)
        for run, plan, status in zip(sweep.runs, plans, statuses, strict=True)
    ]
    columns = {
        "paper": [scores[run.name] for run in sweep.runs],
        "hours": [str(each) for each in estimates],
    }
    print(f"{status_table(statuses, columns)}\n\n{format_summary(sweep, statuses)}")
    todo = runs_to_start(sweep, statuses)
    for problem in find_problems(sweep, statuses, todo):
        complain(problem)
    if executor == "slurm":
        folder = sweep_folder(sweep.runs)
        for resources, runs in group_by_resources(todo).items():
            print(f"\n{batch_script(f'{sweep.name}-NUMBER', resources, len(runs), folder)}")
    print(f"\n{total_hours(estimates)}")
    return SUCCESS


# ---- what is done ---------------------------------------------------------------------------------


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


def submit_runs(sweep: Sweep, plans: Plans, failed: bool) -> int:
    statuses = collect_status(sweep, plans)
    runs = checked_runs_to_start(sweep, statuses, failed=failed)
    jobs = submit(sweep.name, runs) if runs else []
    as_jobs = f" as job {', '.join(jobs)}" if jobs else ""
    print(format_summary(sweep, statuses))
    print(f"submitted {len(runs)} of {len(sweep.runs)} runs{as_jobs}; --status shows them")
    if not failed and any(each.state == FAILURE for each in statuses):
        print("some runs failed: --status shows why, --resubmit-failed starts them again")
    return SUCCESS


def cancel_jobs(sweep: Sweep) -> int:
    names = {run.name for run in sweep.runs}
    queue = queued_jobs(sweep_folder(sweep.runs))
    jobs = [job for name, job in queue.items() if name in names]
    cancel(jobs)
    print(f"cancelled {len(jobs)} jobs; submit the sweep again to resume them")
    return SUCCESS


def run_local(sweep: Sweep, plans: Sequence[Plan], failed: bool) -> int:
    from launch.local import run_here

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # handled like Ctrl-C
    statuses = collect_status(sweep, plans)
    todo = checked_runs_to_start(sweep, statuses, failed=failed)
    print(format_summary(sweep, statuses), flush=True)
    for number, (run, plan) in enumerate(zip(sweep.runs, plans, strict=True), 1):
        if run not in todo:
            continue
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
    statuses = collect_status(sweep, plans)
    print(format_summary(sweep, statuses), flush=True)
    return SUCCESS if all(each.state in (DONE, *ACTIVE) for each in statuses) else RUN_FAILED


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
