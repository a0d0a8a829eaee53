"""The errors that a user may cause. Each text says what is wrong, where, and what to do."""

from collections.abc import Sequence

from dml.rules import Problem
from shards.item import ShardError


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


class NotFiniteError(ValueError):
    """NaN or infinity where there must be none: training has diverged."""
