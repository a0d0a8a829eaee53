"""Run a sweep on a Slurm cluster, or on this machine.

    python launch/slurm.py --sweep configs/sweeps/sop_batch_size.yaml --dry-run
    python launch/slurm.py --sweep configs/sweeps/sop_batch_size.yaml --nodes 2 --partition gpu
    python launch/slurm.py --sweep configs/sweeps/sop_batch_size.yaml --status

Every run is planned before anything is submitted. The same command again skips what is finished or
in the queue, and goes on with the rest. Exit codes: 0 done, 1 a run failed, 2 a mistake in what was
asked for, 75 interrupted.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import Field, fields, replace
from typing import Any

from dml.plan import Plan
from launch.status import (
    ACTIVE,
    DONE,
    FAILURE,
    NEW,
    RUNNING,
    STOPPED,
    Standing,
    standing,
    summary,
    table,
)
from launch.submission import SlurmError, cancel, folder_of, groups, locked, queued, script, submit
from launch.sweep import Resources, Sweep, SweepError, SweepRun, plan_all, read_sweep

FINISHED, FAILED, MISTAKE, INTERRUPTED = 0, 1, 2, 75


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        sweep = read(arguments)
        plans = plan_all(sweep)
        if arguments.status:
            return show(sweep, plans, arguments.watch)
        if arguments.dry_run:
            return dry_run(sweep, plans, arguments)
        with locked(folder_of(sweep.runs)):
            if arguments.cancel:
                return cancel_jobs(sweep)
            if arguments.executor == "local":
                return run_local(sweep, plans, arguments.resubmit_failed)
            return submit_rest(sweep, plans, arguments.resubmit_failed)
    except (SweepError, SlurmError) as error:
        print(f"launch/slurm.py: {error}", file=sys.stderr)
        return MISTAKE


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="launch/slurm.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sweep", required=True, metavar="FILE", help="configs/sweeps/NAME.yaml")
    parser.add_argument("--executor", choices=("slurm", "local"), default="slurm")
    action = parser.add_mutually_exclusive_group()
    for flag, text in {
        "--dry-run": "print the runs and the batch script, submit nothing",
        "--status": "where the runs stand",
        "--cancel": "cancel this sweep's jobs; what they have done is kept",
        "--resubmit-failed": "start the failed runs, too",
    }.items():
        action.add_argument(flag, action="store_true", help=text)
    parser.add_argument(
        "--watch", type=float, metavar="SECONDS", help="with --status: again and again"
    )
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="overlay values of every run",
    )
    resources = parser.add_argument_group("instead of the sweep's own")
    for key in fields(Resources):
        resources.add_argument(f"--{key.name.replace('_', '-')}", metavar="X")
    return parser.parse_args(argv)


def read(arguments: argparse.Namespace) -> Sweep:
    """The sweep, with what the flags ask for instead."""
    problems: list[str] = []
    given: dict[str, Any] = {}
    for key in fields(Resources):
        text = getattr(arguments, key.name)
        if text is not None:
            try:
                given[key.name] = value_of(key, text)
            except ValueError as error:
                problems.append(f"--{key.name.replace('_', '-')} {text}: {error}")
    try:
        sweep = read_sweep(arguments.sweep, arguments.set)
    except SweepError as error:
        raise SweepError([*problems, *error.problems], error.where) from None
    runs = tuple(replace(run, resources=replace(run.resources, **given)) for run in sweep.runs)
    many = [run.name for run in runs if run.resources.nodes > 1]
    if arguments.executor == "local" and many:
        problems.append(f"{many[0]} asks for more than one node; for this machine set --nodes 1")
    if problems:
        raise SweepError(problems, arguments.sweep)
    return replace(sweep, runs=runs)


def value_of(key: "Field[Any]", text: str) -> Any:
    rule = key.metadata["rule"]
    value: Any = text
    if "int" in str(key.type):
        if not text.isdecimal():
            raise ValueError("must be a whole number")
        value = int(text)
    if not rule.holds(value):
        raise ValueError(f"must be {rule.text}")
    return value


# ---- looking --------------------------------------------------------------------------------------


def look(sweep: Sweep, plans: Sequence[Plan]) -> list[Standing]:
    queue = queued(folder_of(sweep.runs))
    return [standing(run, plan, queue) for run, plan in zip(sweep.runs, plans, strict=True)]


def show(sweep: Sweep, plans: Sequence[Plan], every: float | None) -> int:
    while True:
        standings = look(sweep, plans)
        if every and sys.stdout.isatty():
            print("\033[2J\033[H", end="")
        print(f"{table(standings)}\n\n{sweep.name}: {summary(standings)}", flush=True)
        if not every or not any(each.state in ACTIVE for each in standings):
            return FINISHED
        time.sleep(every)


def dry_run(sweep: Sweep, plans: Sequence[Plan], arguments: argparse.Namespace) -> int:
    standings = look(sweep, plans)
    print(f"{table(standings)}\n\n{sweep.name}: {summary(standings)}")
    if arguments.executor == "slurm":
        folder = folder_of(sweep.runs)
        for resources, runs in groups(rest(sweep, standings)).items():
            print(f"\n{script(f'{sweep.name}-NUMBER', resources, len(runs), folder)}")
    return FINISHED


# ---- doing ----------------------------------------------------------------------------------------


def rest(sweep: Sweep, standings: Sequence[Standing], failed: bool = False) -> list[SweepRun]:
    """What is neither finished nor on its way."""
    wanted = (NEW, STOPPED, FAILURE) if failed else (NEW, STOPPED)
    pairs = zip(sweep.runs, standings, strict=True)
    return [run for run, each in pairs if each.state in wanted]


def submit_rest(sweep: Sweep, plans: Sequence[Plan], failed: bool) -> int:
    standings = look(sweep, plans)
    runs = rest(sweep, standings, failed)
    jobs = submit(sweep.name, runs) if runs else []
    print(f"{sweep.name}: {summary(standings)}")
    print(f"submitted {len(runs)} of {len(sweep.runs)} runs{as_jobs(jobs)}; --status shows them")
    return hint(standings, failed)


def as_jobs(jobs: Sequence[str]) -> str:
    return f" as job {', '.join(jobs)}" if jobs else ""


def hint(standings: Sequence[Standing], failed: bool) -> int:
    if not failed and any(each.state == FAILURE for each in standings):
        print("some runs failed: --status tells why, --resubmit-failed tries again")
    return FINISHED


def cancel_jobs(sweep: Sweep) -> int:
    queue = queued(folder_of(sweep.runs))
    cancel(list(queue.values()))
    print(f"cancelled {len(queue)} jobs; the same sweep, started again, goes on from here")
    return FINISHED


def run_local(sweep: Sweep, plans: Sequence[Plan], failed: bool) -> int:
    from tqdm import tqdm

    from launch.local import run_here

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    standings = look(sweep, plans)
    todo = rest(sweep, standings, failed)
    print(f"{sweep.name}: {summary(standings)}", flush=True)
    for number, (run, plan) in enumerate(zip(sweep.runs, plans, strict=True), 1):
        if run not in todo:
            continue
        label = f"{number}/{len(plans)} {run.name}"
        try:
            with tqdm(total=plan.steps, desc=label, unit="step", leave=False) as bar:

                def tick(run: SweepRun = run, plan: Plan = plan, bar: Any = bar) -> None:
                    bar.n = standing(run, plan, {}).step
                    bar.refresh()

                run_here(run, tick)
        except KeyboardInterrupt:
            print(f"{label}: interrupted; the same command continues", flush=True)
            return INTERRUPTED
        print(f"{label}: {told(standing(run, plan, {}))}", flush=True)
    ended = look(sweep, plans)
    print(f"{sweep.name}: {summary(ended)}", flush=True)
    return FINISHED if all(each.state in (DONE, RUNNING) for each in ended) else FAILED


def told(each: Standing) -> str:
    recall = "" if each.recall is None else f", Recall@1 {each.recall:.2%}"
    return f"{each.state}{recall}{': ' * bool(each.note)}{each.note}"


if __name__ == "__main__":
    raise SystemExit(main())
