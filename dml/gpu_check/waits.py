"""Where the host waits for the device in a step: torch itself tells (set_sync_debug_mode)."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dml.gpu_check.place import Place
from dml.gpu_check.speed import Step
from dml.gpu_check.verdict import FAILED, OK, SKIPPED, Line

MOST_WAITS = 2  # per step, from the second on
SAYS = "synchronizing CUDA operation"
SetMode = Callable[[str], Any]


def wait_lines(place: Place) -> Iterator[Line]:
    names = ("waits per step", "no wait before its end")
    if place.device.type != "cuda":
        yield from (Line(name, SKIPPED, "only CUDA tells of waits") for name in names)
        return
    step = Step(place)
    for _ in range(3):
        step.update()
    mode: SetMode = torch.cuda.set_sync_debug_mode
    yield count_line(names[0], step.update, mode)
    yield error_line(names[1], step.backward, mode)


def count_line(name: str, step: Callable[[], Any], mode: SetMode) -> Line:
    """A whole step: it waits where it reads the loss, and nowhere else."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mode("warn")
        try:
            step()
        finally:
            mode("default")
    found = Counter(f"{w.filename}:{w.lineno}" for w in caught if SAYS in str(w.message))
    count = sum(found.values())
    text = f"{count}, at most {MOST_WAITS}" + "".join(f"; {where}" for where in found)
    return Line(name, OK if count <= MOST_WAITS else FAILED, text, {"waits": dict(found)})


def error_line(name: str, part: Callable[[], Any], mode: SetMode) -> Line:
    """Forward, loss and backward, in which a wait is an error."""
    mode("error")
    try:
        part()
    except RuntimeError as error:
        if SAYS not in str(error):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename}:{frames[-1].lineno}"
        return Line(name, FAILED, f"{where} waits for the device", {"where": where})
    finally:
        mode("default")
    return Line(name, OK, "forward, loss and backward are queued without a wait")
