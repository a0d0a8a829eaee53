"""Writes docs/benchmarks.md: what was measured, on which machine, and which goals are met."""

import ast
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path

from measure import HEADER, Row

from shards.cores import available_cores

HERE = Path(__file__).parent
PACKAGES = ("torch", "numpy", "accelerate", "faiss-cpu", "pytorch-metric-learning", "pillow")


def page(rows: Sequence[Row], problems: Mapping[str, str], command: str) -> str:
    """The page; `problems` says for each part that did not run why."""
    missed = [f"- missed: {row}" for row in rows if row.ok is False]
    absent = [f"- not run: {part}: {reason}" for part, reason in problems.items()]
    goals = sum(row.ok is not None for row in rows)
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench`. A ratio is the median over repetitions of the value divided by what",
        "it is compared with, both of the same repetition. The spread gives the quartiles, or the",
        "extremes of fewer than five repetitions.",
        "",
        "![The ratios and their goals](images/benchmarks.svg)",
        "",
        f"{goals - len(missed)} of {goals} goals are met.",
    ]
    lines += ["", *missed, *absent] if missed or absent else []
    for part, own in groupby(rows, key=lambda row: row.part):
        lines += ["", f"## {part}", "", title(part), "", *markdown(own)]
    return "\n".join([*lines, "", "## Where", "", *where(command)]) + "\n"


def title(part: str) -> str:
    """The first line of the benchmark's own description."""
    return ast.get_docstring(ast.parse((HERE / f"{part}.py").read_text())).splitlines()[0]  # type: ignore[union-attr]


def markdown(rows: Iterable[Row]) -> list[str]:
    cells = [HEADER, ["---"] * len(HEADER), *(row.cells() for row in rows)]
    return [f"| {' | '.join(line[1:])} |" for line in cells]


def where(command: str) -> list[str]:
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    facts = {
        "machine": f"{processor()}, {available_cores()} cores, {gib:.0f} GiB, {platform.system()}",
        "versions": ", ".join([f"Python {platform.python_version()}", *versions()]),
        "commit": commit(),
        "command": f"`{command}`",
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
    }
    return [f"- {name}: {fact}" for name, fact in facts.items()]


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def versions() -> Iterable[str]:
    for package in PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            yield f"{package} missing"


def commit() -> str:
    """The commit, with `-dirty` if the code differs from it."""
    if not shutil.which("git"):
        return "unknown"
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    run = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"
