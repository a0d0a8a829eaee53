"""How fast a config trains on this machine, from some real steps: `dml plan --measure`."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from dml.errors import Mistake
from dml.rules import MOST_STEPS
from shards.output import duration

WARM_UP, MEASURED = 2, 6  # steps: the first ones start the workers


def measure(files: Sequence[str], sets: Sequence[str], processes: int) -> float:
    """Images per second of some real steps on this machine, of all processes together. The training
    program makes them, in a folder that is removed afterwards. Mistake if it ends before."""
    program = ["dml.train", "--config", *files, "--set", *sets]
    if processes > 1:
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        program = [*torchrun, "-m", *program]
    with tempfile.TemporaryDirectory(prefix="dml-measure-") as folder:
        steps_alone = ["eval.every_steps=null", "eval.validation_classes=0", "eval.patience=null"]
        steps_alone += [
            "eval.untrained=false",
            "eval.frozen=false",
            "eval.test=true",
            "length.epochs=null",
            "length.images=null",
        ]
        steps_alone += [f"length.steps={MOST_STEPS}", "run.log_steps=1"]
        here = [f"run.dir={json.dumps(folder)}", "run.name=run"]
        log, timing = Path(folder, "log"), Path(folder, "run", "timing.jsonl")
        with log.open("wb") as errors:
            run = subprocess.Popen(
                [sys.executable, "-m", *program, *steps_alone, *here],
                env={**os.environ, "TMPDIR": folder},  # torch leaves files there
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,  # so that all its processes can be ended together
            )
        try:
            while run.poll() is None and len(whole_lines(timing)) < WARM_UP + MEASURED:
                time.sleep(0.2)
        finally:
            end(run)
        said, steps = log.read_text(errors="replace"), whole_lines(timing)
    if len(steps) < WARM_UP + MEASURED:
        own = [line for line in said.splitlines() if line.startswith("dml/train.py: ")]
        why = own[-1].removeprefix("dml/train.py: ") if own else said[-1000:]
        raise Mistake(f"--measure: the training ended after {len(steps)} steps: {why}")
    return float(median(json.loads(step)["images_per_second"] for step in steps[WARM_UP:]))


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file that may still grow; none if there is no file yet."""
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def end(run: "subprocess.Popen[bytes]") -> None:
    """End all processes of a training, by force if it does not leave."""
    if run.poll() is None:
        os.killpg(run.pid, signal.SIGTERM)
    try:
        run.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()


def measured_rows(images: int, steps: int, speed: float) -> dict[str, str]:
    return {
        "measured": f"{speed:,.1f} images/s on this machine, median of {MEASURED} steps or more",
        "estimated time": f"{duration(images / speed)} for {steps:,} steps, without evaluations",
    }
