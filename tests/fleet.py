"""Starts real processes: a worker script in a group of processes, or `accelerate launch`."""

import os
import random
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from forks import Forked

ROOT = Path(__file__).parents[1]
WORKERS = Path(__file__).parent / "workers"
QUICK = Path(__file__).parent / "quick"

# A shell that runs the tests in the background ignores Ctrl-C, and child processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True)
class Ended:
    """How one process ended."""

    returncode: int
    stdout: str
    stderr: str


def free_port():
    """A random port below 32768, where Linux begins to give ports to clients: another test that runs
    at the same time finds another one."""
    while True:
        port = random.SystemRandom().randrange(10_000, 20_000)
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def environment(**more):
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "DS_"))}
    bin_folder = str(Path(sys.executable).parent)
    paths = {
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{WORKERS}:{QUICK}",  # workers run from any folder
    }
    # DeepSpeed compiles an operator on first use, which names the folder of the packages: two
    # environments that share the cache would compile it again and again.
    cache = {"TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / "torch_extensions")}
    return {**inherited, **paths, **cache, "OMP_NUM_THREADS": "1", **more}


def ranks(processes, port=None):
    """The variables by which a launcher tells each process of a group which one it is."""
    port = free_port() if port is None else port
    return [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        for rank in range(processes)
    ]


def start(worker, processes, *arguments, timeout=240, variables=None):
    """Run a worker script in several processes, as a launcher would; wait for all of them.

    Returns how each ended. None may outlive the time-out: a hang is a failure.
    """
    each = [{**rank, **(variables or {})} for rank in ranks(processes)]
    return start_each([WORKERS / worker, *arguments], each, timeout)


def program(script, *arguments, timeout=240):
    """Run a script of this project in a process of its own; how it ended."""
    (ended,) = start_each([ROOT / script, *arguments], [{}], timeout)
    return ended


def start_each(command, variables, timeout, cwd=ROOT):
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        said = [
            (Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err"))
            for rank in range(len(variables))
        ]
        running = [
            Forked(command, cwd, environment(**each), *files)
            for each, files in zip(variables, said, strict=True)
        ]
        try:
            codes = [p.wait(max(0.1, deadline - time.monotonic())) for p in running]
        finally:
            for process in running:
                process.kill()
                process.wait()
        return [
            Ended(code, out.read_text(), err.read_text())
            for code, (out, err) in zip(codes, said, strict=True)
        ]


def run(worker, processes, *arguments, **more):
    """`start`, and every process must exit with 0."""
    ended = start(worker, processes, *arguments, **more)
    for rank, process in enumerate(ended):
        assert process.returncode == 0, f"process {rank} of {processes}:\n{process.stderr}"
    return ended


ACCELERATE = [WORKERS / "launching.py", Path(sys.executable).with_name("accelerate"), "launch"]


def launch(*arguments, **more):
    """`accelerate launch` as a user would type it, on a port of its own."""
    command = [*ACCELERATE, "--main_process_port", free_port(), *arguments]
    (ended,) = start_each(command, [more], timeout=280)
    return ended
