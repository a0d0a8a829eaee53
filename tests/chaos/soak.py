"""A long run on two processes: memory, descriptors, threads and disk must stay flat.

    python -m tests.chaos.soak --steps 20000 --out docs/images/soak.svg

Writes the plot, and the samples beside it as .csv. Flat: the median of the last quarter exceeds that of
the second one by no more than the bound of the row. Logs, which must grow, are not counted as disk. Exit
codes: 0 flat, 1 something grows.
"""

import argparse
import csv
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median

from chaos.judge import Violation, last_lines
from chaos.lab import Lab
from chaos.running import Process, Watched, shared_memory
from chaos.setups import ACCELERATE
from launch.plots import Axis

TINY = {
    "batch.classes": 8,
    "batch.per_class": 2,
    "data.workers": 1,
    "run.log_steps": 20,
    "save.every_minutes": 0.25,
}
LOGS = ("metrics.jsonl", "timing.jsonl", "events.out.")
MIB = 2**20
Sample = dict[str, float]  # what was measured -> its value


@dataclass(frozen=True)
class Measure:
    """A panel of the plot. bound: how much a median may grow, as a number and as a share."""

    what: str
    unit: str
    bound: float
    share: float = 0.0


# A heap settles slowly: pieces of freed memory are kept. Evaluations open and close their own workers.
MEASURES = (
    Measure("PSS", "MiB", 4, 0.02),
    Measure("RSS", "MiB", 4, 0.02),
    Measure("descriptors", "", 0),
    Measure("threads", "", 0),
    Measure("disk", "MiB", 0.1, 0.01),
    Measure("shared memory", "MiB", 0),
)


# ---- sampling -------------------------------------------------------------------------------------


def sample(run: Watched, folder: Path) -> Sample:
    found = {"disk": disk(folder), "shared memory": shared()}
    named = {f"rank {n}": p for n, p in enumerate(sorted(run.ranks(), key=lambda p: p.pid))}
    named |= dict(zip(["launcher"], run.launchers(), strict=False))
    for name, process in named.items():
        found |= {f"{what} of {name}": value for what, value in of_process(process).items()}
    return found


def of_process(process: Process) -> Sample:
    folder = Path(f"/proc/{process.pid}")
    try:
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        rollup = (folder / "smaps_rollup").read_text().split("Pss:")[1]
        return {
            "RSS": int(status["VmRSS"].split()[0]) / 1024,
            "PSS": int(rollup.split()[0]) / 1024,
            "threads": int(status["Threads"]),
            "descriptors": len(list((folder / "fd").iterdir())),
        }
    except (OSError, KeyError, IndexError):
        return {}  # it ends


def disk(folder: Path) -> float:
    """MiB of the run's folder without its logs; files may vanish meanwhile."""
    whole = 0
    for path in folder.rglob("*"):
        if not path.name.startswith(LOGS):
            try:
                whole += path.stat().st_size if path.is_file() else 0
            except OSError:
                continue
    return whole / MIB


def shared() -> float:
    return sum(Path("/dev/shm", name).stat().st_size for name in shared_memory()) / MIB


def watch(run: Watched, folder: Path, every: float) -> Iterator[Sample]:
    began = time.monotonic()
    while any(code is None for code in run.codes):
        yield {"seconds": round(time.monotonic() - began, 1), **sample(run, folder)}
        time.sleep(every)


# ---- judging --------------------------------------------------------------------------------------


def series(samples: Sequence[Sample]) -> dict[str, list[tuple[float, float]]]:
    """What was measured -> (seconds, value), from the first sample that has it."""
    names = dict.fromkeys(name for each in samples for name in each if name != "seconds")
    return {n: [(each["seconds"], each[n]) for each in samples if n in each] for n in sorted(names)}


def measure_of(name: str) -> Measure:
    return next(measure for measure in MEASURES if name.startswith(measure.what))


def growth(values: Sequence[float]) -> tuple[float, float]:
    """The medians of the second and of the last quarter."""
    n = len(values)
    return median(values[n // 4 : n // 2] or values), median(values[3 * n // 4 :] or values)


def growing(samples: Sequence[Sample]) -> list[str]:
    found = []
    for name, points in series(samples).items():
        before, after = growth([value for _, value in points])
        measure = measure_of(name)
        if after - before > max(measure.bound, measure.share * before):
            found.append(f"{name} grows from {before:.1f} to {after:.1f} {measure.unit}".strip())
    return found


# ---- plotting -------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 130, 52, 26, 36
HUES = {"launcher": 120, "rank 0": 220, "rank 1": 20}
STYLE = """
svg { --ink: #1c2024; --soft: #68707a; --line: #d9dde2; --paper: #fff; --light: 45%; }
@media (prefers-color-scheme: dark) { svg { --ink: #e4e7eb; --soft: #98a1ab; --line: #343a41;
  --paper: #14171a; --light: 65%; } }
text { fill: var(--ink); font: 11px system-ui, sans-serif; } .soft { fill: var(--soft); }
.end { text-anchor: end; } line { stroke: var(--line); }
polyline { fill: none; stroke-width: 1.3; stroke: hsl(var(--h) 60% var(--light)); }
"""


def picture(samples: Sequence[Sample], steps: int) -> str:
    """A panel per measure: the value over minutes, one line per process."""
    everything = series(samples)
    body = []
    for n, measure in enumerate(MEASURES):
        own = {name: points for name, points in everything.items() if measure_of(name) is measure}
        x, y = (n % 3) * (WIDTH + LEFT + 10) + LEFT, (n // 3) * (HEIGHT + TOP + GAP) + TOP + 20
        body += panel(measure, own, x, y)
    width, height = 3 * (WIDTH + LEFT + 10) + 12, 2 * (HEIGHT + TOP + GAP) + 30
    legend = "blue: rank 0; red: rank 1; green: launcher; grey: the whole run"
    box = f'viewBox="0 0 {width} {height}" role="img"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {box} aria-label="Resources of a long run">',
            f"<style>{STYLE}</style>",
            f'<rect width="{width}" height="{height}" rx="6" style="fill: var(--paper)"/>',
            f'<text class="soft" x="12" y="16">{steps:,} steps over minutes; {legend}</text>',
            *body,
            "</svg>\n",
        ]
    )


def panel(
    measure: Measure, own: Mapping[str, Sequence[tuple[float, float]]], x: int, y: int
) -> Iterator[str]:
    last = max((points[-1][0] for points in own.values()), default=1) or 1
    ticks = round_ticks(max((value for points in own.values() for _, value in points), default=0))
    across, up = Axis(0, last, x, x + WIDTH, ()), Axis(0, ticks[-1], y + HEIGHT, y, ticks)
    title = f"{measure.what}{f' / {measure.unit}' if measure.unit else ''}"
    yield f'<text x="{x}" y="{y - 8}">{escape(title)}</text>'
    for tick in up.ticks:
        at = up.at(tick)
        yield f'<line x1="{x}" x2="{x + WIDTH}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text class="soft end" x="{x - 5}" y="{at + 4:.1f}">{tick:,.4g}</text>'
    yield f'<text class="soft end" x="{x + WIDTH}" y="{y + HEIGHT + 15}">{last / 60:.0f} min</text>'
    for name, points in own.items():
        who = name.rpartition(" of ")[2]
        colour = f"--h:{HUES[who]}" if who in HUES else "stroke: var(--soft)"
        path = " ".join(f"{across.at(t):.1f},{up.at(value):.1f}" for t, value in points)
        yield f'<polyline style="{colour}" points="{path}"/>'


def round_ticks(top: float) -> tuple[float, ...]:
    """From 0 to beyond the top, in two or three round steps."""
    step = 10 ** math.floor(math.log10(max(top, 1) / 2))
    step *= next(factor for factor in (1, 2, 5, 10) if top / (step * factor) <= 3)
    return tuple(n * step for n in range(max(1, math.ceil(top / step)) + 1))


# ---- the program ----------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=20_000, metavar="N", help="of the run (20000)")
    parser.add_argument(
        "--every", type=float, default=5, metavar="S", help="seconds per sample (5)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="SVG", help="the plot")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, Lab(Path(folder)) as lab:
        length = {"length.steps": args.steps, "eval.every_steps": max(1, args.steps // 20)}
        run = ACCELERATE.start(lab.folder, lab.folder / "log", {**TINY, **length})
        try:
            samples = list(watch(run, ACCELERATE.run_folder(lab.folder), args.every))
        finally:
            run.kill()
        if any(run.codes):
            raise Violation(f"the run ended with {run.codes}: {last_lines(run.said)}")
    write(samples, args.out, args.steps)
    for name, points in series(samples).items():
        before, after = growth([value for _, value in points])
        print(f"{name:<26} {before:10.1f} -> {after:10.1f} {measure_of(name).unit}")
    found = growing(samples)
    print(*found, sep="\n")
    return 1 if found else 0


def write(samples: Sequence[Sample], path: Path, steps: int) -> None:
    path.write_text(picture(samples, steps))
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["seconds", *series(samples)])
        writer.writeheader()
        writer.writerows({k: round(v, 2) for k, v in each.items()} for each in samples)


if __name__ == "__main__":
    sys.exit(main())
