"""Checkpoints: whole or not there.

    runs/NAME/checkpoints/
        step-00000200/              the one before the last, in case the last is damaged
        step-00000400/              the last
            model.safetensors
            optimizer.safetensors
            loss.safetensors        what the loss learns: proxies of all classes, and their slots
            memory.safetensors      of a run with a cross-batch memory
            state.json              progress; checksums of the files above and of this file
        best-00000300/              model.safetensors and state.json of the best validation
        .writing/                   unfinished: never read, overwritten by the next save

A checkpoint is written aside, synced to disk, and renamed; only then is an older one removed. The state
says which checkpoint is the last, not the folder's name. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from dml.errors import CheckpointError, NotFiniteError
from dml.run_folder.files import sync_folder, write_synced
from shards.files import remove

FORMAT, VERSION = "dml-checkpoint", 1
STATE, ASIDE = "state.json", ".writing"
KEPT = 2
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: its content matches its checksums."""

    folder: Path
    state: Mapping[str, Any]
    tensors: Mapping[str, dict[str, Tensor]]  # file -> name -> tensor


def write(root: Path, name: str, state: Mapping[str, Any], tensors: Mapping[str, Tensors]) -> Path:
    """Write root/name, whole. tensors: file -> name -> tensor. Other checkpoints are not touched."""
    for file, content in tensors.items():
        for key, x in content.items():
            if x.is_floating_point() and not x.isfinite().all():
                raise NotFiniteError(f"{key} of {file} holds NaN or infinity")
    aside, final = root / ASIDE, root / name
    try:
        root.mkdir(exist_ok=True)  # without parents: a run's folder that was moved stays moved
        remove(aside)
        aside.mkdir()
        sums = {}
        for file, content in tensors.items():
            data = save({key: x.contiguous().cpu() for key, x in content.items()})
            sums[file] = hashlib.sha256(data).hexdigest()
            write_synced(aside / file, data)
        head = {"format": FORMAT, "version": VERSION, "state": dict(state), "files": sums}
        whole = {**head, "sha256": digest(head)}
        write_synced(aside / STATE, json.dumps(whole, indent=1).encode())
        sync_folder(aside)
        remove(final)  # left by an abandoned attempt; no checkpoint refers to it
        aside.rename(final)
        sync_folder(root)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)  # what is in it may fill the disk
        kept = any(states(root).values())
        then = "the one before is kept, and" if kept else "there is none before it; make room, and"
        again = "resumes from it" if kept else "starts the run again"
        raise CheckpointError(
            f"the checkpoint {final} cannot be written: {error.strerror}; {then} the same command {again}"
        ) from None
    return final


def write_step(root: Path, state: Mapping[str, Any], tensors: Mapping[str, Tensors]) -> None:
    """Write the checkpoint of state["step"], then remove what neither it nor the one before needs.

    state["best"]: the step whose best-* it refers to, or None.
    """
    write(root, f"step-{state['step']:08d}", state, tensors)
    found = states(root)
    before = {folder: s for folder, s in found.items() if s and s["step"] <= state["step"]}
    kept = sorted(before, key=lambda folder: before[folder]["step"])[-KEPT:]
    needed = {best_name(before[folder]["best"]) for folder in kept}
    for folder in (*found, *root.glob("best-*")):
        if folder not in kept and folder.name not in needed:
            shutil.rmtree(folder, ignore_errors=True)


def best_name(step: int | None) -> str:
    return "" if step is None else f"best-{step:08d}"


def states(root: Path) -> dict[Path, dict[str, Any] | None]:
    """The folders that look like checkpoints of a step, each with its step and best step; None for a
    damaged one."""
    found: dict[Path, dict[str, Any] | None] = {}
    for path in root.glob(f"[!.]*/{STATE}"):
        if not path.parent.name.startswith("best-"):
            try:
                state = json.loads(path.read_bytes())["state"]
                found[path.parent] = {"step": int(state["step"]), "best": state["best"]}
            except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
                found[path.parent] = None
    return found


def read_last(root: Path) -> tuple[Checkpoint | None, list[str]]:
    """The last whole checkpoint of a step, and a sentence for every later one that is damaged."""
    damaged: list[str] = []
    found = states(root)

    def step(folder: Path) -> float:
        state = found[folder]
        return math.inf if state is None else state["step"]

    for folder in sorted(found, key=step, reverse=True):
        try:
            return read(folder), damaged
        except CheckpointError as error:
            damaged.append(str(error))
    return None, damaged


def read(folder: Path) -> Checkpoint:
    try:
        whole = json.loads((folder / STATE).read_bytes())
        head = {key: value for key, value in whole.items() if key != "sha256"}
        if whole["sha256"] != digest(head):
            raise ValueError(f"{STATE} differs from its checksum")
        if (whole["format"], whole["version"]) != (FORMAT, VERSION):
            raise ValueError(f"it is of version {whole['version']}, this program reads {VERSION}")
        tensors = {}
        for file, expected in whole["files"].items():
            data = (folder / file).read_bytes()
            if hashlib.sha256(data).hexdigest() != expected:
                raise ValueError(f"{file} differs from its checksum")
            tensors[file] = load(data)
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.filename}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = error if type(error) is ValueError else f"{STATE} is damaged"
        raise CheckpointError(f"{folder}: {reason}") from None
    return Checkpoint(folder, whole["state"], tensors)


def digest(head: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(head, sort_keys=True).encode()).hexdigest()
