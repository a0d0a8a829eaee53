"""One run as a Slurm job; the batch script (launch/submission.py) has two lines:

    srun python -m submitit.core._submit FOLDER     a task for every process: Job()
    python -m launch.job FOLDER $?                  once, when all tasks have ended: finish()

A signal in training, before a preemption or the time limit, ends it with a checkpoint and 75; one
that comes before the first step or after the last meets submitit's handler, which requeues as well.
A process that is killed takes the others with it (srun --wait). What happens next is decided in one
place, finish(); the truth about a run is in its own folder, never in submitit's pickles.
"""

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from dml.train import main as train
from launch.outcome import CRASHED, FAILED, note, settle
from launch.sweep import SweepRun

if TYPE_CHECKING:
    from submitit import JobEnvironment
    from submitit.helpers import DelayedSubmission

FIRST_PORT, PORTS = 20_000, 12_000  # below those that Linux gives to clients, 32768 and up
APART = 1_009  # between the ports of a job's starts: the next ones are those of the next jobs
TRIES, PAUSE = 3, 20  # seconds; Slurm's controller may be busy, or restarting


@dataclass(frozen=True)
class Job:
    """folder: the run's. argv: of dml/train.py."""

    folder: str
    argv: tuple[str, ...]

    def __call__(self) -> None:
        from submitit import JobEnvironment

        here = JobEnvironment()
        os.environ.update(distributed(here))
        if here.global_rank == 0:
            (Path(self.folder) / FAILED).unlink(missing_ok=True)
        code = CRASHED
        try:
            code = train(self.argv)
        finally:
            if isinstance(sys.exc_info()[1], Exception):
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            # At the interpreter's own end gloo's threads may abort, and others wait for each other.
            os._exit(code)

    def checkpoint(self) -> "DelayedSubmission":
        """For submitit's signal handler. There is nothing to save: the run's folder has it."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def job_of(run: SweepRun) -> Job:
    folder = Path(run.config.run.dir, run.config.run.name)
    return Job(str(folder), ("--config", *run.files, "--set", *run.sets))


def distributed(here: "JobEnvironment") -> dict[str, str]:
    # another port after a requeue: the last one may be what was busy
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    port = FIRST_PORT + (int(here.raw_job_id) + APART * restarts) % PORTS
    per_node = here.num_tasks // here.num_nodes
    place = (here.global_rank, here.local_rank)
    return group(*place, here.num_tasks, per_node, here.hostnames[0], port)


def group(
    rank: int, local_rank: int, processes: int, per_node: int, address: str, port: int
) -> dict[str, str]:
    """What torch.distributed and accelerate read."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(per_node),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",  # as launchers have it: dml/processes.py shares the cores
    }


def finish(folder: str, code: int) -> int:
    """After the tasks, in the batch script: note the outcome, and requeue if there is more to do."""
    from submitit import JobEnvironment
    from submitit.core.utils import DelayedSubmission

    os.environ["SUBMITIT_FOLDER"] = folder
    here = JobEnvironment()
    job = cast(Job, DelayedSubmission.load(here.paths.submitted_pickle).function)
    if settle(Path(job.folder), code, logs(Path(folder), here.job_id)):
        # By the name of the array's element: the raw id of the last one means the whole array.
        why = requeue(here.job_id)
        if why:
            note(Path(job.folder), f"{here.job_id} could not be requeued: {why}")
    return code


def logs(folder: Path, job: str) -> list[Path]:
    """Of the job's tasks, by rank."""
    found = folder.glob(f"{job}_*_log.out")
    return sorted(found, key=lambda path: (len(path.name), path.name))


def requeue(job: str) -> str:
    """Why it could not be, or nothing."""
    why = ""
    for attempt in range(TRIES):
        time.sleep(PAUSE if attempt else 0)
        try:
            # Not if somebody has cancelled it, or Slurm itself has requeued it.
            if slurm("squeue", "--noheader", f"--jobs={job}", "--format=%T") == "RUNNING":
                slurm("scontrol", "requeue", job)
            return ""
        except subprocess.CalledProcessError as error:
            why = error.stderr.strip()
        except (OSError, subprocess.TimeoutExpired) as error:
            why = str(error)
    return why


def slurm(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def main(argv: Sequence[str]) -> int:
    folder, code = argv
    return finish(folder, int(code))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
