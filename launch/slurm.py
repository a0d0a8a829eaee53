"""Run a sweep on a Slurm cluster, or on this machine.

    python launch/slurm.py --sweep configs/sweeps/sop_batch_size.yaml --dry-run
    python launch/slurm.py --sweep configs/sweeps/sop_batch_size.yaml --partition gpu
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
from pathlib import Path
from typing import Any

from dml.config import add_set
from dml.plan import Plan
from launch.status import (
    ACTIVE,
    DONE,
    FAILURE,
    NEW,
    OTHER,
    STOPPED,
    UNKNOWN,
    Standing,
    standing,
    summary,
    table,
)
from launch.submission import (
    Queued,
    SlurmError,
    cancel,
    folder_of,
    groups,
    locked,
    queued,
    script,
    submit,
    submitted,
)
from launch.sweep import Resources, Sweep, SweepError, SweepRun, plan_all, read_sweep
from shards.output import exit_code

FINISHED, FAILED, MISTAKE, INTERRUPTED = 0, 1, 2, 75
ASKED = {  # of Slurm; the keys of Resources
    "nodes": "nodes of a run",
    "processes_per_node": "processes on each node; with GPUs, as many as those",
    "gpus_per_node": "GPUs on each node; 0: none",
    "cpus_per_process": "cores of each process",
    "minutes": "time limit; a run that needs longer is requeued and goes on",
    "partition": "as sbatch has it",
    "account": "as sbatch has it",
    "constraint": "as sbatch has it",
    "memory_gb": "memory on each node",
    "parallel": "runs at the same time, at most, of those that ask for the same",
}

Plans = Sequence[Plan | None]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        sweep = read(arguments)
        if arguments.status:
            return show(sweep, arguments.watch)
        if arguments.cancel:
            with locked(folder_of(sweep.runs)):
                return cancel_jobs(sweep)
        plans = plan_all(sweep)
        if arguments.dry_run:
            return dry_run(sweep, plans, arguments)
        with locked(folder_of(sweep.runs)):
            if arguments.executor == "local":
                return run_local(sweep, plans, arguments.resubmit_failed)
            return submit_rest(sweep, plans, arguments.resubmit_failed)
    except (SweepError, SlurmError) as error:
        complain(error)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "submitit":
            raise
        complain("submitit is not installed; pip install -e '.[slurm]'")
    return MISTAKE


def complain(error: object) -> None:
    print(f"launch/slurm.py: {error}", file=sys.stderr)


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
    add_set(parser, "overlay values of every run")
    resources = parser.add_argument_group("for every run, instead of what the sweep asks for")
    for key in fields(Resources):
        flag = f"--{key.name.replace('_', '-')}"
        resources.add_argument(flag, metavar="X", help=ASKED[key.name])
    arguments = parser.parse_args(argv)
    if arguments.watch is not None and not (arguments.status and arguments.watch > 0):
        parser.error("--watch SECONDS goes with --status, and is more than 0")
    return arguments


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


def look(sweep: Sweep, plans: Plans, anyway: bool = False) -> list[Standing]:
    """anyway: where the queue cannot be asked, by the folders alone."""
    folder = folder_of(sweep.runs)
    jobs = submitted(folder)
    try:
        queue: dict[str, Queued] | None = queued(folder)
    except SlurmError as error:
        if not anyway:
            raise
        queue = None
        complain(f"the queue is unknown: {error}")
    pairs = zip(sweep.runs, plans, strict=True)
    return [standing(run, plan, queue, jobs) for run, plan in pairs]


def told_all(sweep: Sweep, standings: Sequence[Standing]) -> str:
    return f"{sweep.name}: {summary(standings)}, in {folder_of(sweep.runs).absolute()}"


def show(sweep: Sweep, every: float | None) -> int:
    plans: Plans = [None] * len(sweep.runs)
    try:
        plans = plan_all(sweep)
    except SweepError as error:
        complain(f"without the numbers of the plans: {error}")
    try:
        while True:
            standings = look(sweep, plans, anyway=True)
            if every and sys.stdout.isatty():
                print("\033[2J\033[H", end="")
            print(f"{table(standings)}\n\n{told_all(sweep, standings)}", flush=True)
            if not every or not any(each.state in (*ACTIVE, UNKNOWN) for each in standings):
                return FINISHED
            time.sleep(every)
    except KeyboardInterrupt:
        return FINISHED


def dry_run(sweep: Sweep, plans: Plans, arguments: argparse.Namespace) -> int:
    standings = look(sweep, plans, anyway=True)
    todo = rest(sweep, standings)
    print(f"{table(standings)}\n\n{told_all(sweep, standings)}")
    for problem in obstacles(sweep, standings, todo):
        complain(problem)
    if arguments.executor == "slurm":
        folder = folder_of(sweep.runs)
        for resources, runs in groups(todo).items():
            print(f"\n{script(f'{sweep.name}-NUMBER', resources, len(runs), folder)}")
    return FINISHED


# ---- doing ----------------------------------------------------------------------------------------


def rest(sweep: Sweep, standings: Sequence[Standing], failed: bool = False) -> list[SweepRun]:
    """What is neither finished nor on its way."""
    wanted = (NEW, STOPPED, FAILURE) if failed else (NEW, STOPPED)
    pairs = zip(sweep.runs, standings, strict=True)
    return [run for run, each in pairs if each.state in wanted]


def obstacles(sweep: Sweep, standings: Sequence[Standing], todo: Sequence[SweepRun]) -> list[str]:
    """What would go wrong: the folders that are taken, and the files that are not there."""
    problems = [
        f"{folder_of(sweep.runs) / each.name} is a run of another config: {each.note}; set run.dir "
        "or remove the folder"
        for each in standings
        if each.state == OTHER
    ]
    needed: dict[str, str] = {}  # what is missing -> the first run that needs it
    for run in todo:
        shards, weights = run.config.data.shards, run.config.model.weights
        if not Path(shards, "manifest.json").exists():
            problem = f"data.shards = {shards}: there are no shards; build them or mend the path"
            needed.setdefault(problem, run.name)
        if weights not in (None, "pretrained") and not Path(weights).exists():
            problem = f"model.weights = {weights}: there is no such file; mend the path"
            needed.setdefault(problem, run.name)
    return [*problems, *(f"{run}: {problem}" for problem, run in needed.items())]


def ready(sweep: Sweep, standings: Sequence[Standing], failed: bool) -> list[SweepRun]:
    """The runs to start; SweepError if they could not be."""
    todo = rest(sweep, standings, failed)
    problems = obstacles(sweep, standings, todo)
    if problems:
        raise SweepError(problems, sweep.path)
    return todo


def submit_rest(sweep: Sweep, plans: Plans, failed: bool) -> int:
    standings = look(sweep, plans)
    runs = ready(sweep, standings, failed)
    jobs = submit(sweep.name, runs) if runs else []
    print(told_all(sweep, standings))
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
    todo = ready(sweep, standings, failed)
    print(told_all(sweep, standings), flush=True)
    for number, (run, plan) in enumerate(zip(sweep.runs, plans, strict=True), 1):
        if run not in todo:
            continue
        label = f"{number}/{len(plans)} {run.name}"
        try:
            with tqdm(total=plan.steps, desc=label, unit="step", leave=False) as bar:

                def tick(run: SweepRun = run, plan: Plan = plan, bar: Any = bar) -> None:
                    bar.n = standing(run, plan, {}, {}).step
                    bar.refresh()

                run_here(run, tick)
        except KeyboardInterrupt:
            print(f"{label}: interrupted; the same command continues", flush=True)
            return INTERRUPTED
        print(f"{label}: {told(standing(run, plan, {}, {}))}", flush=True)
    ended = look(sweep, plans)
    print(told_all(sweep, ended), flush=True)
    return FINISHED if all(each.state in (DONE, *ACTIVE) for each in ended) else FAILED


def told(each: Standing) -> str:
    recall = "" if each.recall is None else f", Recall@1 {each.recall:.2%}"
    return f"{each.state}{recall}{': ' * bool(each.note)}{each.note}"


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
