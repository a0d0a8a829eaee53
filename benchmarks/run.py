"""Run all benchmarks and write a page with the ratios and a picture of them.

    python benchmarks/run.py                            # what make bench does
    python benchmarks/run.py --only loss recall --out /tmp/some
    python benchmarks/run.py --cars data/cars196        # the loader on photographs

Writes DIR/benchmarks.md and DIR/images/benchmarks.svg. Each benchmark runs in its own process. Exits
with 1 if a goal is missed or a benchmark fails, and names it.
"""

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bars import picture
from measure import Row, read_rows
from page import page

HERE = Path(__file__).parent
ROOT = HERE.parent
PARTS = {
    "loss": [],
    "parameters": [],
    "losses": [],
    "columns": [],
    "proxies": [],
    "loss_memory": [],
    "scale": [],
    "two_hosts": [],
    "caching": [],
    "recall": ["--repeats", "2"],  # minutes per repetition
    "search_index": [],
    "loader": [str(ROOT / "shards" / "bundled" / "icons-mini"), "--size", "32"],
    "remote": [str(ROOT / "shards" / "bundled" / "icons-mini")],
    "features": [],
    "training_step": [],
    "whole_step": [],
    "startup": [],
}
CANNOT = 2  # exit code of a benchmark that needs something that this machine does not have


@dataclass(frozen=True)
class Outcome:
    """problem: why there are no rows. failed: the benchmark itself failed."""

    rows: list[Row]
    problem: str = ""
    failed: bool = False


def run(part: str, arguments: Sequence[str]) -> Outcome:
    """Run one benchmark. Its stderr is passed on; the last line is the reason if there are no rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        command = [sys.executable, str(HERE / f"{part}.py"), *arguments, "--json", str(path)]
        said = b""
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as process:
            while piece := process.stderr.read1():  # type: ignore[union-attr]
                said += piece
                sys.stderr.write(piece.decode(errors="replace"))
                sys.stderr.flush()
        if path.exists():
            return Outcome(read_rows(path))
        lines = [line.strip() for line in said.decode(errors="replace").splitlines()]
        last = next(filter(None, reversed(lines)), "").removeprefix(f"{part}: ")
        if process.returncode == CANNOT:
            return Outcome([], last)
        return Outcome([], f"{last} (exit code {process.returncode})", failed=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        metavar="PART",
        help=f"run only these of {', '.join(PARTS)}",
    )
    parser.add_argument(
        "--cars", type=Path, metavar="DIR", help="shards of Cars-196, for the loader"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs", metavar="DIR", help="default: docs"
    )
    args = parser.parse_args(argv)
    parts = PARTS | ({"loader": [str(args.cars.resolve())]} if args.cars else {})
    outcomes = {}
    for n, part in enumerate(args.only, 1):
        print(f"[{n}/{len(args.only)}] {part}", file=sys.stderr, flush=True)
        start = time.monotonic()
        outcomes[part] = run(part, parts[part])
        print(f"{part}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)

    rows = [row for outcome in outcomes.values() for row in outcome.rows]
    problems = {part: outcome.problem for part, outcome in outcomes.items() if outcome.problem}
    command = shlex.join(["python", "benchmarks/run.py", *(sys.argv[1:] if argv is None else argv)])
    (args.out / "images").mkdir(parents=True, exist_ok=True)
    (args.out / "images" / "benchmarks.svg").write_text(picture(rows))
    (args.out / "benchmarks.md").write_text(page(rows, problems, command))

    bad = [f"missed: {row}" for row in rows if row.ok is False]
    bad += [f"failed: {part}: {o.problem}" for part, o in outcomes.items() if o.failed]
    print("\n".join(bad or ["all goals met"]), file=sys.stderr)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
