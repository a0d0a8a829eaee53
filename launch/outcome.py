"""How a run ended, and whether it is started again.

exit code of dml/train.py
0       finished: result.json
2, 3    failed for good, by a mistake or by divergence: failed.json
75      interrupted by a signal after a checkpoint: started again
other   killed or crashed: started again from the last checkpoint

runs/SWEEP/NAME/failed.json      reason, code and log; removed when the run starts again
runs/SWEEP/NAME/restarts.json    how often it ended at the same checkpoint, and perhaps a note
"""

import os
import re
import signal
from collections.abc import Sequence
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from dml.run_folder.files import DamagedError, write_json
from dml.train import DIVERGED, FINISHED, INTERRUPTED, MISTAKE
from launch.run_files import FAILED, RESTARTS, read_restarts
from shards.files import regular, remove

MAX_STARTS = 5  # in a row without a later checkpoint
TRAINING_PREFIX = "dml/train.py: "  # begins every message of the training
LOCAL_PREFIX = "launch/local.py: "
OTHER_PREFIXES = ("srun: ", "slurmstepd", "submitit ", LOCAL_PREFIX)
STARTED = "Starting with "  # submitit and launch/local.py begin every start in a log with it
TRACEBACK = "Traceback (most recent call last)"
TORCH_RANK = re.compile(r"^\[rank\d+\]: ")
OUT_OF_MEMORY = re.compile(r"\boom[-_ ]?kill|out of memory", re.IGNORECASE)
LOG_LINES = 20
LOG_BYTES = 2**22  # that are read, from the end


def record_outcome(folder: Path, code: int, logs: Sequence[Path]) -> bool:
    """Write down how a run ended, and return whether to start it again.

    code: the exit code of its processes. logs: one per process, by rank.
    """
    if code == FINISHED:
        for name in (FAILED, RESTARTS):
            remove(folder / name)
        return False
    lines = [last_start(read_log(log)) for log in logs] or [[]]
    if code in (MISTAKE, DIVERGED):
        fail(folder, code, training_message(lines[0]), lines[0])
        return False
    step, starts = last_checkpoint_step(folder), 1
    before = earlier_restarts(folder)
    if before.get("step") == step:
        starts += before.get("times") or 0
    if starts < MAX_STARTS:
        write_json(folder / RESTARTS, {"step": step, "times": starts, "code": code})
        return True
    memory = " (out of memory)" if any(map(OUT_OF_MEMORY.search, chain(*lines))) else ""
    rank, why = find_crash(lines)
    how = (
        f"{describe_exit(code)}{memory}, {starts} times in a row without a checkpoint after step "
        f"{step:,}"
    )
    fail(folder, code, f"{how}: {why}", lines[rank])
    return False


def note(folder: Path, text: str) -> None:
    """A note for --status, kept until the run starts again."""
    write_json(folder / RESTARTS, {**earlier_restarts(folder), "note": text})


def earlier_restarts(folder: Path) -> dict[str, Any]:
    """restarts.json; a damaged one is removed, and counting starts anew."""
    try:
        return read_restarts(folder)
    except DamagedError:
        remove(folder / RESTARTS)
        return {}


def fail(folder: Path, code: int, reason: str, lines: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in (FAILED, RESTARTS):
        remove(folder / name)
    write_json(folder / FAILED, {"reason": reason, "code": code, "log": lines[-LOG_LINES:]})


def describe_exit(code: int) -> str:
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
    """The lines at the end of a log, without empty ones; none if it cannot be read."""
    try:
        with open(path, "rb", opener=regular) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_BYTES))
            text = file.read(LOG_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def last_start(lines: Sequence[str]) -> Sequence[str]:
    """The lines of the last start: all starts append to the same logs."""
    starts = [
        i for i, line in enumerate(lines) if line.startswith(OTHER_PREFIXES) and STARTED in line
    ]
    return lines[starts[-1] :] if starts else lines


def training_message(lines: Sequence[str]) -> str:
    """The last message of the training with its indented lines, or else the last error or line."""
    begins = [i for i, line in enumerate(lines) if line.startswith(TRAINING_PREFIX)]
    if not begins:
        return last_error(lines) or last_line(lines)
    first, *more = lines[begins[-1] :]
    indented = takewhile(lambda line: line.startswith(" "), more)
    return "\n".join([first.removeprefix(TRAINING_PREFIX), *indented])


def find_crash(logs: Sequence[Sequence[str]]) -> tuple[int, str]:
    """The rank of the process that crashed, and its error; logs: the lines of every process."""
    for rank, lines in enumerate(logs):
        if any(line.startswith(TRAINING_PREFIX) for line in lines):  # too little memory
            return rank, f"process {rank}: {training_message(lines)}"
    errors = [(rank, found) for rank, lines in enumerate(logs) if (found := last_error(lines))]
    if not errors:
        return 0, last_line(logs[0])
    # When one process crashes, the others only report that they lost their connection to it.
    rank, found = min(errors, key=lambda each: "connection" in each[1].lower())
    return rank, f"process {rank}: {found}"


def last_error(lines: Sequence[str]) -> str | None:
    """The last line of the last traceback."""
    plain = [TORCH_RANK.sub("", line) for line in lines]
    begins = [i for i, line in enumerate(plain) if line.startswith(TRACEBACK)]
    after = plain[begins[-1] + 1 :] if begins else []
    return next((line for line in after if not line.startswith(" ")), None)


def last_line(lines: Sequence[str]) -> str:
    own = [line for line in lines if not line.startswith(OTHER_PREFIXES)]
    return own[-1] if own else "its log is empty"


def last_checkpoint_step(folder: Path) -> int:
    names = [path.name.removeprefix("step-") for path in (folder / "checkpoints").glob("step-*")]
    return max((int(name) for name in names if re.fullmatch(r"[0-9]{1,12}", name)), default=0)
