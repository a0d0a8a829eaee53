"""Starts the processes of checks, and collects their lines. A check that ends its processes, or that
takes too long, is a failed line, and the checks after it run in new processes."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from dml.gpu_check.place import Sizes
from dml.gpu_check.verdict import FAILED, Line
from dml.run_folder.files import read_lines
from launch.processes import STRAGGLER_SECONDS, Process, end, free_port, start_rank

ROOT = Path(__file__).resolve().parents[2]
MOST_SECONDS = 1_800.0  # DeepSpeed compiles at first use
PAUSE_SECONDS = 0.2
TORCH_RANK = re.compile(r"^\[rank\d+\]: ")


def run_checks(
    checks: Sequence[str], processes: int, sizes: Sizes, most_seconds: float = MOST_SECONDS
) -> Iterator[Line]:
    left = list(checks)
    while left:
        with TemporaryDirectory() as folder:
            failed = None
            for line in run_group(left, processes, sizes, most_seconds, Path(folder)):
                failed = line if line.figures.get("ended") else None
                yield line
        left = left[left.index(failed.name) + 1 :] if failed else []


def run_group(
    checks: Sequence[str], processes: int, sizes: Sizes, most_seconds: float, folder: Path
) -> Iterator[Line]:
    """The lines of the checks, until one of them fails with its processes."""
    out, logs = folder / "lines.jsonl", [folder / f"{rank}.log" for rank in range(processes)]
    command = [sys.executable, "-m", "dml.gpu_check.rank", str(out), json.dumps(asdict(sizes))]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    port, started = free_port(), list[Process]()
    for rank, log in enumerate(logs):
        with log.open("wb") as file:
            output = {"stdout": file, "stderr": file}
            variables = {"PYTHONPATH": path}
            started.append(
                start_rank([*command, *checks], rank, processes, port, variables, **output)
            )

    begun, read = checks[0], 0

    def new_lines() -> Iterator[Line]:
        nonlocal begun, read
        contents = read_lines(out)[read:]
        read += len(contents)
        for content in contents:
            if "begins" in content:
                begun = content["begins"]
            else:
                yield Line(**content)

    problem: int | str | None = None
    try:
        for found in watch(started, most_seconds):
            problem = found
            yield from new_lines()
    finally:
        end(started)
    yield from new_lines()
    if problem is not None:
        why = problem if isinstance(problem, str) else explain(problem, logs[problem])
        texts = [f"process {rank}\n{log.read_text()[-4_000:]}" for rank, log in enumerate(logs)]
        yield Line(begun, FAILED, why, {"ended": True, "log": "\n".join(texts)})


def watch(processes: Sequence[Process], most_seconds: float) -> Iterator[int | str | None]:
    """Yields again and again what is wrong, until all processes have ended or are to be ended: nothing,
    the rank that failed first, or that it takes too long."""
    failed, deadline = None, time.monotonic() + most_seconds
    while True:
        codes = [process.poll() for process in processes]
        if failed is None and any(codes):
            failed = next(rank for rank, code in enumerate(codes) if code)
            deadline = time.monotonic() + STRAGGLER_SECONDS
        yield failed
        if None not in codes:
            return
        if time.monotonic() > deadline:
            break
        time.sleep(PAUSE_SECONDS)
    if failed is None:
        yield f"took longer than {most_seconds:g} seconds"


def explain(rank: int, log: Path) -> str:
    """The last line that a process has left."""
    words = log.read_text(errors="replace").strip().splitlines()
    last = words[-1][:300] if words else "it ended without a word"
    return f"process {rank}: {TORCH_RANK.sub('', last)}"
