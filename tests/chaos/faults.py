"""What can be done to a run: at which moment, to which of its processes, to which of its files."""

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chaos.judge import Violation
from chaos.running import Process, Watched
from chaos.setups import STEPS

SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)


@dataclass(frozen=True)
class Moment:
    """step: None for so many seconds after the start, else so many seconds after that step."""

    step: int | None
    seconds: float

    @classmethod
    def draw(cls, rng: random.Random, early: float = 0.25) -> "Moment":
        """early: how often in the set-up, before there is a step."""
        if rng.random() < early:
            return cls(None, rng.uniform(0.3, 6))
        return cls(rng.randrange(STEPS), rng.choice([0, rng.uniform(0, 0.3)]))

    def __str__(self) -> str:
        where = "the start" if self.step is None else f"step {self.step}"
        return f"{self.seconds:.2f} s after {where}"

    def wait(self, run: Watched, folder: Path) -> bool:
        """Whether it came; False if the run has ended before."""
        if self.step is not None and not run.wait_for(lambda: steps(folder) >= self.step):
            return False
        until = time.monotonic() + self.seconds
        return run.wait_for(lambda: time.monotonic() >= until)


def steps(folder: Path) -> int:
    """The steps in metrics.jsonl; -1 if there is no file."""
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b'"loss"')
    except OSError:
        return -1


def wait_for_one(run: Watched, find: Callable[[], list[Process]]) -> list[Process]:
    """The processes that are looked for, as soon as there are some; none if the run ends before."""
    found: list[Process] = []

    def there() -> bool:
        found[:] = find()
        return bool(found)

    run.wait_for(there)
    return found


def hold_no_lock(run: Watched, folder: Path) -> None:
    """Loader workers must not hold the run's lock: they may outlive their parent for a moment."""
    for worker in run.workers():
        if str(folder / ".lock") in worker.descriptors():
            raise Violation(f"a loader worker ({worker.pid}) has {folder.name}/.lock open")


# ---- files ----------------------------------------------------------------------------------------


def damage(path: Path, rng: random.Random) -> str:
    """Damage a file in one of the ways in which disks and people do; says how."""
    data = bytearray(path.read_bytes())
    size = len(data)
    ways = ["bit", "bits", "cut", "empty", "sector", "more", "removed"]
    way = rng.choice(ways if size else ["more", "removed"])
    if way == "removed":
        path.unlink()
        return f"{path.name}: removed"
    if way in ("bit", "bits"):
        for _ in range(1 if way == "bit" else 20):
            data[rng.randrange(size)] ^= 1 << rng.randrange(8)
    elif way == "cut":
        del data[rng.randrange(size) :]
    elif way == "empty":
        data.clear()
    elif way == "sector":
        start = rng.randrange(size) // 512 * 512
        data[start : start + 512] = bytes(len(data[start : start + 512]))
    else:
        data += rng.randbytes(rng.randrange(1, 2000))
    replaced = path.with_name(f"{path.name}.damaged")
    replaced.write_bytes(data)
    os.replace(replaced, path)
    return f"{path.name}: {way}, {size} -> {len(data)} bytes"
