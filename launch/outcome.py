"""How a run ended, and what becomes of it.

0       finished: result.json
2, 3    failed for good, a mistake or divergence: failed.json
75      interrupted by a signal, saved, to be continued
other   killed or crashed: to be continued from the last checkpoint

runs/SWEEP/NAME/failed.json      reason, code, log; until the run starts again
runs/SWEEP/NAME/restarts.json    how often it was continued without getting any further
"""

import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dml.train import DIVERGED, FINISHED, INTERRUPTED, MISTAKE

FAILED, RESTARTS, RESULT = "failed.json", "restarts.json", "result.json"
CRASHED = 1
PATIENCE = 5  # starts in a row that may end without a checkpoint further
SAID = "dml/train.py: "  # how a sentence of the training begins
NOISE = ("srun: ", "slurmstepd", "submitit ")
LAST_LINES = 20


def settle(folder: Path, code: int, log: Path) -> bool:
    """Note how a run ended, by the exit code of its processes; whether to start it again."""
    if code == FINISHED:
        clear(folder)
        return False
    lines = read_log(log)
    if code in (MISTAKE, DIVERGED):
        fail(folder, code, sentence(lines), lines)
        return False
    step, times = last_step(folder), 1
    before = read_json(folder / RESTARTS)
    if before and before["step"] == step:
        times += before["times"]
    if times < PATIENCE:
        write_json(folder / RESTARTS, {"step": step, "times": times, "code": code})
        return True
    how = f"{ending(code)}, {times} times in a row without a checkpoint after step {step:,}"
    fail(folder, code, f"{how}: {sentence(lines)}", lines)
    return False


def clear(folder: Path) -> None:
    """Nothing that was noted holds any longer."""
    for name in (FAILED, RESTARTS):
        (folder / name).unlink(missing_ok=True)


def fail(folder: Path, code: int, reason: str, lines: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESTARTS).unlink(missing_ok=True)
    write_json(folder / FAILED, {"reason": reason, "code": code, "log": lines[-LAST_LINES:]})


def ending(code: int) -> str:
    if code == INTERRUPTED:
        return "interrupted"
    if code > 128:
        try:
            name = signal.Signals(code - 128).name
        except ValueError:
            name = f"signal {code - 128}"
        return f"ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"ended with code {code}"


def read_log(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def sentence(lines: Sequence[str]) -> str:
    """What the training said last: its message, of one line or several, or else the last line."""
    own = [line for line in lines if not line.startswith(NOISE)]
    begins = [i for i, line in enumerate(own) if line.startswith(SAID)]
    if begins:
        return "\n".join(own[begins[-1] :]).removeprefix(SAID)
    return own[-1] if own else "it said nothing"


def last_step(folder: Path) -> int:
    """Of the last checkpoint."""
    names = [path.name.removeprefix("step-") for path in (folder / "checkpoints").glob("step-*")]
    return max((int(name) for name in names if name.isdigit()), default=0)


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return content


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Whole or not at all."""
    aside = path.with_name(f".{path.name}.writing")
    with aside.open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
