"""Work that goes on beside the training: one job at a time, in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """note: takes what goes wrong in a job, to be raised at the team's next meeting."""

    def __init__(self, note: Callable[[Exception], None]) -> None:
        self.note = note
        self.thread: threading.Thread | None = None

    def start(self, job: Callable[[], object]) -> None:
        """Start a job, once the one before has ended."""
        self.wait()
        self.thread = threading.Thread(target=self.run, args=(job,), name="saving")
        self.thread.start()

    def run(self, job: Callable[[], object]) -> None:
        try:
            job()
        except Exception as error:  # noqa: BLE001  raised by all processes at their next meeting
            self.note(error)

    def wait(self) -> None:
        """Return when no job is left; what went wrong has been noted by then."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
