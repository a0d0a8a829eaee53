"""Run a sweep on a Slurm cluster, or on this machine.

    python launch/slurm.py --sweep configs/sweeps/sop_batch_size.yaml --dry-run
    python launch/slurm.py --sweep configs/sweeps/sop_batch_size.yaml --partition gpu
    python launch/slurm.py --sweep configs/sweeps/sop_batch_size.yaml --status
    python launch/slurm.py --sweep configs/sweeps/sop_batch_size.yaml --only bs1000-seed0 --print-config

Every run is planned before anything is submitted. The same command again skips the runs that are
finished or in the queue, and submits the others. If the sweep has a section `tune`, it also goes on
from rung to rung, and from there to the runs of the chosen settings. Exit codes: 0 done, 1 a run
failed, 2 a mistake in the command or the sweep, 75 interrupted.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dml.config import add_set, to_yaml
from launch.budget import budget_table
from launch.estimate import estimate, paper_scores, total_hours
from launch.halving import search_table, searches, stages
from launch.resources import RESOURCE_HELP, flag, read_flag, takes_many
from launch.slurm_commands import SlurmError
from launch.starting import (
    MISTAKE,
    SUCCESS,
    Plans,
    cancel_jobs,
    collect_status,
    complain,
    find_problems,
    format_summary,
    run_local,
    runs_to_start,
    submit_all,
)
from launch.status import ACTIVE, UNKNOWN, RunStatus, status_table
from launch.submission import batch_script, group_by_resources, lock_sweep, sweep_folder
from launch.sweep import Sweep, SweepError, SweepRun, choose, plan_all, read_sweep
from shards.output import exit_code, program_name


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        whole = read(arguments)
        sweep = choose(whole, arguments.only)
        if arguments.watch and not (arguments.status or sweep.search):
            raise SweepError(["--watch needs --status, or a sweep with a section tune"], sweep.path)
        if arguments.print_config:
            return print_config(sweep)
        if arguments.status:
            return show_status(sweep, arguments.watch)
        if arguments.cancel:
            with lock_sweep(sweep_folder(sweep.runs)):
                return cancel_jobs(sweep)
        if arguments.executor == "local":
            refuse_several_nodes(sweep)
        if arguments.dry_run:
            return dry_run(sweep, paper_scores(whole), arguments.executor)
        plan_all(sweep)
        with lock_sweep(sweep_folder(sweep.runs)):
            if arguments.executor == "local":
                return run_local(sweep, arguments.resubmit_failed)
            return submit_all(sweep, arguments.resubmit_failed, arguments.watch)
    except (SweepError, SlurmError) as error:
        complain(error)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "submitit":
            raise
        complain("submitit is not installed; pip install -e '.[slurm]'")
    return MISTAKE


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
        "--watch",
        type=float,
        metavar="SECONDS",
        help="with --status: repeat it at this interval; when submitting a sweep that tunes: stay, and "
        "submit the next runs as soon as their settings are known",
    )
    add_set(parser, "override values in every run")
    resources = parser.add_argument_group("resources of every run, instead of the sweep's")
    for key, text in RESOURCE_HELP.items():
        resources.add_argument(
            flag(key), metavar="X", help=text, nargs="+" if takes_many(key) else None
        )
    arguments = parser.parse_args(argv)
    if arguments.watch is not None and not 0 < arguments.watch <= 1e6:
        parser.error("--watch SECONDS needs a number above 0, at most 1e6")
    others = (arguments.dry_run, arguments.cancel, arguments.print_config)
    if arguments.watch is not None and (any(others) or arguments.executor == "local"):
        parser.error("--watch SECONDS goes with --status, or with submitting to Slurm")
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

    def with_flags(runs: Sequence[SweepRun]) -> tuple[SweepRun, ...]:
        return tuple(replace(run, resources=replace(run.resources, **given)) for run in runs)

    settings = {
        point: tuple(
            replace(each, tried=with_flags(each.tried), final=with_flags(each.final))
            for each in found
        )
        for point, found in sweep.settings.items()
    }
    return replace(sweep, runs=with_flags(sweep.runs), settings=settings)


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
    (run,) = sweep.runs
    if sweep.search:
        (search,) = searches(sweep)
        if search.chosen is None:
            text = f"{run.name} has no settings yet; --status shows how far the search is"
            raise SweepError([text], sweep.path)
        run = next(each for each in search.chosen.final if each.name == run.name)
    print(to_yaml(run.config), end="")
    return SUCCESS


def show_status(sweep: Sweep, interval: float | None) -> int:
    try:
        while True:
            if interval and sys.stdout.isatty():
                print("\033[2J\033[H", end="")
            if sweep.search:
                print(f"{search_table(sweep, searches(sweep))}\n")
            states = [each.state for stage in stages(sweep) for each in print_status(stage)]
            if not interval or not any(state in (*ACTIVE, UNKNOWN) for state in states):
                return SUCCESS
            time.sleep(interval)
    except KeyboardInterrupt:
        return SUCCESS


def print_status(sweep: Sweep) -> list[RunStatus]:
    plans: Plans = [None] * len(sweep.runs)
    try:
        plans = plan_all(sweep)
    except SweepError as error:
        complain(f"the numbers of the plans are missing: {error}")
    statuses = collect_status(sweep, plans, queue_optional=True)
    print(f"{status_table(statuses)}\n\n{format_summary(sweep, statuses)}", flush=True)
    return statuses


def dry_run(sweep: Sweep, scores: dict[str, str], executor: str) -> int:
    if sweep.search:
        print(f"{budget_table(sweep, searches(sweep))}\n")
    for stage in stages(sweep):
        plans = plan_all(stage)
        statuses = collect_status(stage, plans, queue_optional=True)
        estimates = [
            estimate(run, plan, status)
            for run, plan, status in zip(stage.runs, plans, statuses, strict=True)
        ]
        columns = {
            "paper": [scores.get(run.name, "") for run in stage.runs],
            "hours": [str(each) for each in estimates],
        }
        print(f"{status_table(statuses, columns)}\n\n{format_summary(stage, statuses)}")
        todo = runs_to_start(stage, statuses)
        for problem in find_problems(stage, statuses, todo):
            complain(problem)
        if executor == "slurm":
            folder = sweep_folder(stage.runs)
            for resources, runs in group_by_resources(todo).items():
                print(f"\n{batch_script(f'{stage.name}-NUMBER', resources, len(runs), folder)}")
        print(f"\n{total_hours(estimates)}")
    return SUCCESS


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
