"""What a run asks of Slurm: the keys of a sweep's `slurm:` section, each of which is also a flag."""

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, get_args, get_type_hints

from dml.config import parse
from dml.rules import POSITIVE, Problem, Rule, between, did_you_mean, fit, unknown_keys

RESOURCE_HELP = {
    "nodes": "nodes per run",
    "processes_per_node": "processes per node; with GPUs, one per GPU",
    "gpus_per_node": "GPUs per node; 0: none",
    "cpus_per_process": "cores per process",
    "minutes": "time limit; a run that needs longer is requeued and resumed",
    "partition": "the partition, as for sbatch",
    "account": "the account, as for sbatch",
    "constraint": "the constraint, as for sbatch",
    "memory_gb": "memory per node, in GB",
    "parallel": "limit of runs at the same time in one job array",
    "images_per_second": "assumed training speed per process, from which --dry-run estimates hours",
}


PRINTABLE = Rule("printable, not empty", lambda text: bool(text) and text.isprintable())


def _key(rule: Rule, default: int | None, *, compare: bool = True) -> Any:
    return field(default=default, metadata={"rule": rule}, compare=compare)


@dataclass(frozen=True)
class Resources:
    """What a run asks of Slurm, with one task per process.

    Runs with equal resources share a job array. images_per_second is an assumption for estimates and
    is not passed to Slurm, so it takes no part in the comparison.
    """

    nodes: int = _key(between(1, 10_000), 1)
    processes_per_node: int = _key(between(1, 1_000), 1)
    gpus_per_node: int = _key(between(0, 1_000), 0)
    cpus_per_process: int = _key(between(1, 10_000), 1)
    minutes: int = _key(between(1, 10**6), 60)
    partition: str | None = _key(PRINTABLE, None)
    account: str | None = _key(PRINTABLE, None)
    constraint: str | None = _key(PRINTABLE, None)
    memory_gb: int | None = _key(between(1, 10**6), None)
    parallel: int | None = _key(between(1, 10**6), None)
    images_per_second: float | None = _key(POSITIVE, None, compare=False)

    @property
    def processes(self) -> int:
        return self.nodes * self.processes_per_node


KEYS: dict[str, "Field[Any]"] = {key.name: key for key in fields(Resources)}
_HINTS = get_type_hints(Resources)


def flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def read_resources(given: Mapping[str, object], report: Callable[[Problem], None]) -> Resources:
    """The resources of a `slurm:` section; every problem is reported and its key left at the default."""
    values: dict[str, Any] = {}

    def unknown(key: str, value: object) -> Problem:
        fix = f"{did_you_mean(key, KEYS)}slurm has {', '.join(KEYS)}"
        return Problem(f"slurm.{key}", value, "unknown key", fix)

    for problem in unknown_keys(given, KEYS, unknown):
        report(problem)
    for key, value in given.items():
        if key not in KEYS:
            continue
        if value is not None or type(None) not in get_args(_HINTS[key]):
            try:
                values[key] = _fit(key, value)
            except ValueError as error:
                fix = f"the default is {KEYS[key].default}"
                report(Problem(f"slurm.{key}", value, str(error), fix))
    return Resources(**values)


def read_flag(key: str, text: str) -> Any:
    """The value of a flag; ValueError says what it must be."""
    return _fit(key, text if _kind(key) is str else parse(text))


def _fit(key: str, value: object) -> Any:
    return fit(value, _kind(key), KEYS[key].metadata["rule"])


def _kind(key: str) -> type:
    """The type of a key, apart from None."""
    hint = _HINTS[key]
    kind: type = next(kind for kind in (get_args(hint) or (hint,)) if kind is not type(None))
    return kind
