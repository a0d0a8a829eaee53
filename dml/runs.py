"""A run's folder: which config it is of, and what stands in it.

runs/NAME/
    config.yaml          resolved; a run is continued only by the same
    plan.json            every number that followed from it
    metrics.jsonl, timing.jsonl, events.out.*       (dml/journal.py)
    checkpoints/                                    (dml/checkpoint.py)
    model.safetensors    the trained model, at the end
    nearest.png          some test images and their nearest
    result.json          its scores; written last, so a run that has it is finished
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from PIL import Image
from safetensors.torch import save
from torch import Tensor

from dml.checkpoint import write_whole
from dml.config import Config, ConfigError, load, to_dict, to_yaml
from dml.plan import Plan

# How a run is carried out, and where; it may change when the run is continued.
MAY_CHANGE = {
    "run.dir",
    "data.shards",
    "data.workers",
    "data.prefetch",
    "engine.kind",
    "engine.tile",
    "engine.micro_batch",
    "save.every_minutes",
}


class RunError(ValueError):
    """The run's folder cannot be used."""


def flat(config: Config) -> dict[str, Any]:
    return {
        f"{section}.{key}": value
        for section, values in to_dict(config).items()
        for key, value in values.items()
    }


def open_folder(config: Config) -> Path:
    """The run's folder, made if need be; RunError if it is of another config."""
    folder = Path(config.run.dir) / config.run.name
    path = folder / "config.yaml"
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        if path.exists():
            refuse_another(folder, load(path), config)
        write_whole(path, to_yaml(config).encode())
    except OSError as error:
        raise RunError(
            f"the run's folder {folder} cannot be written: {error.strerror}; set run.dir to a "
            "folder that can"
        ) from None
    except ConfigError as error:
        raise RunError(
            f"{path} is not a config of this version ({error.problems[0]}); set another run.name"
        ) from None
    return folder


def hold(folder: Path) -> IO[str]:
    """The folder for this process alone, until the file is closed or the process ends."""
    try:
        file = (folder / ".lock").open("w")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunError(
            f"another process is training in {folder}; wait for it or end it, or set another "
            "run.name"
        ) from None
    except OSError as error:
        # some cluster file systems have no locks; to train without is better than not to train
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise RunError(f"{folder}/.lock cannot be locked: {error.strerror}") from None
    return file


def differences(before: Config, config: Config) -> list[str]:
    """What makes it another run."""
    was, now = flat(before), flat(config)
    return [
        f"{key} was {was.get(key)!r} and is {now.get(key)!r}"
        for key in {**was, **now}
        if was.get(key) != now.get(key) and key not in MAY_CHANGE
    ]


def refuse_another(folder: Path, before: Config, config: Config) -> None:
    changed = differences(before, config)
    if changed:
        raise RunError(
            f"{folder} is a run of another config: {'; '.join(changed)}; set run.name to another "
            "name, or remove the folder"
        )


def write_plan(folder: Path, plan: Plan) -> None:
    try:
        write_whole(folder / "plan.json", as_json(plan.to_dict()))
    except OSError as error:
        raise RunError(f"{folder}/plan.json cannot be written: {error.strerror}") from None


def write_result(
    folder: Path, weights: Mapping[str, Tensor], picture: Image.Image, result: Mapping[str, Any]
) -> None:
    """The trained model and the picture, then the scores."""
    try:
        png = io.BytesIO()
        picture.save(png, "PNG", optimize=True)
        write_whole(folder / "nearest.png", png.getvalue())
        model = save({name: x.contiguous().cpu() for name, x in weights.items()})
        write_whole(folder / "model.safetensors", model)
        write_whole(folder / "result.json", as_json(result))
    except OSError as error:
        raise RunError(
            f"the result of {folder} cannot be written: {error.strerror}; the same command tries "
            "again"
        ) from None


def as_json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=1).encode() + b"\n"


def is_finished(folder: Path) -> bool:
    return (folder / "result.json").exists()
