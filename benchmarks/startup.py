"""How long a command takes to start.

    python benchmarks/startup.py [--repeats 7]

Commands that need no torch must answer within a second. Python and torch alone are measured beside
them.
"""

import shlex
import subprocess
import sys
from pathlib import Path

from measure import finish, interleaved, parser, timed

ROOT = Path(__file__).parents[1]
OURS = (
    "dml/train.py --help",
    "launch/slurm.py --sweep configs/sweeps/sop_batch_size.yaml --dry-run",
)
BESIDE = ("-c pass", "-c 'import torch'")
GOAL = "< 1"


def run(command: str) -> None:
    words = [sys.executable, *shlex.split(command)]
    subprocess.run(words, cwd=ROOT, capture_output=True, check=True)


def main() -> int:
    parse = parser(__doc__)
    parse.add_argument("--repeats", type=int, default=7, help="default: %(default)s")
    args = parse.parse_args()
    commands = (*OURS, *BESIDE)
    seconds = interleaved({c: lambda c=c: run(c) for c in commands}, args.repeats)
    second = [1.0] * args.repeats
    rows = [
        timed("startup", f"python {c}", seconds[c], "1 s", second, GOAL * (c in OURS))
        for c in commands
    ]
    return finish(rows, args.json)


if __name__ == "__main__":
    sys.exit(main())
