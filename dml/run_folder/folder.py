"""A run's folder: which config it belongs to, and who may use it. No torch: a login node asks too.

runs/NAME/
    config.yaml          resolved; only the same config resumes the run, or one that is longer
    plan.json            every number that follows from it
    metrics.jsonl        what was learned     (journal.py)
    timing.jsonl         what it took
    events.out.*         both, for TensorBoard
    checkpoints/         whole or not there   (checkpoint.py)
    nearest.png          some test images and their nearest neighbours
    model.safetensors    the trained model, at the end
    result.json          its scores; written last, so a run that has it is finished
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from dml.config import EXECUTION, LATER, Config, flatten, load, to_yaml
from dml.errors import ConfigError, RunError
from dml.plan import Plan
from dml.run_folder.files import (
    DamagedError,
    open_lock,
    read_json,
    try_lock,
    write_json,
    write_whole,
)

RESULT = "result.json"
PATIENCE = 5.0  # seconds


def folder_of(config: Config) -> Path:
    return Path(config.run.dir, config.run.name)


def open_folder(config: Config) -> IO[str]:
    """Make the run's folder if need be, and reserve it until the returned file is closed or this
    process ends. RunError if another process has reserved it, or if it belongs to another config."""
    folder = folder_of(config)
    path = folder / "config.yaml"
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        with ExitStack() as unless_refused:
            lock = unless_refused.enter_context(hold(folder))
            if path.exists():
                refuse_another(folder, load(path), config)
            unless_refused.pop_all()
    except OSError as error:
        raise unwritable(folder, error) from None
    except ConfigError as error:
        raise RunError(
            f"{path} is not a config of this version ({error.problems[0]}); set another run.name"
        ) from None
    return lock


def unwritable(folder: Path, error: OSError) -> RunError:
    return RunError(
        f"the run's folder {folder} cannot be written: {error.strerror}; set run.dir to a folder that "
        "can"
    )


def hold(folder: Path) -> IO[str]:
    """Lock the folder. A process that was killed may hold it for a moment, so wait a little."""
    try:
        file = open_lock(folder / ".lock")
        free = try_lock(file, patience=PATIENCE)
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise unwritable(folder, error) from None
        raise RunError(f"{folder}/.lock cannot be locked: {error.strerror}; remove it") from None
    os.register_at_fork(after_in_child=file.close)  # a loader's worker does not hold the lock
    if not free:
        raise RunError(
            f"another process is training in {folder}; wait for it or end it, or set another "
            "run.name"
        )
    return file


def learned(config: Config) -> dict[str, Any]:
    """The settings that say what is learned up to any step. The length is one of them only where the
    learning rate depends on it, and a key that came later only where it is not at its default."""
    fixed = config.optim.schedule == "cosine"
    settings = flatten(config)
    if config.towers.folder:  # its place may change; its checksum is in the checkpoints
        settings["towers.y"] = "a folder"
    return {
        key: value
        for key, value in settings.items()
        if key not in EXECUTION
        and (fixed or not key.startswith("length."))
        and not (key in LATER and value == LATER[key])
    }


def differences(before: Config, config: Config) -> list[str]:
    """The settings that make it another run."""
    was, now = learned(before), learned(config)
    return [
        f"{key} was {was.get(key)!r} and is {now.get(key)!r}"
        for key in {**was, **now}
        if was.get(key) != now.get(key)
    ]


def settings_digest(config: Config) -> str:
    """A checksum of the settings that say what is learned; a checkpoint belongs to one of them."""
    return hashlib.sha256(json.dumps(learned(config), sort_keys=True).encode()).hexdigest()


def refuse_another(folder: Path, before: Config, config: Config) -> None:
    changed = differences(before, config)
    if not changed:
        return
    why = ""
    if all(each.startswith("length.") for each in changed):
        why = (
            " (with optim.schedule=cosine the learning rate of every step depends on the length, so "
            "a run cannot be trained longer)"
        )
    raise RunError(
        f"{folder} is a run of another config: {'; '.join(changed)}{why}; set run.name to another "
        "name, or remove the folder"
    )


def write_settings(folder: Path, config: Config, plan: Plan) -> None:
    """Write config.yaml and plan.json."""
    try:
        write_whole(folder / "config.yaml", to_yaml(config).encode())
        write_json(folder / "plan.json", plan.to_dict())
    except OSError as error:
        raise unwritable(folder, error) from None


def sound_result(folder: Path) -> dict[str, Any] | None:
    """The content of result.json. A damaged one counts as none: the last evaluation writes it again."""
    try:
        return read_json(folder / RESULT)
    except DamagedError:
        return None


def is_of_length(result: Mapping[str, Any], steps: int) -> bool:
    """Whether a run of so many steps wrote this result. Results of earlier versions do not say."""
    return bool(result.get("planned_steps", steps) == steps)


def refuse_shorter(folder: Path, trained: int, steps: int) -> None:
    """RunError if a run has been trained for more steps than it is to have."""
    if trained > steps:
        raise RunError(
            f"{folder} has already been trained for {trained:,} steps, and length asks for {steps:,}; "
            "set length to as many or more, or run.name to another name"
        )
