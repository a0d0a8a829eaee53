"""A run is disturbed, judged, and resumed."""

from collections.abc import Callable, Mapping
from pathlib import Path

from chaos.faults import Moment, hold_no_lock, steps
from chaos.judge import (
    FINISHED,
    IDENTICAL,
    MISTAKE,
    SlowError,
    Violation,
    is_identical,
    is_refusal,
    last_lines,
    no_traceback,
)
from chaos.lab import WHOLE_RUN, Trial
from chaos.running import Watched
from chaos.setups import Settings, Setup

# returns how many steps were done at that moment; None: the run had ended before
Fault = Callable[[Watched, Path], int | None]


def undergo(
    t: Trial,
    setup: Setup,
    settings: Settings,
    fault: Fault,
    *,
    place: Path | None = None,
    env: Mapping[str, str] | None = None,
    unexpected: bool = False,
    goes_on: bool = False,
    prompt: bool = True,
    saves: bool = False,
    codes: tuple[int, ...] = (),
) -> Watched:
    """Start a run, do something to it, and judge how it ends.

    unexpected: a traceback is in order. goes_on: the run must survive it. prompt: it must end at once.
    saves: no step done before may be lost. codes: the exit codes that are in order besides 0, where no
    launcher hides them; none: any code is.
    """
    folder = setup.run_folder(place or t.folder)
    run = t.start(setup, settings, env, place)
    done = fault(run, folder)
    goes_on = goes_on or done is None
    try:
        run.end(*((None, WHOLE_RUN) if goes_on or not prompt else ()))
    except SlowError:
        if any(run.codes):  # a run that finishes may take its time
            raise
    if not unexpected:
        no_traceback(run.said, "where a sentence belongs")
    if goes_on and any(run.codes):
        raise Violation(f"it did not survive: {run.codes}, {last_lines(run.said)}")
    if setup.launcher is None and codes and not {*run.codes} <= {FINISHED, *codes}:
        raise Violation(f"exit codes {run.codes}: {last_lines(run.said)}")
    if MISTAKE in run.codes:
        is_refusal(MISTAKE, run.said)
    if (folder / "failed.json").exists():
        raise Violation(f"marked as failed: {(folder / 'failed.json').read_text()[:300]}")
    if saves and done and not (folder / "result.json").exists():
        saved = max((int(p.name[5:]) for p in folder.glob("checkpoints/step-*")), default=0)
        if saved < done:
            raise Violation(f"{done} steps were done but {saved} saved: {last_lines(run.said)}")
    return run


def finish(t: Trial, setup: Setup, settings: Settings, place: Path | None = None) -> str:
    """The same command again: it must end with the bytes of the undisturbed run."""
    folder = setup.run_folder(place or t.folder)
    t.early = False
    again = t.start(setup, settings, None, place)
    again.end(prompt=None, hang=WHOLE_RUN)
    if {*again.codes} != {FINISHED}:
        raise Violation(f"it cannot be resumed: {again.codes}, {last_lines(again.said)}")
    no_traceback(again.said, "on resuming")
    is_identical(folder, t.expected(setup))
    return IDENTICAL


def strike(t: Trial, moment: Moment, act: Callable[[Watched], None]) -> Fault:
    """Do something to the processes at a moment."""
    t.note(f"at {moment}")
    t.early = moment.step is None

    def fault(run: Watched, folder: Path) -> int | None:
        if not moment.wait(run, folder):
            return None
        hold_no_lock(run, folder)
        done = steps(folder)
        act(run)
        return max(done, 0)

    return fault


def from_the_start(run: Watched, folder: Path) -> int | None:
    """For faults that are there before the run starts."""
    return 0
