"""Trains until step 5, where something that nobody foresaw happens on one rank.

python crashing.py RANK ERROR --config ...

ERROR: a name such as MemoryError, raised there.
"""

import os
import sys

import torch

import dml.training
from dml.train import main
from shards.output import run_program

learning_rate = dml.training.learning_rate
ERRORS = {
    "RuntimeError": lambda: RuntimeError("nobody foresaw this"),
    "MemoryError": MemoryError,
    "OutOfMemoryError": lambda: torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2 GiB"
    ),
}


def crash(optim, step, steps):
    if step == 5 and os.environ.get("RANK", "0") == sys.argv[1]:
        raise ERRORS[sys.argv[2]]()
    return learning_rate(optim, step, steps)


if __name__ == "__main__":
    dml.training.learning_rate = crash
    run_program(lambda: main(sys.argv[3:]))
