"""What asks a run to save and leave: a scheduler's SIGTERM or SIGUSR2, a person's Ctrl-C, or the end of
the launcher, without which nobody would know of the processes.

A handler only notes the signal. Between two steps the processes agree what to do (team.py), since a
signal may reach one of them alone, or all of them at different steps.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

LAUNCHER = "DML_LAUNCHER"  # the variable in which our own launchers give their process id
SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
ONE_PRESS = 1.0  # seconds: after a Ctrl-C a launcher sends its processes another SIGINT at once


class Interrupted(Exception):
    """A process of the run was asked to leave."""


class Interrupt:
    """As a context: SIGNALS are noted instead of ending the process. A second Ctrl-C does end it."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self.pressed: float | None = None  # when Ctrl-C was
        self.before: dict[signal.Signals, Any] = {}
        self.launcher = launcher_id()

    @property
    def received(self) -> str | None:
        """What asks this process to leave, or None."""
        return self.signal or ("the end of its launcher" if self.is_orphan() else None)

    def is_orphan(self) -> bool:
        """Whether the launcher has ended."""
        return self.launcher not in (None, os.getppid())

    @contextmanager
    def start_up(self) -> Iterator[None]:
        """Before the context: the process ends with its launcher, even while it waits in C++ for the
        others. There is nothing to save yet."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.5):
                if self.is_orphan():
                    os._exit(128 + signal.SIGTERM)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()

    def __enter__(self) -> None:
        self.before = {s: signal.signal(s, self.note) for s in SIGNALS}

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for s, handler in self.before.items():
            signal.signal(s, handler)

    def note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number).name
        if number == signal.SIGINT:
            now = time.monotonic()
            if self.pressed is None:
                self.pressed = now
            elif now - self.pressed > ONE_PRESS:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                signal.raise_signal(signal.SIGINT)


def launcher_id() -> int | None:
    """The process id of the launcher: of ours, which may have ended already, or else of torchrun or
    `accelerate launch`. None without a launcher: a shell may end before the program that it started
    with nohup."""
    if LAUNCHER in os.environ:
        return int(os.environ[LAUNCHER])
    is_launched = "RANK" in os.environ or any(n.startswith("ACCELERATE_") for n in os.environ)
    return os.getppid() if is_launched else None
