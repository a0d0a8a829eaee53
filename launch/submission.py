"""The jobs of a sweep: submitted with submitit as job arrays, found again in Slurm's queue.

    runs/SWEEP/sweep.json    {"submissions": [{"name": of the jobs, "runs": [...], "job": id}]}
    runs/SWEEP/slurm/        submitit's folder: scripts, pickles, logs

A submission is recorded before sbatch is called, and its jobs are found by their unique name. So if
the launcher dies in between, its jobs are still known. Slurm's accounting (sacct) is not needed.
"""

import secrets
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dml.run_folder.files import read_json, write_json
from launch.job import job_of
from launch.processes import STRAGGLER_SECONDS
from launch.resources import Resources
from launch.slurm_commands import SlurmError, is_installed, slurm
from launch.sweep import SweepError, SweepRun
from shards.files import open_lock, try_lock

ROOT = Path(__file__).resolve().parents[1]
SUBMISSIONS_FILE, LOCK_FILE, LOGS = "sweep.json", ".lock", "slurm"
# submitit's handler receives only the signals outside training, and counts every signal to a job of ten
# minutes or less as a timeout.
MAX_TIMEOUTS = 100
SIGNAL_SECONDS = 120  # from the signal to the end of the job: a step and a checkpoint must fit
SQUEUE_FORMAT = "ArrayJobID:20,ArrayTaskID:20,State:20,RestartCnt:10,Name:250,Reason:200"


@dataclass(frozen=True)
class QueuedJob:
    """A job in Slurm's queue; state and reason are Slurm's words."""

    job: str
    state: str
    restarts: int
    reason: str


def sweep_folder(runs: Sequence[SweepRun]) -> Path:
    return Path(runs[0].config.run.dir)


def group_by_resources(runs: Sequence[SweepRun]) -> dict[Resources, list[SweepRun]]:
    """The runs of each job array: its elements must ask for the same resources."""
    found: dict[Resources, list[SweepRun]] = {}
    for run in runs:
        found.setdefault(run.resources, []).append(run)
    return found


# ---- the batch script -----------------------------------------------------------------------------


def executor_parameters(name: str, resources: Resources, count: int, logs: Path) -> dict[str, Any]:
    """The parameters of submitit's SlurmExecutor."""
    optional = {
        "partition": resources.partition,
        "account": resources.account,
        "constraint": resources.constraint,
        "qos": resources.qos,
        "gres": resources.gres,
        "gpus_per_node": gpus_per_node(resources),
        "mem": f"{resources.memory_gb}GB" if resources.memory_gb else None,
    }
    finish = shlex.join([sys.executable, "-m", "launch.job", str(logs)])
    return {
        "job_name": name,
        "time": resources.minutes,
        "nodes": resources.nodes,
        "ntasks_per_node": resources.processes_per_node,
        "cpus_per_task": resources.cpus_per_process,
        **{key: value for key, value in optional.items() if value is not None},
        "array_parallelism": resources.parallel or count,
        "signal_delay_s": min(SIGNAL_SECONDS, 20 * resources.minutes),
        "additional_parameters": {"requeue": True},
        "stderr_to_stdout": True,
        # Since Slurm 22.05 srun does not take --cpus-per-task over from sbatch.
        "srun_args": [
            f"--wait={STRAGGLER_SECONDS}",
            f"--cpus-per-task={resources.cpus_per_process}",
        ],
        "setup": setup_lines(resources),
        "teardown": [f"{finish} $?"],
    }


def gpus_per_node(resources: Resources) -> str | None:
    """The value of --gpus-per-node; None without GPUs, and if gres asks for them."""
    if not resources.gpus_per_node or resources.gres_gpus is not None:
        return None
    kind = f"{resources.gpu_type}:" if resources.gpu_type else ""
    return f"{kind}{resources.gpus_per_node}"


def setup_lines(resources: Resources) -> list[str]:
    """The lines of shell before srun. A module that cannot be loaded ends the job."""
    lines = []
    if resources.modules:
        lines.append("command -v module >/dev/null || source /etc/profile")
        lines.append(f"module load {shlex.join(resources.modules)} || exit 1")
    lines += resources.setup
    lines.append(f"export PYTHONPATH={shlex.quote(str(ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}")
    if (
        resources.deepspeed or resources.accelerate
    ):  # DeepSpeed calls ninja, which may be there only
        lines.append(f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH")
    variables = resources.variables()
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    return [*lines, "export SLURM_EXPORT_ENV=ALL"]  # to the tasks, whatever sbatch --export says


def batch_script(name: str, resources: Resources, count: int, folder: Path) -> str:
    """The script that sbatch would get; Slurm itself is not needed."""
    from submitit.slurm.slurm import _make_sbatch_string

    logs = (folder / LOGS).absolute()
    command = shlex.join([sys.executable, "-u", "-m", "submitit.core._submit", str(logs)])
    array = count if count > 1 else None
    parameters = executor_parameters(name, resources, count, logs)
    return _make_sbatch_string(command=command, folder=logs, map_count=array, **parameters)


# ---- sweep.json -----------------------------------------------------------------------------------


def read_submissions(folder: Path) -> list[dict[str, Any]]:
    path = folder / SUBMISSIONS_FILE
    try:
        content = read_json(path)
        found: list[dict[str, Any]] = [] if content is None else content["submissions"]
        if isinstance(found, list) and all(map(_is_entry, found)):
            return found
    except (ValueError, KeyError):
        pass
    raise SlurmError(f"{path} is damaged; remove it when no job of the sweep is in the queue")


def _is_entry(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("job"), str | None)
        and isinstance(entry.get("runs"), list)
        and bool(entry["name"] and entry["runs"] and "job" in entry)
        and all(isinstance(run, str) for run in entry["runs"])
    )


def last_jobs(folder: Path) -> dict[str, str]:
    """Run -> the id of its last job, where it is known."""
    return {
        run: _job_id(entry, index)
        for entry in read_submissions(folder)
        if entry["job"]
        for index, run in enumerate(entry["runs"])
    }


def _job_id(entry: Mapping[str, Any], index: int) -> str:
    """A submission of one run is a plain job, not an array."""
    return f"{entry['job']}_{index}" if len(entry["runs"]) > 1 else entry["job"]


@contextmanager
def lock_sweep(folder: Path) -> Iterator[None]:
    """Allow one launcher at a time."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open_lock(folder / LOCK_FILE)
    except OSError as error:
        text = f"{error.filename} cannot be written: {error.strerror}; set run.dir to a writable folder"
        raise SlurmError(text) from None
    with file:
        if not try_lock(file):
            raise SweepError(["another launcher is working on this sweep; wait for it"], folder)
        yield


def submit(sweep: str, runs: Sequence[SweepRun]) -> list[str]:
    """Submit the runs as one job array per kind of resources; returns the ids of the jobs."""
    from submitit import SlurmExecutor

    if not is_installed("sbatch"):
        raise SlurmError("there is no sbatch here; --executor local runs the sweep on this machine")
    folder, jobs = sweep_folder(runs), list[str]()
    folder.mkdir(
        parents=True, exist_ok=True
    )  # of a search: inside that of the sweep, which is locked
    logs = (folder / LOGS).absolute()
    for resources, members in group_by_resources(runs).items():
        name = f"{sweep}-{secrets.token_hex(3)}".replace(" ", "_")
        earlier = read_submissions(folder)
        entry: dict[str, Any] = {"name": name, "runs": [run.name for run in members], "job": None}
        write_json(folder / SUBMISSIONS_FILE, {"submissions": [*earlier, entry]})
        try:
            executor = SlurmExecutor(logs, max_num_timeout=MAX_TIMEOUTS)
            executor.update_parameters(**executor_parameters(name, resources, len(members), logs))
            with executor.batch():
                submitted = [executor.submit(job_of(run)) for run in members]
        except (RuntimeError, OSError) as error:  # sbatch's own message, or there is no sbatch
            before = f"; job {', '.join(jobs)} was, and --status shows it" if jobs else ""
            what = f"{members[0].name} and the runs with the same resources"
            raise SlurmError(f"{what} were not submitted: {error}{before}") from None
        entry["job"] = submitted[0].job_id.partition("_")[0]
        write_json(folder / SUBMISSIONS_FILE, {"submissions": [*earlier, entry]})
        jobs.append(entry["job"])
    return jobs


# ---- Slurm's queue --------------------------------------------------------------------------------


def queued_jobs(folder: Path) -> dict[str, QueuedJob]:
    """Run -> its job in the queue, whoever submitted it."""
    runs_of: dict[str, list[str]] = {}  # by the name and by the id of the jobs
    for entry in read_submissions(folder):
        runs_of[entry["name"]] = entry["runs"]
        if entry["job"]:
            runs_of[entry["job"]] = entry["runs"]
    if not runs_of:
        return {}
    if not is_installed("squeue"):
        raise SlurmError(
            f"there is no squeue here to ask which runs of {folder} are in the queue; work where "
            f"Slurm is installed, or remove {folder / SUBMISSIONS_FILE} if no job is left"
        )
    found = {}
    for line in slurm("squeue", "--noheader", "--array", f"--Format={SQUEUE_FORMAT}").splitlines():
        job, number, state, restarts, *words = line.split()
        name, reason = words[0] if words else "", " ".join(words[1:])
        runs = runs_of.get(name) or runs_of.get(job) or []
        index = int(number) if number.isdigit() else 0
        if index < len(runs):
            job_id = f"{job}_{number}" if number.isdigit() else job
            found[runs[index]] = QueuedJob(job_id, state, int(restarts), reason)
    return found


def cancel(jobs: Sequence[QueuedJob]) -> None:
    if jobs:
        slurm("scancel", *(each.job for each in jobs))
