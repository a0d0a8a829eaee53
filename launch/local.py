"""One run on this machine, with the processes that Slurm would start on one node."""

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from launch.job import job_of
from launch.outcome import LOCAL_PREFIX, STARTED, record_outcome
from launch.processes import Process, end, free_port, start_rank, wait
from launch.run_files import FAILED
from launch.status import hold_run
from launch.submission import ROOT
from launch.sweep import SweepError, SweepRun
from launch.zero import search_path
from shards.files import no_follow, remove

LOGS = "local"


def run_here(run: SweepRun, update: Callable[[], None]) -> None:
    """Run until it is finished or has failed; `update` is called twice per second.

    On KeyboardInterrupt the processes are asked to save a checkpoint and end.
    """
    job, log_folder = job_of(run), Path(run.config.run.dir, LOGS)
    folder, count = Path(job.folder), run.resources.processes_per_node
    variables = {"PATH": search_path(), **run.resources.variables()}
    logs = [log_folder / f"{run.name}_{rank}.log" for rank in range(count)]
    log_folder.mkdir(parents=True, exist_ok=True)
    with hold_run(folder) as lock:
        again = True
        while again:
            remove(folder / FAILED)
            processes = start(job.argv, logs, lock, variables)
            try:
                code = highest_code(processes, wait(processes, update))
            finally:
                end(processes)
            again = record_outcome(folder, code, logs)


def start(
    argv: Sequence[str], logs: Sequence[Path], lock: int, variables: Mapping[str, str]
) -> list[Process]:
    port, started, count = free_port(), [], len(logs)
    command = [sys.executable, str(ROOT / "dml" / "train.py"), *argv]
    for rank, log in enumerate(logs):
        with open_log(log) as out:
            out.write(f"{LOCAL_PREFIX}{STARTED}{count} processes\n".encode())
            out.flush()
            output = {"stdout": out, "stderr": out, "pass_fds": [lock]}
            started.append(start_rank(command, rank, count, port, variables, **output))
    return started


def open_log(path: Path) -> IO[bytes]:
    try:
        return open(path, "ab", opener=no_follow)
    except OSError as error:
        text = f"the log {path} cannot be written: {error.strerror}; remove it"
        raise SweepError([text], path.parent) from None


def highest_code(processes: Sequence[Process], ended: Sequence[int]) -> int:
    """The exit code as srun returns it: the highest, where a signal counts as 128 plus its number.
    Processes that have not ended are about to be killed."""
    codes = [processes[rank].returncode for rank in ended]
    codes += [-signal.SIGKILL] * (len(processes) - len(ended))
    return max(128 - code if code < 0 else code for code in codes)
