"""The jobs of a sweep: submitted with submitit as job arrays, found again in Slurm's queue.

    runs/SWEEP/sweep.json    {"submissions": [{"name": of the jobs, "runs": [...], "job": id}]}
    runs/SWEEP/slurm/        submitit's folder: scripts, pickles, logs

A submission is noted before sbatch is called, and its jobs are found by their unique name: a launcher
that dies in between leaves no job that nobody knows. No database (sacct) is asked.
"""

import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dml.run_folder.files import read_json, try_lock, write_json
from launch.job import job_of
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
        "setup": [
            f"export PYTHONPATH={shlex.quote(str(ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}",
            "export SLURM_EXPORT_ENV=ALL",  # the tasks get it, too, whatever sbatch was told
        ],
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
    try:
        book = read_json(folder / BOOK)
        found: list[dict[str, Any]] = [] if book is None else book["submissions"]
        if all(entry["name"] and entry["runs"] and "job" in entry for entry in found):
            return found
    except (ValueError, TypeError, KeyError):
        pass
    raise SlurmError(
        f"{folder / BOOK} is damaged; remove it when none of the sweep's jobs is in the queue"
    )


def submitted(folder: Path) -> dict[str, str]:
    """Run -> its last job, where one is known."""
    return {
        run: element(entry, index)
        for entry in submissions(folder)
        if entry["job"]
        for index, run in enumerate(entry["runs"])
    }


def element(entry: Mapping[str, Any], index: int) -> str:
    """A single job is no array."""
    return f"{entry['job']}_{index}" if len(entry["runs"]) > 1 else entry["job"]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One launcher at a time."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("w")
    except OSError as error:
        text = f"{folder} cannot be written: {error.strerror}; set run.dir to a folder that can"
        raise SlurmError(text) from None
    with file:
        if not try_lock(file):
            raise SweepError(["another launcher is at work on it; wait for it"], folder)
        yield


def submit(sweep: str, runs: Sequence[SweepRun]) -> list[str]:
    """Submit the runs, one array for each group; the ids of the jobs."""
    from submitit import SlurmExecutor

    if shutil.which("sbatch") is None:
        raise SlurmError("there is no sbatch here; --executor local runs the sweep on this machine")
    folder, jobs = folder_of(runs), list[str]()
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
            before = f"; job {', '.join(jobs)} was, and --status shows it" if jobs else ""
            what = f"{members[0].name} and the runs like it"
            raise SlurmError(f"{what} were not submitted: {error}{before}") from None
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
    """The runs of a sweep that are in the queue, whoever submitted them."""
    known: dict[str, list[str]] = {}
    for entry in submissions(folder):
        known[entry["name"]] = entry["runs"]
        if entry["job"]:
            known[entry["job"]] = entry["runs"]
    if not known:
        return {}
    if shutil.which("squeue") is None:
        raise SlurmError(
            f"there is no squeue here to tell which runs of {folder} are in the queue; go where "
            f"Slurm is, or remove {folder / BOOK} when none of its jobs is left"
        )
    found = {}
    for line in slurm("squeue", "--noheader", "--array", f"--Format={SEEN}").splitlines():
        job, number, state, restarts, *named = line.split()
        name, reason = named[0] if named else "", " ".join(named[1:])
        runs = known.get(name) or known.get(job) or []
        index = int(number) if number.isdigit() else 0
        if index < len(runs):
            full = f"{job}_{number}" if number.isdigit() else job
            found[runs[index]] = Queued(full, state, int(restarts), reason)
    return found


def cancel(jobs: Sequence[Queued]) -> None:
    if jobs:
        slurm("scancel", *(each.job for each in jobs))
