"""One run as a Slurm job. The batch script (launch/submission.py) has two commands:

    srun python -m submitit.core._submit FOLDER     one task per process, which calls Job()
    python -m launch.job FOLDER $?                  once, after all tasks have ended: finish()

Slurm sends a signal before a preemption or the time limit. During training, dml/train.py handles it:
it saves a checkpoint and exits with 75. Before the first step and after the last one submitit's handler
receives it and requeues the job, too. If a process is killed, srun --wait ends the others. finish()
alone decides what happens next, and it reads the run's folder, never submitit's pickles.
"""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from dml.run_folder.folder import folder_of
from dml.train import main as train
from launch.outcome import note, record_outcome
from launch.processes import process_environment
from launch.run_files import FAILED
from launch.slurm_commands import SlurmError, slurm
from launch.sweep import SweepRun
from shards.files import remove
from shards.output import run_program

if TYPE_CHECKING:
    from submitit import JobEnvironment
    from submitit.helpers import DelayedSubmission

FIRST_PORT, PORTS = 20_000, 12_000  # below Linux's ports for clients, which begin at 32768
PORT_STRIDE = 1_009  # between the starts of one job: neighbouring ports belong to the next jobs
REQUEUE_ATTEMPTS, PAUSE_SECONDS = 3, 20  # Slurm's controller may be busy or restarting


@dataclass(frozen=True)
class Job:
    """folder: the run's. argv: the arguments of dml/train.py."""

    folder: str
    argv: tuple[str, ...]

    def __call__(self) -> None:
        from submitit import JobEnvironment

        here = JobEnvironment()
        os.environ.update(task_environment(here))
        if here.global_rank == 0:
            remove(Path(self.folder) / FAILED)
        run_program(lambda: train(self.argv))

    def checkpoint(self) -> "DelayedSubmission":
        """For submitit's signal handler. There is nothing to save: the run's folder has it all."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def job_of(run: SweepRun) -> Job:
    return Job(str(folder_of(run.config)), ("--config", *run.files, "--set", *run.sets))


def task_environment(here: "JobEnvironment") -> dict[str, str]:
    # After a requeue the port changes: the last one may have been in use.
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    port = FIRST_PORT + (int(here.raw_job_id) + PORT_STRIDE * restarts) % PORTS
    per_node = here.num_tasks // here.num_nodes
    ranks = (here.global_rank, here.local_rank)
    return process_environment(*ranks, here.num_tasks, per_node, here.hostnames[0], port)


def finish(folder: str, code: int) -> int:
    """Record the outcome of the tasks, and requeue the job if the run is to be started again."""
    from submitit import JobEnvironment
    from submitit.core.utils import DelayedSubmission

    os.environ["SUBMITIT_FOLDER"] = folder
    here = JobEnvironment()
    job = cast(Job, DelayedSubmission.load(here.paths.submitted_pickle).function)
    if record_outcome(Path(job.folder), code, task_logs(Path(folder), here.job_id)):
        # By the id of the array's element: the raw id of the last element means the whole array.
        problem = requeue(here.job_id)
        if problem:
            note(Path(job.folder), f"{here.job_id} could not be requeued: {problem}")
    return code


def task_logs(folder: Path, job: str) -> list[Path]:
    """The logs of a job's tasks, by rank."""
    found = folder.glob(f"{job}_*_log.out")
    return sorted(found, key=lambda path: (len(path.name), path.name))


def requeue(job: str) -> str | None:
    """Requeue a running job; returns why that failed, or None."""
    problem = None
    for attempt in range(REQUEUE_ATTEMPTS):
        time.sleep(PAUSE_SECONDS if attempt else 0)
        try:
            # Leave it alone if a user has cancelled it, or if Slurm has requeued it already.
            if slurm("squeue", "--noheader", f"--jobs={job}", "--format=%T").strip() == "RUNNING":
                slurm("scontrol", "requeue", job)
            return None
        except SlurmError as error:
            problem = str(error)
    return problem


def main(argv: Sequence[str]) -> int:
    folder, code = argv
    return finish(folder, int(code))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
