"""Trials that kill, signal and stop processes, launch too many of them, or set their clock."""

import signal
import time
from collections.abc import Callable

from chaos.faults import SIGNALS, Moment, wait_for_one
from chaos.judge import (
    IDENTICAL,
    INTERRUPTED,
    REFUSED,
    SENTENCE,
    UNEXPECTED,
    Violation,
    is_identical,
    last_lines,
    no_traceback,
)
from chaos.kinds import kind
from chaos.lab import WHOLE_RUN, Trial
from chaos.running import Watched
from chaos.setups import ACCELERATE, ONE, SETUPS, SWEEP, TWO, ZERO2, Setup
from chaos.shim import jumping_clock
from chaos.undergo import finish, from_the_start, strike, undergo


def early(setup: Setup) -> float:
    """How often to strike before the processes have formed a group. Without a launcher nobody would
    tell the others, which wait for the time-out."""
    return 0 if setup is TWO else 0.25


@kind("kill-rank", "kill -9 of a training process")
def kill_rank(t: Trial) -> str:
    setup = t.choose(*SETUPS)
    settings = t.settings()
    which = t.rng.randrange(setup.processes)

    def act(run: Watched) -> None:
        for rank in wait_for_one(run, run.ranks)[which:][:1]:
            rank.send(signal.SIGKILL)

    fault = strike(t, Moment.draw(t.rng, early(setup)), act)
    undergo(t, setup, settings, fault, unexpected=True, goes_on=setup is SWEEP)
    return finish(t, setup, settings)


@kind("kill-worker", "kill -9 of a loader worker")
def kill_worker(t: Trial) -> str:
    setup = t.choose(*SETUPS)
    settings = t.settings(workers=(1, 2))
    place = t.rng.random()

    def act(run: Watched) -> None:
        workers = run.workers()
        for worker in workers[int(place * len(workers)) :][:1]:
            worker.send(signal.SIGKILL)

    fault = strike(t, Moment.draw(t.rng, 0), act)
    undergo(t, setup, settings, fault, unexpected=True, goes_on=setup is SWEEP)
    return finish(t, setup, settings)


@kind("kill-launcher", "kill -9 of the launcher")
def kill_launcher(t: Trial) -> str:
    setup = t.choose(ACCELERATE, ZERO2, SWEEP)
    settings = t.settings()

    def act(run: Watched) -> None:
        for launcher in run.launchers():
            launcher.send(signal.SIGKILL)

    undergo(t, setup, settings, strike(t, Moment.draw(t.rng), act), saves=True)
    return finish(t, setup, settings)


def send_to(t: Trial, setup: Setup, number: int) -> tuple[str, Callable[[Watched], None]]:
    """A signal to a rank, to the launcher, or to all processes, as Ctrl-C and Slurm send it."""
    whom = t.rng.choice(["rank", "all"] if setup.launcher is None else ["rank", "launcher", "all"])
    which = t.rng.randrange(setup.processes)
    t.note(f"{signal.Signals(number).name} to {whom} {which if whom == 'rank' else ''}".strip())

    def act(run: Watched) -> None:
        if whom == "launcher":
            chosen = run.launchers()
        elif whom == "rank":
            chosen = wait_for_one(run, run.ranks)[which:][:1]
        else:
            chosen = run.living()
        for each in chosen:
            each.send(number)

    return whom, act


def left(number: int) -> tuple[int, ...]:
    """Exit codes after a signal: interrupted, or ended by it before there was anything to save."""
    return INTERRUPTED, 128 + number, -number


@kind("signal", "SIGTERM, SIGUSR2 or SIGINT", per_round=2)
def one_signal(t: Trial) -> str:
    setup, number = t.choose(*SETUPS), t.rng.choice(SIGNALS)
    settings = t.settings()
    whom, act = send_to(t, setup, number)
    fault = strike(t, Moment.draw(t.rng, early(setup)), act)
    goes_on = setup is SWEEP and whom == "rank"
    undergo(t, setup, settings, fault, saves=True, codes=left(number), goes_on=goes_on)
    return finish(t, setup, settings)


@kind("signal-twice", "two signals, up to a second apart", per_round=2)
def two_signals(t: Trial) -> str:
    setup = t.choose(*SETUPS)
    settings = t.settings()
    first, second = t.rng.choice(SIGNALS), t.rng.choice(SIGNALS)
    acts, gap = [send_to(t, setup, number) for number in (first, second)], t.rng.uniform(0, 1)

    def act(run: Watched) -> None:
        acts[0][1](run)
        time.sleep(gap)
        acts[1][1](run)

    twice = first == second == signal.SIGINT  # the second Ctrl-C ends a run at once
    codes = (*left(first), *left(second), *([UNEXPECTED] if twice else []))
    fault = strike(t, Moment.draw(t.rng, early(setup)), act)
    goes_on = setup is SWEEP and {whom for whom, _ in acts} == {"rank"}
    undergo(t, setup, settings, fault, unexpected=twice, codes=codes, goes_on=goes_on)
    return finish(t, setup, settings)


@kind("stop", "SIGSTOP, and SIGCONT some seconds later")
def stop(t: Trial) -> str:
    setup = t.choose(*SETUPS)
    settings = t.settings()
    place, seconds = t.rng.random(), t.rng.uniform(0.5, 6)

    def act(run: Watched) -> None:
        living = run.living()
        for chosen in living[int(place * len(living)) :][:1]:
            chosen.send(signal.SIGSTOP)
            time.sleep(seconds)
            chosen.send(signal.SIGCONT)

    undergo(t, setup, settings, strike(t, Moment.draw(t.rng), act), goes_on=True)
    is_identical(setup.run_folder(t.folder), t.expected(setup))
    return IDENTICAL


@kind("clock", "the wall clock jumps, mostly back")
def clock(t: Trial) -> str:
    setup = t.choose(*SETUPS)
    settings = t.settings()
    jump = int(t.rng.choice([-1, -1, -1, 1]) * 10 ** t.rng.uniform(1, 8))
    t.note(f"the clock jumps by {jump} s")
    env = jumping_clock(t.lab.shim, t.rng.randrange(8), jump)
    undergo(t, setup, settings, from_the_start, env=env, goes_on=True)
    is_identical(setup.run_folder(t.folder), t.expected(setup))
    return IDENTICAL


@kind("two-at-once", "the same run is launched twice")
def two_at_once(t: Trial) -> str:
    setup = t.choose(ONE, ACCELERATE, ZERO2)
    settings = t.settings()
    moment = Moment.draw(t.rng, 0.5)
    t.note(f"the second at {moment}")
    t.early = moment.step is None
    folder = setup.run_folder(t.folder)
    runs = [t.start(setup, {**settings, "data.prefetch": 2})]
    moment.wait(runs[0], folder)
    runs.append(t.start(setup, {**settings, "data.prefetch": 3}))
    for run in runs:
        run.end(prompt=None, hang=WHOLE_RUN)
        no_traceback(run.said, "for a second launch")
        if any(run.codes) and not SENTENCE.search(run.said):
            raise Violation(f"refused without a sentence: {last_lines(run.said)}")
    won = [prefetch for prefetch, run in zip((2, 3), runs, strict=True) if not any(run.codes)]
    if not won:
        raise Violation(f"both were refused: {last_lines(runs[0].said)} {last_lines(runs[1].said)}")
    if len(won) == 1 and f"prefetch: {won[0]}" not in (folder / "config.yaml").read_text():
        raise Violation("the launch that was refused has changed config.yaml")
    is_identical(folder, t.expected(setup))
    return REFUSED if len(won) == 1 else IDENTICAL
