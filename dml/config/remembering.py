"""The section of the cross-batch memory, and what a plan refuses of it."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from dml.catalogue import PROXY_LOSSES
from dml.config.keys import key
from dml.rules import MOST_STEPS, POSITIVE, Problem, between


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The embeddings of the last steps, with which every batch is compared as well (XBM)."""

    size: int | None = key(
        "how many embeddings are kept, at least those of one batch; null: there is no memory",
        default=None,
        rule=between(1, 10**9),
        example=10_000,
        later=True,
    )
    from_step: int = key(
        "steps before the memory is filled and used, until embeddings change slowly",
        default=1000,
        rule=between(0, MOST_STEPS),
        later=True,
    )
    weight: float = key(
        "the loss is that of the batch plus this multiple of that of the memory",
        default=1.0,
        rule=POSITIVE,
        later=True,
    )


def idle_keys(memory: Memory) -> Iterator[Problem]:
    """Keys that have no effect, because there is no memory."""
    for each in fields(memory):
        value = getattr(memory, each.name)
        if memory.size is None and value != each.default:
            fix = f"set memory.size, or memory.{each.name}={each.default}"
            yield Problem(f"memory.{each.name}", value, "has no effect without memory.size", fix)


def problems_of_memory(memory: Memory, loss: str, m: int, steps: int) -> Iterator[Problem]:
    """loss: its name. m: the size of a batch. steps: the length of the run."""
    if memory.size is None:
        return
    if loss in PROXY_LOSSES:
        text = f"{loss} compares images with proxies, not with other images"
        yield Problem("memory.size", memory.size, text, "set memory.size=null, or another loss")
    if memory.size < m:
        text = f"must hold the embeddings of at least one batch, which has {m:,} images"
        yield Problem("memory.size", memory.size, text, f"set memory.size to at least {m}")
    if memory.from_step + 1 >= steps:
        text = f"the memory would never be used: the run has {steps:,} steps"
        fix = "lower memory.from_step, train longer, or set memory.size=null"
        yield Problem("memory.from_step", memory.from_step, text, fix)
