"""The results of many runs beside the paper's: a page, a Markdown table and a CSV.

    python launch/report.py runs/sop_batch_size --out report
    python launch/report.py runs --out report --sweep configs/sweeps/*.yaml
    python launch/report.py runs/NAME --out docs/studies/NAME --sweep configs/sweeps/NAME.yaml --study

Every folder below RUNS with a config.yaml (or failed.json) is a run; runs that differ only in the seed
are one row. Runs that never started are known from launch/slurm.py's sweep.json, or from --sweep, which
also shows how far a search is. Writes report.html (self-contained), report.md and runs.csv; the same
runs give the same files.
"""

import argparse
import os
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from launch.axes import as_text
from launch.compared import Comparison
from launch.halving import Tuned, search_rows, searches
from launch.page import page
from launch.paper import read_tables
from launch.records import FINISHED, Study, read_studies
from launch.slurm_commands import SlurmError
from launch.study import write_study
from launch.sweep import TUNE, Sweep, SweepError, read_sweep
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
        help="list the runs of these sweeps that never started, and the state of their searches",
    )
    parser.add_argument(
        "--against",
        metavar="LABEL",
        help="the row that others are compared with, seed by seed (default: the best one)",
    )
    parser.add_argument(
        "--study",
        action="store_true",
        help="write the folder of a study: also the sweep's files and README.md, of which only the marked "
        "part is written again; needs one --sweep",
    )
    arguments = parser.parse_args(argv)
    if arguments.study and len(arguments.sweep) != 1:
        parser.error("--study needs --sweep with one file")
    try:
        studies, sweeps = collect(arguments.runs, arguments.sweep)
        write(studies, sweeps, arguments)
    except (SweepError, SlurmError, ReportError) as error:
        print(f"{program_name('launch/report.py')}: {error}", file=sys.stderr)
        return 2
    states = [run.state for study in studies for run in study.runs]
    finished = f"{states.count(FINISHED)} of {len(states)} runs finished"
    print(f"{arguments.out / 'report.html'}: {finished}")
    return 0


class ReportError(ValueError):
    """There is nothing to report on, or nowhere to write it."""


def collect(root: Path, files: Iterable[str]) -> tuple[tuple[Study, ...], dict[str, Sweep]]:
    """The studies below a folder, and study -> its sweep."""
    if not os.path.isdir(root):
        raise ReportError(f"{root} is not a folder; give the folder of the runs, such as runs")
    sweeps = [read_sweep(file) for file in files]
    expected = [(sweep.name, run.name) for sweep in sweeps for run in sweep.runs]
    studies = read_studies(root, expected)
    if not studies:
        raise ReportError(f"{root} has no runs; a run is a folder with a config.yaml")
    found = {}
    for sweep in sweeps:
        for study in studies:
            if Path(study.name).name == sweep.name:
                folder = folder_of_study(study, root.resolve())
                found[study.name] = read_sweep(
                    sweep.path, [f"run.dir={as_text(str(folder.parent))}"]
                )
    return studies, found


def folder_of_study(study: Study, root: Path) -> Path:
    started = [run.folder.parent for run in study.runs if run.folder]
    if started:
        return started[0]
    return root if study.name == root.name else root / study.name


def write(studies: Sequence[Study], sweeps: Mapping[str, Sweep], arguments: Namespace) -> None:
    out, against, tables = arguments.out, arguments.against, read_tables()
    labels = {group.label for study in studies for group in study.groups}
    if against is not None and against not in labels:
        known = ", ".join(sorted(labels))
        raise ReportError(f"--against {against}: no such row; the rows are {known}")
    tuned = {
        name: search_state(sweep, searches(sweep)) for name, sweep in sweeps.items() if sweep.search
    }
    files = {
        "report.html": page(studies, tables, tuned, against, None if arguments.study else out),
        "report.md": markdown(studies, tables, tuned, against),
        "runs.csv": as_csv(studies, tables),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            # a folder's name need not be UTF-8
            write_whole(out / name, content.encode("utf-8", "backslashreplace"))
        if arguments.study:
            (sweep,) = arguments.sweep
            results = [study for study in studies if Path(study.name).name != TUNE]
            write_study(out, read_sweep(sweep), markdown(results, tables, tuned, against))
    except OSError as error:
        raise ReportError(f"{out} cannot be written: {error.strerror}") from None


def search_state(sweep: Sweep, found: Sequence[Tuned]) -> Comparison:
    header, *rows = search_rows(sweep, found)
    return Comparison("The search, by held-out classes", header, tuple(rows))


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
