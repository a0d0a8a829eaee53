"""Where a training step spends its time: the shares of the model, the data and the loss.

    python benchmarks/training_step.py [--classes 64] [--steps 150]

Trains the small network on the bundled icons with dml/train.py in one process, five images per class,
and reads the run's timing. The model is forward, backward and optimizer; the rest is data and loss.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import Row, compared, duration, finish, parser

ROOT = Path(__file__).parents[1]
MODEL = ("forward", "backward", "optimizer")
GOAL = ">= 0.9"


def train(classes: int, steps: int, folder: Path) -> list[dict[str, float]]:
    """Seconds per step by phase, one dict per ten steps, without the first, which includes loading."""
    settings = [f"run.dir={folder}", f"batch.classes={classes}", "batch.per_class=5"]
    settings += [f"length.steps={steps}", "eval.every_steps=null", "eval.untrained=false"]
    command = [sys.executable, "dml/train.py", "--config", "configs/icons_mini.yaml"]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    subprocess.run(
        [*command, "--set", *settings],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    lines = (folder / "icons_mini" / "timing.jsonl").read_text().splitlines()
    prefix = "seconds_"
    return [
        {k.removeprefix(prefix): s for k, s in json.loads(line).items() if k.startswith(prefix)}
        for line in lines[1:]
    ]


def main() -> int:
    parse = parser(__doc__)
    parse.add_argument("--classes", type=int, default=64, help="default: %(default)s")
    parse.add_argument("--steps", type=int, default=150, help="default: %(default)s")
    args = parse.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = train(args.classes, args.steps, Path(folder))

    def row(what: str, phases: tuple[str, ...], goal: str = "") -> Row:
        seconds = [sum(line[phase] for phase in phases) for line in found]
        shares = [own / sum(line.values()) for own, line in zip(seconds, found, strict=True)]
        value = duration(statistics.median(seconds))
        return compared("training_step", what, value, "the whole step", shares, goal)

    rows = [
        row(f"model, {5 * args.classes} icons per step", MODEL, GOAL),
        row("data", ("data",)),
        row("loss", ("loss",)),
    ]
    return finish(rows, args.json)


if __name__ == "__main__":
    sys.exit(main())
