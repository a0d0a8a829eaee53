"""The runs of a sweep on this machine, one after another, as Slurm would run them on one node."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from launch.job import group, job_of
from launch.outcome import FAILED, LAUNCHER, STARTED, settle
from launch.status import work_on
from launch.submission import ROOT, STRAGGLERS
from launch.sweep import SweepRun

LOGS = "local"


def run_here(run: SweepRun, tick: Callable[[], None]) -> None:
    """To its end, good or bad; `tick` is called every now and then. KeyboardInterrupt lets it save."""
    job, where = job_of(run), Path(run.config.run.dir, LOGS)
    folder, count = Path(job.folder), run.resources.processes_per_node
    logs = [where / f"{run.name}_{rank}.log" for rank in range(count)]
    where.mkdir(parents=True, exist_ok=True)
    with work_on(folder) as lock:
        again = True
        while again:
            (folder / FAILED).unlink(missing_ok=True)
            processes = start(job.argv, logs, lock)
            try:
                code = wait(processes, tick)
            finally:
                end(processes)
            again = settle(folder, code, logs)


def start(argv: Sequence[str], logs: Sequence[Path], lock: int) -> list["subprocess.Popen[bytes]"]:
    port, started, count = free_port(), [], len(logs)
    for rank, log in enumerate(logs):
        place = group(rank, rank, count, count, "127.0.0.1", port)
        environment = {**os.environ, **place}
        with log.open("ab") as out:
            out.write(f"{LAUNCHER}{STARTED}{count} processes\n".encode())
            out.flush()
            started.append(
                subprocess.Popen(
                    [sys.executable, str(ROOT / "dml" / "train.py"), *argv],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    pass_fds=[lock],
                    start_new_session=True,  # Ctrl-C comes once, from here
                )
            )
    return started


def wait(processes: Sequence["subprocess.Popen[bytes]"], tick: Callable[[], None]) -> int:
    """The exit code as srun tells it: the highest, 128 and more for a signal."""
    deadline = None
    while any(process.poll() is None for process in processes):
        ended = any(process.returncode is not None for process in processes)
        deadline = deadline or (time.monotonic() + STRAGGLERS if ended else None)
        if deadline and time.monotonic() > deadline:
            break
        time.sleep(0.5)
        tick()
    return max(128 - code if code < 0 else code for code in codes(processes))


def codes(processes: Sequence["subprocess.Popen[bytes]"]) -> list[int]:
    return [-signal.SIGKILL if (code := p.poll()) is None else code for p in processes]


def end(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Ask what still runs to save and leave, and make it."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + 2 * STRAGGLERS
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
