"""Which block sizes are the fastest on a GPU: measured once, then kept in Triton's cache folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import triton
from triton.runtime.cache import get_cache_manager
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench

Choice = TypeVar("Choice")
FILE = "dml_blocks.json"

found: dict[str, int] = {}  # the choices of this process


def fastest(
    choices: Sequence[Choice],
    kernels: str,
    shape: tuple[int, int, int],
    device: torch.device,
    run: Callable[[Choice], None],
) -> Choice:
    """The choice with which `run` takes the least time. shape: own rows, m, d.

    It is the first one in deterministic runs, because sums may get other last bits with another one,
    and without a GPU, in Triton's interpreter.
    """
    if device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        return choices[0]
    key = described(choices, kernels, shape, torch.cuda.get_device_name(device))
    if key not in found:
        found[key] = remembered(key, lambda: quickest([seconds(run, each) for each in choices]))
    return choices[found[key]]


def described(
    choices: Sequence[Choice], kernels: str, shape: tuple[int, int, int], device_name: str
) -> str:
    """All that a choice depends on. Batches of about the same size share it."""
    rounded = [1 << (size - 1).bit_length() for size in shape]
    return json.dumps([kernels, rounded, device_name, triton.__version__, [*map(repr, choices)]])


def remembered(key: str, choose: Callable[[], int]) -> int:
    """The number of the choice, from the cache folder if it is there."""
    folder = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    path = folder.get_file(FILE)
    if path is None:
        path = folder.put(json.dumps({"key": key, "choice": choose()}), FILE, binary=False)
    with open(path) as file:
        return int(json.load(file)["choice"])


def quickest(times: Sequence[float]) -> int:
    return min(range(len(times)), key=times.__getitem__)


def seconds(run: Callable[[Choice], None], choice: Choice) -> float:
    """Infinite if the GPU has too little shared memory or too few registers for it."""
    try:
        return float(do_bench(lambda: run(choice), warmup=5, rep=20, return_mode="median"))
    except OutOfResources:
        return float("inf")
