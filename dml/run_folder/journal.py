"""What a run logs, and to whom: two files of JSON lines, TensorBoard, and the trackers of run.trackers.

    runs/NAME/metrics.jsonl     what was learned: a function of the config, the same for an
                                interrupted run and one that was not
    runs/NAME/timing.jsonl      what it took: seconds, bytes, memory
    runs/NAME/events.out.*      both, with histograms and pictures, for TensorBoard

A resumed run removes what was logged after its checkpoint. Another logger is one more class with
`log` and `close`, in the list of `Journal.open`.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from dml.catalogue import tracker_names
from dml.config import EXECUTION, Config, flatten
from dml.distributed.team import Team
from dml.errors import RunError
from dml.run_folder.events import Evaluation, Event, Training
from dml.run_folder.files import Lines, sync_file
from dml.run_folder.progress import Progress
from dml.run_folder.tensorboard_log import TensorBoard
from dml.run_folder.trackers import Trackers


class Logger(Protocol):
    """Takes the events it cares for. OSError: it cannot be written."""

    def log(self, event: Event) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """size: the length of metrics.jsonl at the run's checkpoint."""

    def __init__(self, folder: Path, size: int) -> None:
        self.metrics = Lines(folder / "metrics.jsonl", size)
        self.timing = Lines(folder / "timing.jsonl", None)

    def log(self, event: Event) -> None:
        match event:
            case Training(step, metrics, timing):
                self.metrics.write({"step": step, **metrics})
                self.timing.write({"step": step, "time": round(time.time(), 3), **timing})
            case Evaluation(step, split, scores, _):
                self.metrics.write({"step": step, "split": split, **scores})

    def close(self) -> None:
        self.metrics.file.close()
        self.timing.file.close()


class Journal:
    """Passes every event to the loggers. A process other than the first has none: its journal is
    silent.

    What cannot be written (a full disk) does not raise here: it is noted for the team's next meeting,
    where all processes fail together.
    """

    def __init__(self, folder: Path, note: Callable[[Exception], None]) -> None:
        self.folder, self.note = folder, note
        self.lines: JsonLines | None = None
        self.loggers: list[Logger] = []

    @classmethod
    def open(
        cls, team: Team, folder: Path, progress: Progress, config: Config | None = None
    ) -> Journal:
        """progress: as the run's checkpoint has it. config: names the trackers."""
        journal = cls(folder, team.note)
        if team.first:
            with journal.noting():
                if config and config.run.trackers:
                    names = tracker_names(config.run.trackers)
                    settings = {k: v for k, v in flatten(config).items() if k not in EXECUTION}
                    journal.loggers = [Trackers(names, folder, settings, team.say)]
                journal.lines = JsonLines(folder, progress.metrics_size)
                journal.loggers += [journal.lines, TensorBoard(folder, progress.step)]
                if journal.lines.metrics.lost:
                    team.say(
                        "metrics.jsonl is shorter than at the checkpoint: lines of it are lost"
                    )
        return journal

    @contextmanager
    def noting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.note(self.problem(error))

    def problem(self, error: OSError) -> RunError:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return RunError(
            f"the journal in {self.folder} cannot be written: {error.strerror}; "
            f"{'make room' if full else 'see to the folder'}, and resume with the same command"
        )

    def log(self, event: Event) -> None:
        with self.noting():
            for logger in self.loggers:
                logger.log(event)

    def length(self) -> int:
        """Bytes of metrics.jsonl so far."""
        return self.lines.metrics.file.tell() if self.lines else 0

    def sync(self) -> None:
        """Return when all of metrics.jsonl is on disk; RunError if that fails."""
        try:
            if self.lines:
                sync_file(self.lines.metrics.file)
        except OSError as error:
            raise self.problem(error) from None

    def close(self) -> None:
        with self.noting():
            for logger in self.loggers:
                logger.close()
