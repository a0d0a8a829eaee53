"""The kinds of trials, by name. The modules on_*.py add theirs when they are imported."""

from collections.abc import Callable
from dataclasses import dataclass

from chaos.lab import Trial


@dataclass(frozen=True)
class Kind:
    """carry_out: a function that returns a verdict, and raises Violation or Skip. per_round: how many
    trials of it are in a round of a campaign; a slow kind may have a fraction of one."""

    what: str
    carry_out: Callable[[Trial], str]
    per_round: float = 1


KINDS: dict[str, Kind] = {}


def kind(name: str, what: str, per_round: float = 1) -> Callable[[Callable[[Trial], str]], object]:
    """Adds a function to KINDS."""

    def add(function: Callable[[Trial], str]) -> Callable[[Trial], str]:
        KINDS[name] = Kind(what, function, per_round)
        return function

    return add
