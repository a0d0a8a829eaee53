"""Work that goes on beside the training: one job at a time, in a thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class Background:
    """note: takes what goes wrong in a job, to be raised at the team's next meeting.

    Its thread starts at once and takes the jobs in order. The handler of a signal may raise at any time, as torch's
    does when a loader's worker is killed: in the middle of the start of a thread, nobody could wait for it.
    """

    def __init__(self, note: Callable[[Exception], None]) -> None:
        self.note = note
        self.pool = ThreadPoolExecutor(1, "saving")
        self.wait()

    def start(self, job: Callable[[], object]) -> None:
        """Start a job, once the one before has ended."""
        self.wait()
        self.pool.submit(self.run, job)

    def run(self, job: Callable[[], object]) -> None:
        try:
            job()
        except Exception as error:  # noqa: BLE001  raised by all processes at their next meeting
            self.note(error)

    def wait(self) -> None:
        """Return when no job is left; what went wrong has been noted by then."""
        self.pool.submit(lambda: None).result()
