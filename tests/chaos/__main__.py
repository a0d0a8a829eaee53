"""Random faults against real runs. Every trial must end in an identical result or a clear refusal.

    python -m tests.chaos --minutes 10 --seed 1
    python -m tests.chaos --replay kill-rank:123

The seed says which trials are drawn; how many of them are carried out is a matter of time. Exit codes: 0 no
violation, 1 a violation, with the line that replays its trial, 2 a mistake in the command.
"""

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from chaos.campaign import carry_out, draw, table, violations
from chaos.judge import SKIPPED, VIOLATION, Outcome
from chaos.kinds import KINDS
from chaos.lab import Lab

MARKED = re.compile(r"(<!-- campaign -->\n).*?(<!-- end of campaign -->)", re.DOTALL)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=10, metavar="N", help="how long (10)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="which trials (0)")
    parser.add_argument("--replay", nargs="+", metavar="KIND:SEED", help="these trials alone")
    parser.add_argument("--only", nargs="+", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PAGE",
        help="a page with the mark <!-- campaign --> for the table",
    )
    arguments = parser.parse_args(argv)
    for trial in arguments.replay or []:
        if not re.fullmatch(rf"({'|'.join(KINDS)}):\d+", trial):
            parser.error(f"{trial} is no trial; give KIND:SEED, such as kill-rank:123")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder, Lab(Path(folder)) as lab:
        trials = arguments.replay or draw(arguments.seed, arguments.only or list(KINDS))
        until = None if arguments.replay else began + 60 * arguments.minutes
        outcomes = list(carried_out(lab, iter(trials), until))
    minutes = (time.monotonic() - began) / 60
    text = f"{table(outcomes)}\n\nSeed {arguments.seed}, {minutes:.0f} minutes."
    skipped = sorted({o.seen for o in outcomes if o.verdict == SKIPPED})
    print(f"\n{text}", *(f"skipped: {reason}" for reason in skipped), sep="\n")
    found = violations(outcomes)
    print(*(f"\n{each}" for each in found), sep="\n")
    if arguments.out:
        page = arguments.out.read_text()
        arguments.out.write_text(MARKED.sub(lambda m: f"{m[1]}{text}\n{m[2]}", page))
    return 1 if found else 0


def carried_out(lab: Lab, trials: Iterator[str], until: float | None) -> Iterator[Outcome]:
    """The trials one after another, until it is time; tells how it goes."""
    bad = 0
    for number, trial in enumerate(trials, 1):
        if until and time.monotonic() > until:
            return
        show(f"{number}: {trial}, {bad} violations so far")
        outcome = carry_out(lab, trial)
        bad += outcome.verdict == VIOLATION
        show("")
        line = f"{outcome.verdict:<10} {outcome.seconds:6.1f} s  {trial}  {outcome.setup}"
        print(line.rstrip(), *([outcome.seen] if outcome.seen else []), sep="\n", flush=True)
        yield outcome


def show(text: str) -> None:
    """A line that the next one replaces, on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
