"""What the benchmarks share: repetitions, memory, and rows with a goal.

A ratio is the median over repetitions of ours / theirs, both of the same repetition, so that drifts in
the speed of the machine cancel.
"""

import argparse
import json
import multiprocessing
import operator
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

MIB = 2**20
SIGNS = {"<=": operator.le, "<": operator.lt, ">=": operator.ge, "==": operator.eq}
HEADER = ("part", "what", "value", "against", "ratio", "spread", "goal", "")


@dataclass(frozen=True)
class Row:
    """One result. value has a unit; spread and goal are of the ratio; goal is such as '<= 1.5', or ''
    for none."""

    part: str
    what: str
    value: str
    against: str
    ratio: float
    spread: str
    goal: str = ""

    @property
    def bound(self) -> float | None:
        return float(self.goal.split()[1]) if self.goal else None

    @property
    def ok(self) -> bool | None:
        """Whether the goal is met; None without a goal."""
        return SIGNS[self.goal.split()[0]](self.ratio, self.bound) if self.goal else None

    def cells(self) -> tuple[str, ...]:
        verdict = {None: "", True: "met", False: "missed"}[self.ok]
        first = self.part, self.what, self.value, self.against
        return *first, number(self.ratio), self.spread, self.goal, verdict

    def __str__(self) -> str:
        against = f"{number(self.ratio)} against {self.against}"
        return f"{self.part}: {self.what}: {against}, goal {self.goal}"


clocks = {"work": time.perf_counter}


class CpuTime(argparse.Action):
    def __call__(self, *_: object) -> None:
        clocks["work"] = time.process_time


def as_in_training() -> None:
    """Use two threads and keep freed memory, for our code and for what it is compared with. With --cpu-time
    one thread: threads that wait for each other on a busy machine spin."""
    import torch

    from dml.distributed.malloc import keep_freed_memory

    keep_freed_memory()
    torch.set_num_threads(2 if clocks["work"] is time.perf_counter else 1)


# ---- measuring ----------------------------------------------------------------------------------


def interleaved(
    work: Mapping[str, Callable[[], object]], repeats: int, warm_ups: int = 1
) -> dict[str, list[float]]:
    """Seconds of every repetition, each of which runs all work once, after the warm-ups: of the clock, or
    with --cpu-time of the processor."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    program = Path(sys.argv[0]).stem
    for repeat in tqdm(range(-warm_ups, repeats), program, leave=False):
        for name, action in work.items():
            start = clocks["work"]()
            action()
            took = clocks["work"]() - start
            if repeat >= 0:
                seconds[name].append(took)
    return seconds


def resident(field: str) -> int:
    """The memory of this process in bytes (Linux): VmRSS is the current use, VmHWM the peak."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def extra_memory(work: Callable[[], object]) -> int:
    """The peak memory of the work in bytes, beyond the memory in use before it."""
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # resets the peak
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


# ---- several processes --------------------------------------------------------------------------


def in_processes(count: int, work: Callable[..., Any], *arguments: object) -> list[Any]:
    """What `work` returns in each of so many processes, which find each other by the variables of a launcher.
    They are forks of this one: before its first threads, and without another import of torch."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])

    def become(rank: int, answers: Any) -> None:
        group = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update(group, RANK=str(rank))
        answers.send(work(*arguments))
        os._exit(0)  # without the end of the interpreter, at which the threads of gloo may abort

    running = []
    for rank in range(count):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=become, args=(rank, theirs), daemon=True)
        process.start()
        theirs.close()  # so that a process that dies is an end of file
        running.append((process, ours))
    found = [ours.recv() for _, ours in running]
    for process, _ in running:
        process.join()
    return found


# ---- rows ---------------------------------------------------------------------------------------


def compared(
    part: str, what: str, value: str, against: str, ratios: Sequence[float], goal: str = ""
) -> Row:
    return Row(part, what, value, against, statistics.median(ratios), spread(ratios), goal)


def timed(
    part: str,
    what: str,
    ours: Sequence[float],
    against: str,
    theirs: Sequence[float],
    goal: str = "",
) -> Row:
    """A row that compares seconds, repetition by repetition."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return compared(part, what, duration(statistics.median(ours)), against, ratios, goal)


def spread(values: Sequence[float]) -> str:
    """The quartiles, or the extremes of fewer than five values; empty for a single value."""
    if len(values) == 1:
        return ""
    low, high = min(values), max(values)
    if len(values) >= 5:
        low, _, high = statistics.quantiles(values, method="inclusive")
    return f"{number(low)} - {number(high)}"


def number(x: float) -> str:
    return f"{x:.3g}" if abs(x) < 1000 else f"{x:,.0f}"


def duration(seconds: float) -> str:
    return f"{number(seconds)} s" if seconds >= 1 else f"{number(1e3 * seconds)} ms"


def table(rows: Iterable[Row]) -> str:
    lines = [HEADER, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


# ---- programs -----------------------------------------------------------------------------------


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    made.add_argument(
        "--cpu-time",
        action=CpuTime,
        nargs=0,
        help="compare seconds of the processor instead of the clock's, on one thread: for a busy machine, "
        "and work that does not wait",
    )
    return made


def finish(rows: Sequence[Row], json_path: Path | None) -> int:
    """Print the rows, write them to `json_path` if given, and return the exit code: 1 if a goal is
    missed."""
    print(table(rows))
    if json_path:
        json_path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    missed = [row for row in rows if row.ok is False]
    for row in missed:
        print(f"missed: {row}", file=sys.stderr)
    return int(bool(missed))


def read_rows(path: Path) -> list[Row]:
    return [Row(**row) for row in json.loads(path.read_text())]
