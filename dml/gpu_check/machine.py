"""Versions and topology: what a reader of the figures must know."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch

from dml.gpu_check.verdict import FAILED, OK, SKIPPED, Line
from shards.cores import available_cores

PACKAGES = ("torch", "triton", "accelerate", "deepspeed", "numpy")
GIB = 2**30


def machine_lines() -> Iterator[Line]:
    versions = {name: version_of(name) for name in PACKAGES}
    versions |= {"python": platform.python_version(), "system": platform.platform()}
    versions["cores"] = str(available_cores())
    yield Line("versions", OK, ", ".join(f"{k} {v}" for k, v in versions.items()), versions)
    if not torch.cuda.is_available():
        yield Line("GPUs", SKIPPED, "torch sees none")
        return
    yield devices()
    yield topology()


def version_of(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def devices() -> Line:
    found: list[dict[str, Any]] = []
    for number in range(torch.cuda.device_count()):
        each = torch.cuda.get_device_properties(number)
        capability = f"{each.major}.{each.minor}"
        memory = round(each.total_memory / GIB, 1)
        found.append({"name": each.name, "capability": capability, "GiB": memory})
    cudnn: Any = torch.backends.cudnn
    nccl: Any = torch.cuda.nccl
    figures = {
        "devices": found,
        "cuda": torch.version.cuda,
        "cudnn": cudnn.version(),
        "nccl": ".".join(map(str, nccl.version())),
    }
    names = ", ".join(sorted({f"{each['name']} ({each['GiB']} GiB)" for each in found}))
    text = f"{len(found)} x {names}, CUDA {figures['cuda']}, NCCL {figures['nccl']}"
    return Line("GPUs", OK if found else FAILED, text, figures)


def topology(command: tuple[str, ...] = ("nvidia-smi", "topo", "-m")) -> Line:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return Line("topology", SKIPPED, f"{' '.join(command)}: {error}")
    return Line("topology", OK, "as nvidia-smi topo -m tells it", {"topology": done.stdout})
