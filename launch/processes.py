"""The processes of one run on this machine: started as ranks of a group, waited for, ended together."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dml.distributed.signals import LAUNCHER
from dml.train import FINISHED, INTERRUPTED

STRAGGLER_SECONDS = 20  # for the other processes to end after one has failed

Process = subprocess.Popen[bytes]


def process_environment(
    rank: int, local_rank: int, processes: int, per_node: int, address: str, port: int
) -> dict[str, str]:
    """The variables that torch.distributed and accelerate read."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(per_node),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        # As torch's launchers set it; dml/distributed/processes.py divides the cores.
        "OMP_NUM_THREADS": "1",
    }


def start_rank(
    command: Sequence[str],
    rank: int,
    processes: int,
    port: int,
    env: Mapping[str, str],
    **output: Any,
) -> Process:
    """Start one process of a group on this machine. output: of Popen, such as stdout and pass_fds."""
    variables = process_environment(rank, rank, processes, processes, "127.0.0.1", port)
    return subprocess.Popen(
        command,
        env={**os.environ, **env, **variables, LAUNCHER: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches only the launcher, which passes it on
        **output,
    )


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def wait(
    processes: Sequence[Process], update: Callable[[], None] = lambda: None, pause: float = 0.5
) -> list[int]:
    """Wait until all processes have ended; returns their ranks in the order in which they ended.

    After a failure the others have STRAGGLER_SECONDS; a rank that still runs then is not in the list.
    After a success or an interruption they have all the time they need to save.
    """
    ended: list[int] = []
    deadline = None
    while True:
        ended += [r for r, p in enumerate(processes) if r not in ended and p.poll() is not None]
        if len(ended) == len(processes) or (deadline and time.monotonic() > deadline):
            return ended
        failed = any(processes[r].returncode not in (FINISHED, INTERRUPTED) for r in ended)
        if failed and not deadline:
            deadline = time.monotonic() + STRAGGLER_SECONDS
        time.sleep(pause)
        update()


def end(processes: Sequence[Process]) -> None:
    """Ask the processes that still run to save and end; kill those that do not."""
    send(processes, signal.SIGTERM)
    deadline = time.monotonic() + 2 * STRAGGLER_SECONDS
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def send(processes: Sequence[Process], number: int) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)
