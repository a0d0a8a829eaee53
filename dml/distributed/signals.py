"""Signals that ask a run to save and leave: SIGTERM and SIGUSR2 of a scheduler, Ctrl-C of a person.

A handler only notes the signal. Between two steps the processes agree what to do (team.py), since a
signal may reach one of them alone, or all of them at different steps.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)


class Interrupted(Exception):
    """A process of the run was asked to leave."""


class Interrupt:
    """As a context: SIGNALS are noted instead of ending the process. A second Ctrl-C does end it."""

    def __init__(self) -> None:
        self.received: str | None = None
        self.before: dict[signal.Signals, Any] = {}

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
        self.received = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
