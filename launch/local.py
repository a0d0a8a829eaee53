"""One run on this machine, with the processes that Slurm would start on one node."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from launch.job import job_of, process_environment
from launch.outcome import LOCAL_PREFIX, STARTED, record_outcome
from launch.run_files import FAILED
from launch.status import hold_run
from launch.submission import ROOT, STRAGGLER_SECONDS
from launch.sweep import SweepError, SweepRun
from shards.files import no_follow, remove

LOGS = "local"


def run_here(run: SweepRun, update: Callable[[], None]) -> None:
    """Run until it is finished or has failed; `update` is called twice per second.

    On KeyboardInterrupt the processes are asked to save a checkpoint and end.
    """
    job, log_folder = job_of(run), Path(run.config.run.dir, LOGS)
    folder, count = Path(job.folder), run.resources.processes_per_node
    logs = [log_folder / f"{run.name}_{rank}.log" for rank in range(count)]
    log_folder.mkdir(parents=True, exist_ok=True)
    with hold_run(folder) as lock:
        again = True
        while again:
            remove(folder / FAILED)
            processes = start(job.argv, logs, lock)
            try:
                code = wait(processes, update)
            finally:
                end(processes)
            again = record_outcome(folder, code, logs)


def start(argv: Sequence[str], logs: Sequence[Path], lock: int) -> list["subprocess.Popen[bytes]"]:
    port, started, count = free_port(), [], len(logs)
    for rank, log in enumerate(logs):
        variables = process_environment(rank, rank, count, count, "127.0.0.1", port)
        with open_log(log) as out:
            out.write(f"{LOCAL_PREFIX}{STARTED}{count} processes\n".encode())
            out.flush()
            started.append(
                subprocess.Popen(
                    [sys.executable, str(ROOT / "dml" / "train.py"), *argv],
                    env={**os.environ, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    pass_fds=[lock],
                    start_new_session=True,  # Ctrl-C reaches only this launcher, which then ends them
                )
            )
    return started


def open_log(path: Path) -> IO[bytes]:
    try:
        return open(path, "ab", opener=no_follow)
    except OSError as error:
        text = f"the log {path} cannot be written: {error.strerror}; remove it"
        raise SweepError([text], path.parent) from None


def wait(processes: Sequence["subprocess.Popen[bytes]"], update: Callable[[], None]) -> int:
    """The exit code as srun returns it: the highest, where a signal counts as 128 plus its number."""
    deadline = None
    while any(process.poll() is None for process in processes):
        ended = any(process.returncode is not None for process in processes)
        deadline = deadline or (time.monotonic() + STRAGGLER_SECONDS if ended else None)
        if deadline and time.monotonic() > deadline:
            break
        time.sleep(0.5)
        update()
    return max(128 - code if code < 0 else code for code in codes(processes))


def codes(processes: Sequence["subprocess.Popen[bytes]"]) -> list[int]:
    return [-signal.SIGKILL if (code := p.poll()) is None else code for p in processes]


def end(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Ask the processes that still run to save and end; kill those that do not."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + 2 * STRAGGLER_SECONDS
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port
