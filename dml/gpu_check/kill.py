"""A training of which one rank is killed: the others end soon, and the same command resumes it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dml.gpu_check.group import ROOT
from dml.gpu_check.place import Sizes
from dml.gpu_check.verdict import FAILED, OK, SLOW, Line

START_SECONDS, END_SECONDS, GOAL_SECONDS = 600.0, 120.0, 30.0
RUN = "gpu_check"


def kill_lines(processes: int, sizes: Sizes, folder: Path, *sets: str) -> Iterator[Line]:
    """folder: where the run may be. sets: more settings of it."""
    name, victim = "a killed process", processes - 1
    settings = ["--set", f"run.dir={folder}", f"run.name={RUN}", "run.log_steps=1"]
    settings += [f"length.steps={sizes.training_steps}", "save.every_minutes=0.01", *sets]
    command = [sys.executable, "-m", "dml.cli", "train", "--config", "icons_mini"]
    command += ["--processes", str(processes), *settings]
    run, log = folder / RUN, folder / "log"
    with launch(command, log) as training:
        try:
            reached = until(lambda: is_saved(run), training, START_SECONDS)
            rank = find_rank(training.pid, victim) if reached else None
            if rank is None:
                yield failed(name, f"rank {victim} never reached a checkpoint", log)
                return
            start = time.monotonic()
            os.kill(rank, signal.SIGKILL)
            code = training.wait(END_SECONDS)
            taken = time.monotonic() - start
        except subprocess.TimeoutExpired:
            yield failed(name, f"the others still ran {END_SECONDS:g} seconds later", log)
            return
        finally:
            stop(training)
    if code == 0:
        yield failed(name, "the training finished before it was killed", log)
        return
    verdict = OK if taken <= GOAL_SECONDS else SLOW
    text = f"rank {victim} of {processes} was killed; all ended {taken:.1f} seconds later"
    yield Line(name, verdict, text, {"seconds": taken, "exit code": code})
    again: int | None = None
    with launch(command, log) as training:
        try:
            again = training.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            stop(training)
    if again != 0 or "resuming after step" not in log.read_text(errors="replace"):
        yield failed("the same command again", f"it did not resume (exit code {again})", log)
        return
    yield Line("the same command again", OK, "it resumed, and finished")


def launch(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with log.open("wb") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )


def stop(training: subprocess.Popen[bytes]) -> None:
    """A launcher that is killed takes its processes along: they save, and leave."""
    if training.poll() is None:
        training.kill()
        training.wait()


def until(ready: Callable[[], bool], training: subprocess.Popen[bytes], most: float) -> bool:
    deadline = time.monotonic() + most
    while time.monotonic() < deadline and training.poll() is None:
        if ready():
            return True
        time.sleep(0.05)
    return False


def is_saved(run: Path) -> bool:
    return any(run.glob("checkpoints/step-*"))


def find_rank(launcher: int, rank: int) -> int | None:
    """The process of a rank: a child of the launcher, or with one process the launcher itself."""
    if rank == 0:
        return launcher
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            variables = (path / "environ").read_bytes().split(b"\0") if parent == launcher else []
        except OSError:  # it has ended meanwhile, or is another user's
            continue
        if f"RANK={rank}".encode() in variables:
            return int(path.name)
    return None


def failed(name: str, why: str, log: Path) -> Line:
    return Line(name, FAILED, why, {"log": log.read_text(errors="replace")[-4_000:]})
