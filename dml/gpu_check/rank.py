"""One process of a group of checks, which dml/gpu_check/group.py has started:

python -m dml.gpu_check.rank OUT SIZES CHECK...

The first process appends to OUT a JSON line when a check begins, and one per line of the check.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState

from dml.config import Engine
from dml.distributed.processes import make_accelerator, set_numerics
from dml.gpu_check.exact import group_lines, loss_lines, recall_lines
from dml.gpu_check.place import Place, Sizes
from dml.gpu_check.speed import gather_speed, loss_speed, training_speed
from dml.gpu_check.stages import zero_lines
from dml.gpu_check.verdict import Line
from dml.gpu_check.waits import wait_lines

CHECKS: dict[str, Callable[[Place], Iterable[Line]]] = {
    "losses": lambda place: loss_lines(place.device, place.sizes),
    "Recall@K": lambda place: recall_lines(place.device, place.sizes),
    "waits": wait_lines,
    "loss speed": lambda place: loss_speed(place.device, place.sizes),
    "training speed": training_speed,
    "training speed, bf16": training_speed,
    "processes": group_lines,
    "all-gather": gather_speed,
    "ZeRO": zero_lines,
}


def main(argv: Sequence[str]) -> int:
    out, sizes, *names = argv
    set_numerics(Engine())  # as in training; the loss and retrieval must not be touched by it
    given = json.loads(sizes)
    for name in names:
        AcceleratorState._reset_state()
        accelerator = make_accelerator("bf16" if name.endswith("bf16") else "fp32")
        place = Place(accelerator, Sizes(**{**given, "speed_rows": tuple(given["speed_rows"])}))
        append(place, Path(out), {"begins": name})
        for line in CHECKS[name](place):
            append(place, Path(out), asdict(line))
    accelerator.wait_for_everyone()
    return 0


def append(place: Place, out: Path, content: dict[str, Any]) -> None:
    if place.rank == 0:
        with out.open("a") as file:
            file.write(json.dumps(content) + "\n")


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # threads of gloo and NCCL may abort an interpreter that shuts down
