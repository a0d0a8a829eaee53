"""How a run ended, and what becomes of it.

0       finished: result.json
2, 3    failed for good, a mistake or divergence: failed.json
75      interrupted by a signal, saved, to be continued
other   killed or crashed: to be continued from the last checkpoint

runs/SWEEP/NAME/failed.json      reason, code, log; until the run starts again
runs/SWEEP/NAME/restarts.json    how often it was continued without getting any further; a note
"""

import re
import signal
from collections.abc import Sequence
from itertools import chain, takewhile
from pathlib import Path

from dml.run_folder.files import read_json, write_json
from dml.train import DIVERGED, FINISHED, INTERRUPTED, MISTAKE

FAILED, RESTARTS, RESULT = "failed.json", "restarts.json", "result.json"
CRASHED = 1
PATIENCE = 5  # starts in a row that may end without a checkpoint further
SAID = "dml/train.py: "  # how a sentence of the training begins
LAUNCHER = "launch/local.py: "
NOISE = ("srun: ", "slurmstepd", "submitit ", LAUNCHER)
STARTED = "Starting with "  # of submitit and launch/local.py: every start begins its logs so
TRACEBACK = "Traceback (most recent call last)"
BY_TORCH = re.compile(r"^\[rank\d+\]: ")
NO_MEMORY = re.compile(r"\boom[-_ ]?kill|out of memory", re.IGNORECASE)
LAST_LINES = 20


def settle(folder: Path, code: int, logs: Sequence[Path]) -> bool:
    """Note how a run ended, by the exit code of its processes; whether to start it again.

    logs: of the processes, by rank.
    """
    if code == FINISHED:
        clear(folder)
        return False
    said = [last_start(read_log(log)) for log in logs] or [[]]
    if code in (MISTAKE, DIVERGED):
        fail(folder, code, sentence(said[0]), said[0])
        return False
    step, times = last_step(folder), 1
    before = read_json(folder / RESTARTS)
    if before and before["step"] == step:
        times += before["times"]
    if times < PATIENCE:
        write_json(folder / RESTARTS, {"step": step, "times": times, "code": code})
        return True
    memory = " (out of memory)" if any(map(NO_MEMORY.search, chain(*said))) else ""
    rank, why = crash(said)
    how = f"{ending(code)}{memory}, {times} times in a row without a checkpoint after step {step:,}"
    fail(folder, code, f"{how}: {why}", said[rank])
    return False


def clear(folder: Path) -> None:
    """Nothing that was noted holds any longer."""
    for name in (FAILED, RESTARTS):
        (folder / name).unlink(missing_ok=True)


def note(folder: Path, text: str) -> None:
    """For --status, until the run goes on."""
    write_json(folder / RESTARTS, {**(read_json(folder / RESTARTS) or {}), "note": text})


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
        return f"ended by {name}"
    return f"ended with code {code}"


def read_log(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def last_start(lines: Sequence[str]) -> Sequence[str]:
    """Every start appends to the same logs."""
    starts = [i for i, line in enumerate(lines) if line.startswith(NOISE) and STARTED in line]
    return lines[starts[-1] :] if starts else lines


def sentence(lines: Sequence[str]) -> str:
    """The last message of the training, with its indented lines, or else how its log ends."""
    begins = [i for i, line in enumerate(lines) if line.startswith(SAID)]
    if not begins:
        return error(lines) or last_line(lines)
    first, *more = lines[begins[-1] :]
    return "\n".join([first.removeprefix(SAID), *takewhile(lambda x: x.startswith(" "), more)])


def crash(said: Sequence[Sequence[str]]) -> tuple[int, str]:
    """The process that broke, and how; said: the lines of every process."""
    errors = [(rank, found) for rank, lines in enumerate(said) if (found := error(lines))]
    if not errors:
        return 0, last_line(said[0])
    # when one process breaks, the others lose their connection to it
    rank, found = min(errors, key=lambda x: "connection" in x[1].lower())
    return rank, f"process {rank}: {found}"


def error(lines: Sequence[str]) -> str | None:
    """The last line of the last traceback."""
    plain = [BY_TORCH.sub("", line) for line in lines]
    begins = [i for i, line in enumerate(plain) if line.startswith(TRACEBACK)]
    rest = plain[begins[-1] + 1 :] if begins else []
    return next((line for line in rest if not line.startswith(" ")), None)


def last_line(lines: Sequence[str]) -> str:
    own = [line for line in lines if not line.startswith(NOISE)]
    return own[-1] if own else "it said nothing"


def last_step(folder: Path) -> int:
    """Of the last checkpoint."""
    names = [path.name.removeprefix("step-") for path in (folder / "checkpoints").glob("step-*")]
    return max((int(name) for name in names if name.isdigit()), default=0)
