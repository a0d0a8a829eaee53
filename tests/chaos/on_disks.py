"""Trials in which the disk fails, or the folder goes away."""

import math
import signal
from pathlib import Path

from chaos.faults import Moment, steps
from chaos.judge import (
    MISTAKE,
    SENTENCE,
    Violation,
    is_identical,
    last_lines,
    nothing_half_written,
)
from chaos.kinds import kind
from chaos.lab import Trial
from chaos.running import Watched
from chaos.setups import ACCELERATE, ONE, TWO, ZERO2
from chaos.shim import failing_disk
from chaos.undergo import finish, from_the_start, strike, undergo

ERRORS = (("EIO", 1), ("ENOSPC", 1), ("EIO", 0), ("ENOSPC", 0), ("EROFS", 0))  # 0: from then on


def refused_or_finished(run: Watched, folder: Path | None) -> None:
    """A run on a bad disk says so in a sentence, and leaves nothing half-written in its folder."""
    if any(run.codes):
        if not SENTENCE.search(run.said):
            raise Violation(f"no sentence about the disk: {last_lines(run.said)}")
        if folder:
            nothing_half_written(folder)


@kind("full-disk", "a file system that is too small, and then larger")
def full_disk(t: Trial) -> str:
    setup = t.choose(ONE, TWO, ACCELERATE, ZERO2)
    settings = t.settings()
    whole = sum(p.stat().st_size for p in t.lab.undisturbed(setup).rglob("*") if p.is_file())
    size = int(whole * t.rng.uniform(0.05, 1.6)) // 4096 * 4096
    t.note(f"{size} bytes, where a run leaves {whole}")
    place = t.disk(size)
    how = {"place": place, "codes": (MISTAKE,), "prompt": False}
    refused_or_finished(undergo(t, setup, settings, from_the_start, **how), place)
    t.remount(place, f"size={10 * whole}")
    return finish(t, setup, settings, place)


@kind("read-only", "an interrupted run's file system becomes read-only, and writable again")
def read_only(t: Trial) -> str:
    setup = t.choose(ONE, TWO, ACCELERATE)
    settings = t.settings()
    place = t.disk(2**30)

    def act(run: Watched) -> None:
        for rank in run.ranks():
            rank.send(signal.SIGTERM)

    undergo(t, setup, settings, strike(t, Moment.draw(t.rng, 0), act), place=place)
    t.remount(place, "ro")
    how = {"place": place, "codes": (MISTAKE,), "prompt": False}
    refused_or_finished(undergo(t, setup, settings, from_the_start, **how), place)
    t.remount(place, "rw")
    return finish(t, setup, settings, place)


@kind("failing-disk", "the n-th write, fsync, rename or open fails, and perhaps all after it", 4)
def a_failing_disk(t: Trial) -> str:
    setup = t.choose(ONE, TWO, ACCELERATE, ZERO2)
    settings = t.settings()
    call = t.rng.choice(["write", "fsync", "rename", "open"])
    nth = int(math.exp(t.rng.uniform(0, math.log(300 if call == "write" else 100))))
    error, times = t.rng.choice(ERRORS)
    t.note(f"{call} {nth} fails with {error}{'' if times else ', and so do all that follow'}")
    place, log = setup.run_folder(t.folder), t.folder / "injected"
    env = failing_disk(t.lab.shim, place, log, call, nth, error, times)

    def fault(run: Watched, folder: Path) -> int | None:
        return steps(folder) if run.wait_for(log.exists) else None

    run = undergo(t, setup, settings, fault, env=env, codes=(MISTAKE,))
    t.note(log.read_text().splitlines()[0] if log.exists() else "it never came to that")
    refused_or_finished(run, place)
    if not any(run.codes):
        is_identical(place, t.expected(setup))
    return finish(t, setup, settings)


@kind("moved", "the run's folder is moved away, and back after the end")
def moved(t: Trial) -> str:
    setup = t.choose(ONE, TWO, ACCELERATE)
    settings = t.settings()
    folder, away = setup.run_folder(t.folder), t.folder / "away"

    def act(run: Watched) -> None:
        folder.rename(away)

    run = undergo(t, setup, settings, strike(t, Moment.draw(t.rng, 0), act), codes=(MISTAKE,))
    if away.exists() and folder.exists():
        held = sorted(p.name for p in folder.iterdir())
        raise Violation(f"another folder has grown in its place: {held}, {last_lines(run.said)}")
    if away.exists():
        away.rename(folder)
    refused_or_finished(run, None)  # what was being written was carried away with the folder
    return finish(t, setup, settings)
