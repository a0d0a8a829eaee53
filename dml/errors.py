"""The errors that a user may cause. Each text says what is wrong, where, and what to do."""

import errno
import os
import sys
from collections.abc import Callable, Sequence

from dml.rules import Problem
from shards.item import ShardError
from shards.output import STOPPED

DONE, NO_MEMORY, MISTAKE = 0, 1, 2


def in_full(path: str) -> str:
    """A path as it was given, and where it points to."""
    full = os.path.abspath(os.path.expanduser(path))
    return path if path == full else f"{path} ({full})"


class Mistake(ValueError):
    """A request that cannot be carried out; programs print it without a traceback."""


class ConfigError(Mistake):
    """All problems of a config together."""

    def __init__(self, problems: Sequence[Problem], where: str) -> None:
        super().__init__(problems, where)
        self.problems = tuple(problems)
        self.where = where

    def __str__(self) -> str:
        count = f"{len(self.problems)} problem{'s' * (len(self.problems) != 1)}"
        return "\n  ".join([f"{count} in {self.where}:", *map(str, self.problems)])


class LaunchError(Mistake):
    """The processes were not launched as one run."""


class ModelError(Mistake):
    """The model cannot be made."""


class RunError(Mistake):
    """The run's folder cannot be used."""


class CheckpointError(Mistake):
    """A checkpoint cannot be read or written."""


class EmbeddedError(Mistake):
    """A folder of embeddings cannot be read or written."""


# What a program answers with its sentence and exit code 2; shards know nothing of dml.
MISTAKES = (Mistake, ShardError)


def memory_sentence(
    error: BaseException, batch: str = "engine.micro_batch", workers: str = "data.workers"
) -> str | None:
    """What to do about an error of too little memory; None for any other error.

    batch, workers: what a user sets to need less.
    """
    text, why = str(error), f"{type(error).__name__}: {error}".splitlines()[0]
    if "Bus error" in text or "shared memory" in text or "</torch_" in text:
        return (
            f"/dev/shm is full ({why}); set {workers} to less, or start the container with more of "
            "it (docker run --shm-size=8g)"
        )
    if "DataLoader worker" in text and "Caught" not in text:
        return (
            f"a loader's worker was killed ({why}), most often because the machine's memory is "
            f"full; set {workers} to less"
        )
    if type(error).__name__ == "OutOfMemoryError" and not isinstance(error, MemoryError):
        return f"the memory of the GPU is full ({why}); set {batch} to less"
    no_memory = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if isinstance(error, MemoryError) or no_memory or "DefaultCPUAllocator" in text:
        return f"the machine's memory is full ({why}); set {batch} or {workers} to less"
    return None


class NotFiniteError(ValueError):
    """NaN or infinity where there must be none: training has diverged."""


def run_command(
    name: str,
    work: Callable[[], None],
    interrupted: str = "interrupted",
    to_need_less: tuple[str, str] | None = None,
) -> int:
    """The exit code of a command on a trained model; what went wrong is printed in a sentence.

    to_need_less: what a user sets where memory is short, as for `memory_sentence`; None: such an error is
    unexpected.
    """
    try:
        work()
        return DONE
    except (*MISTAKES, NotFiniteError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        print(f"{name}: {interrupted}", file=sys.stderr)
        return STOPPED
    except Exception as error:
        sentence = memory_sentence(error, *to_need_less) if to_need_less else None
        if sentence is None:
            raise
        print(f"{name}: {sentence}", file=sys.stderr)
        return NO_MEMORY
