"""The jobs of a sweep: submitted with submitit as job arrays, found again in Slurm's queue.

    runs/SWEEP/sweep.json    {"submissions": [{"name": of the jobs, "runs": [...], "job": id}]}
    runs/SWEEP/slurm/        submitit's folder: scripts, pickles, logs

A submission is noted before sbatch is called, and its jobs are found by their unique name: a launcher
that dies in between leaves no job that nobody knows. No database (sacct) is asked.
"""

import fcntl
import os
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.job import job_of
from launch.outcome import read_json, write_json
from launch.sweep import Resources, SweepError, SweepRun

ROOT = Path(__file__).resolve().parents[1]
BOOK, LOCK, LOGS = "sweep.json", ".lock", "slurm"
# submitit's handler meets only signals outside of training; jobs of ten minutes and less always
# count as timed out there.
TIMEOUTS = 100
WARNING = 120  # seconds between the signal and the end: a step and a checkpoint must fit
STRAGGLERS = 20  # seconds for the other tasks when the first has ended
SEEN = "ArrayJobID:20,ArrayTaskID:20,State:20,RestartCnt:10,Name:250,Reason:200"


class SlurmError(RuntimeError):
    """Slurm refused, or is not there."""


@dataclass(frozen=True)
class Queued:
    """A job in Slurm's queue."""

    job: str
    state: str  # Slurm's word
    restarts: int
    reason: str


def folder_of(runs: Sequence[SweepRun]) -> Path:
    return Path(runs[0].config.run.dir)


def groups(runs: Sequence[SweepRun]) -> dict[Resources, list[SweepRun]]:
    """An array's elements ask for the same; usually there is one group."""
    found: dict[Resources, list[SweepRun]] = {}
    for run in runs:
        found.setdefault(run.resources, []).append(run)
    return found


# ---- the batch script -----------------------------------------------------------------------------


def parameters(name: str, resources: Resources, count: int, logs: Path) -> dict[str, Any]:
    """Of submitit's SlurmExecutor."""
    given = {
        "partition": resources.partition,
        "account": resources.account,
        "constraint": resources.constraint,
        "gpus_per_node": resources.gpus_per_node or None,
        "mem": f"{resources.memory_gb}GB" if resources.memory_gb else None,
    }
    finish = shlex.join([sys.executable, "-m", "launch.job", str(logs)])
    return {
        "job_name": name,
        "time": resources.minutes,
        "nodes": resources.nodes,
        "ntasks_per_node": resources.processes_per_node,
        "cpus_per_task": resources.cpus_per_process,
        **{key: value for key, value in given.items() if value is not None},
        "array_parallelism": resources.parallel or count,
        "signal_delay_s": min(WARNING, 20 * resources.minutes),
        "additional_parameters": {"requeue": True},
        "stderr_to_stdout": True,
        # srun does not take --cpus-per-task over from sbatch (since Slurm 22.05)
        "srun_args": [f"--wait={STRAGGLERS}", f"--cpus-per-task={resources.cpus_per_process}"],
        "setup": [f"export PYTHONPATH={shlex.quote(str(ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}"],
        "teardown": [f"{finish} $?"],
    }


def script(name: str, resources: Resources, count: int, folder: Path) -> str:
    """What sbatch would get, also where there is no Slurm."""
    from submitit.slurm.slurm import _make_sbatch_string

    logs = (folder / LOGS).absolute()
    command = shlex.join([sys.executable, "-u", "-m", "submitit.core._submit", str(logs)])
    array = count if count > 1 else None
    given = parameters(name, resources, count, logs)
    return _make_sbatch_string(command=command, folder=logs, map_count=array, **given)


# ---- sweep.json -----------------------------------------------------------------------------------


def submissions(folder: Path) -> list[dict[str, Any]]:
    book = read_json(folder / BOOK)
    return book["submissions"] if book else []


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One launcher at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SweepError(["another launcher is at work on it; wait for it"], folder) from None
        yield


def submit(sweep: str, runs: Sequence[SweepRun]) -> list[str]:
    """Submit the runs, one array for each group; the ids of the jobs."""
    from submitit import SlurmExecutor

    if shutil.which("sbatch") is None:
        raise SlurmError("there is no sbatch here; --executor local runs the sweep on this machine")
    folder, jobs = folder_of(runs), []
    logs = (folder / LOGS).absolute()
    for resources, members in groups(runs).items():
        name = f"{sweep}-{secrets.token_hex(3)}".replace(" ", "_")
        known = submissions(folder)
        entry: dict[str, Any] = {"name": name, "runs": [run.name for run in members], "job": None}
        write_json(folder / BOOK, {"submissions": [*known, entry]})
        try:
            executor = SlurmExecutor(logs, max_num_timeout=TIMEOUTS)
            executor.update_parameters(**parameters(name, resources, len(members), logs))
            with executor.batch():
                submitted = [executor.submit(job_of(run)) for run in members]
        except (RuntimeError, OSError) as error:  # sbatch's own words, or there is none
            raise SlurmError(f"the jobs were not submitted: {error}") from None
        entry["job"] = submitted[0].job_id.partition("_")[0]
        write_json(folder / BOOK, {"submissions": [*known, entry]})
        jobs.append(entry["job"])
    return jobs


# ---- Slurm's queue --------------------------------------------------------------------------------


def slurm(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmError(f"{command[0]}: {error}") from None
    if done.returncode:
        raise SlurmError(f"{command[0]}: {done.stderr.strip()}")
    return done.stdout


def queued(folder: Path) -> dict[str, Queued]:
    """The runs of a sweep that are in the queue."""
    known = {entry["name"]: entry["runs"] for entry in submissions(folder)}
    if (
        not known or shutil.which("squeue") is None
    ):  # submitted elsewhere: the folders tell the rest
        return {}
    user, found = f"--user={os.getuid()}", {}
    lines = slurm("squeue", "--noheader", "--array", user, f"--Format={SEEN}").splitlines()
    for job, element, state, restarts, name, *reason in map(str.split, lines):
        if name in known:
            index = int(element) if element.isdigit() else 0
            full = f"{job}_{element}" if element.isdigit() else job
            run = known[name][index]
            found[run] = Queued(full, state, int(restarts), " ".join(reason))
    return found


def cancel(jobs: Sequence[Queued]) -> None:
    if jobs:
        slurm("scancel", *(each.job for each in jobs))
