"""What a run asks of Slurm: the keys of a sweep's `slurm:` section, each of which is also a flag."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, get_args, get_type_hints

from dml.config import parse
from dml.rules import (
    PATH,
    POSITIVE,
    Problem,
    Rule,
    between,
    did_you_mean,
    fit,
    one_of,
    unknown_keys,
)
from launch.processes import process_environment
from launch.zero import (
    STAGES,
    AccelerateError,
    accelerate_variables,
    deepspeed_variables,
)

RESOURCE_HELP = {
    "nodes": "nodes per run",
    "processes_per_node": "processes per node; with GPUs, one per GPU",
    "gpus_per_node": "GPUs per node; 0: none",
    "cpus_per_process": "cores per process",
    "minutes": "time limit; a run that needs longer is requeued and resumed",
    "partition": "the partition, as for sbatch",
    "account": "the account, as for sbatch",
    "constraint": "the constraint, as for sbatch",
    "qos": "the quality of service, as for sbatch",
    "gpu_type": "the type of the GPUs, as in --gpus-per-node=TYPE:N",
    "gres": "generic resources per node, as for sbatch; GPUs in it take the place of --gpus-per-node",
    "memory_gb": "memory per node, in GB",
    "parallel": "limit of runs at the same time in one job array",
    "modules": "environment modules that the job loads",
    "setup": "lines of shell that the job runs before the training, after loading modules",
    "environment": "variables of the training, such as NCCL_SOCKET_IFNAME=ib0",
    "deepspeed": f"DeepSpeed: {', '.join(STAGES)}, as for dml train",
    "accelerate": "a config file of accelerate, for its DeepSpeed section; nodes and processes are those "
    "of this section",
    "images_per_second": "assumed training speed per process, from which --dry-run estimates hours",
}


PRINTABLE = Rule("printable, not empty", lambda text: bool(text) and text.isprintable())
WORD = Rule("letters, digits, and . _ -", lambda text: bool(re.fullmatch(r"[\w.-]+", text)))
# Every process gets these from its launcher.
RESERVED = {*process_environment(0, 0, 1, 1, "", 0), "PYTHONPATH", "PATH"}


def _key(rule: Rule, default: int | None, *, compare: bool = True) -> Any:
    return field(default=default, metadata={"rule": rule}, compare=compare)


def _many(read: Callable[[object], Any]) -> Any:
    """A key with several values. read: the checked values; ValueError says what they must be."""
    return field(default=(), metadata={"read": read})


def _texts(value: object) -> tuple[str, ...]:
    if isinstance(value, list):
        try:
            return tuple(fit(item, str, PRINTABLE) for item in value)
        except ValueError:
            pass
    raise ValueError("must be a list of texts, each printable and not empty")


def _variables(value: object) -> tuple[tuple[str, str], ...]:
    given = value if isinstance(value, dict) else {}
    if given != value:
        raise ValueError("must be a mapping of names to values, such as {NCCL_SOCKET_IFNAME: ib0}")
    for name, item in given.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{name!r} is no name of a variable")
        if name in RESERVED:
            raise ValueError(f"the launcher sets {name}")
        if type(item) not in (str, int, float) or not str(item).isprintable():
            raise ValueError(f"the value of {name} must be printable text or a number; quote it")
    return tuple((name, str(item)) for name, item in given.items())


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
    qos: str | None = _key(PRINTABLE, None)
    gpu_type: str | None = _key(WORD, None)
    gres: str | None = _key(PRINTABLE, None)
    memory_gb: int | None = _key(between(1, 10**6), None)
    parallel: int | None = _key(between(1, 10**6), None)
    modules: tuple[str, ...] = _many(_texts)
    setup: tuple[str, ...] = _many(_texts)
    environment: tuple[tuple[str, str], ...] = _many(_variables)
    deepspeed: str | None = _key(one_of(STAGES), None)
    accelerate: str | None = _key(PATH, None)
    images_per_second: float | None = _key(POSITIVE, None, compare=False)

    @property
    def processes(self) -> int:
        return self.nodes * self.processes_per_node

    @property
    def gres_gpus(self) -> int | None:
        """The GPUs per node that `gres` asks for; None if it names none."""
        asked = [each.split("(")[0].split(":") for each in (self.gres or "").split(",")]
        numbers = [words[-1] for words in asked if words[0] == "gpu"]
        return sum(int(n) if n.isdigit() else 1 for n in numbers) if numbers else None

    def variables(self) -> dict[str, str]:
        """The variables of the training's processes; AccelerateError if its config is wrong."""
        engine = {}
        if self.deepspeed:
            engine = deepspeed_variables(self.deepspeed)
        elif self.accelerate:
            engine = accelerate_variables(self.accelerate)
        if engine and not self.gpus_per_node:
            engine["DS_ACCELERATOR"] = "cpu"
        return {**engine, **dict(self.environment)}

    def problems(self) -> Iterator[Problem]:
        """Keys that do not go together."""
        if self.gpus_per_node not in (0, self.processes_per_node):
            rule = f"must equal processes_per_node, which is {self.processes_per_node}, or be 0"
            fix = "a process uses one GPU"
            yield Problem("slurm.gpus_per_node", self.gpus_per_node, rule, fix)
        if self.gres_gpus not in (None, self.gpus_per_node):
            rule = f"asks for {self.gres_gpus} GPUs and gpus_per_node for {self.gpus_per_node}"
            yield Problem("slurm.gres", self.gres, rule, "let both ask for the same number")
        if self.gpu_type and (self.gres_gpus is not None or not self.gpus_per_node):
            rule = "needs gpus_per_node, and no GPUs in gres"
            yield Problem("slurm.gpu_type", self.gpu_type, rule, "or write the type into gres")
        if self.deepspeed and self.accelerate:
            rule = "cannot be set beside slurm.deepspeed"
            yield Problem("slurm.accelerate", self.accelerate, rule, "remove one of them")
        try:
            self.variables()
        except AccelerateError as error:
            yield Problem("slurm.accelerate", self.accelerate, error.rule, error.fix)


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


def takes_many(key: str) -> bool:
    return "read" in KEYS[key].metadata


def read_flag(key: str, given: str | list[str]) -> Any:
    """The value of a flag, or the values; ValueError says what they must be."""
    if isinstance(given, str):
        return _fit(key, given if _kind(key) is str else parse(given))
    if key == "environment":
        pairs = [text.partition("=") for text in given]
        return _fit(key, {name: value if equals else None for name, equals, value in pairs})
    return _fit(key, given)


def _fit(key: str, value: object) -> Any:
    read = KEYS[key].metadata.get("read")
    return read(value) if read else fit(value, _kind(key), KEYS[key].metadata["rule"])


def _kind(key: str) -> type:
    """The type of a key with one value, apart from None."""
    hint = _HINTS[key]
    kind: type = next(kind for kind in (get_args(hint) or (hint,)) if kind is not type(None))
    return kind
