"""The results of many runs beside the paper's: a page, a Markdown table and a CSV.

    python launch/report.py runs/sop_batch_size --out report
    python launch/report.py runs --out report --sweep configs/sweeps/*.yaml

Every folder below RUNS with a config.yaml (or failed.json) is a run; runs that differ only in the seed
are one row. Runs that never started are known from launch/slurm.py's sweep.json, or from --sweep.
Writes report.html (self-contained), report.md and runs.csv; the same runs give the same files.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from launch.page import page
from launch.paper import read_tables
from launch.records import FINISHED, Study, read_studies
from launch.slurm_commands import SlurmError
from launch.sweep import SweepError, read_sweep
from launch.tables import as_csv, markdown
from shards.files import write_whole
from shards.output import exit_code, program_name


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=program_name("launch/report.py"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", metavar="RUNS", type=Path, help="a folder with runs, at any depth")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="where to write")
    parser.add_argument(
        "--sweep",
        metavar="FILE",
        nargs="+",
        default=[],
        help="list the runs of these sweeps that never started",
    )
    arguments = parser.parse_args(argv)
    try:
        studies = collect(arguments.runs, arguments.sweep)
        write(studies, arguments.out)
    except (SweepError, SlurmError, ReportError) as error:
        print(f"{program_name('launch/report.py')}: {error}", file=sys.stderr)
        return 2
    states = [run.state for study in studies for run in study.runs]
    finished = f"{states.count(FINISHED)} of {len(states)} runs finished"
    print(f"{arguments.out / 'report.html'}: {finished}")
    return 0


class ReportError(ValueError):
    """There is nothing to report on, or nowhere to write it."""


def collect(root: Path, sweeps: Iterable[str]) -> tuple[Study, ...]:
    if not os.path.isdir(root):
        raise ReportError(f"{root} is not a folder; give the folder of the runs, such as runs")
    expected = [(sweep.name, run.name) for sweep in map(read_sweep, sweeps) for run in sweep.runs]
    studies = read_studies(root, expected)
    if not studies:
        raise ReportError(f"{root} has no runs; a run is a folder with a config.yaml")
    return studies


def write(studies: Sequence[Study], out: Path) -> None:
    tables = read_tables()
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in {
            "report.html": page(studies, tables),
            "report.md": markdown(studies, tables),
            "runs.csv": as_csv(studies, tables),
        }.items():
            # a folder's name need not be UTF-8
            write_whole(out / name, text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise ReportError(f"{out} cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
