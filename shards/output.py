"""How a program prints and ends: the name it goes by, any name on any terminal, its progress, its exit
code, its last words, and a reader that leaves early, as in `... | head`."""

from __future__ import annotations

import io
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

LONGEST = 10**9  # seconds that are shown: 30 years
EVERY = 60  # seconds between two lines of progress where there is no terminal
UNEXPECTED, STOPPED = 1, 130  # exit codes after an error that nobody foresaw, and after Ctrl-C

_started_as: list[str] = []  # the command of this process, such as "dml train"


def start_as(command: str) -> None:
    """Call the program of this process by a command in its help and its messages."""
    _started_as[:] = [command]


def program_name(file: str) -> str:
    """What a program is called in its help and messages: its file, or the command that started it."""
    return _started_as[0] if _started_as else file


def run_program(main: Callable[[], int]) -> NoReturn:
    """Run a program that has worker processes or threads, and end this process with its exit code.

    Python's own shutdown would wait for the workers, and the threads of gloo now and then abort a
    process whose work is done. So nothing is waited for; workers end with their parent.
    """
    code = UNEXPECTED
    try:
        code = exit_code(main)
    except SystemExit as error:  # argparse
        code = error.code if isinstance(error.code, int) else UNEXPECTED
    except KeyboardInterrupt:
        code = STOPPED
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)


def exit_code(main: Callable[[], int], reader_left: int = 0) -> int:
    """Run `main` and return its exit code, or `reader_left` if the reader closes the pipe early."""
    escape_unprintable()
    try:
        try:
            code = main()
        except SystemExit:  # argparse, after --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        return reader_left
    return code


def escape_unprintable() -> None:
    """Print what the terminal's encoding lacks as \\u1234: a file name must not end a program."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def discard_output() -> None:
    """Redirect standard output to nowhere: Python flushes it at exit, and a closed pipe would fail
    again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Progress:
    """How far a program has come: a bar on a terminal, elsewhere a line per minute, so that a log has
    no carriage returns.

    with closing(Progress(len(names), "image")) as progress:
        progress.update(20)

    done: what was done before. leave: whether the full bar stays on the terminal.
    """

    def __init__(
        self, total: int, unit: str, *, label: str = "", done: int = 0, leave: bool = True
    ) -> None:
        self.total, self.unit, self.label = total, unit, label
        self.before = self.done = done
        self.started = self.last_line = time.monotonic()
        from tqdm import tqdm  # here: `dml doctor` needs no package

        # disable=None: no bar where there is no terminal
        self.bar = tqdm(
            total=total, initial=done, unit=unit, desc=label or None, leave=leave, disable=None
        )

    def update(self, count: int = 1) -> None:
        self.done += count
        self.bar.update(count)
        now = time.monotonic()
        if self.bar.disable and now - self.last_line >= EVERY:
            self.last_line = now
            print(self.line(now - self.started), file=sys.stderr, flush=True)

    def close(self) -> None:
        self.bar.close()

    def line(self, seconds: float) -> str:
        speed = (self.done - self.before) / seconds
        label = f"{self.label}: " if self.label else ""
        left = time_left(self.total - self.done, speed)
        return (
            f"{label}{self.done:,} of {self.total:,} {self.unit}s, {speed:,.1f} per second, {left}"
        )


def time_left(rest: float, speed: float) -> str:
    """speed: of the rest per second; 0 if nothing has been done yet."""
    return f"{duration(rest / speed)} left" if speed > 0 else "unknown time left"


def duration(seconds: float) -> timedelta:
    return timedelta(seconds=round(min(seconds, LONGEST)))
