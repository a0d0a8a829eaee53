"""Finds the configs and the bundled shards that are installed with the package, for a working folder
that has no such file."""

import os
from pathlib import Path

PACKAGES = Path(__file__).resolve().parents[2]
CONFIGS = PACKAGES / "dml" / "configs"  # in the repository a link to configs/
BUNDLED = "shards/bundled"


def find_config(path: Path) -> Path:
    """The path if there is such a file, or else the config of the package that it names."""
    return path if os.path.isfile(path) else packaged_config(path) or path


def packaged_config(path: Path) -> Path | None:
    """The config of the package that configs/sop.yaml, sop.yaml or sop names; None if there is none."""
    if path.is_absolute() or ".." in path.parts:
        return None
    name = path.relative_to("configs") if path.parts[:1] == ("configs",) else path
    packaged = CONFIGS / (name if name.suffix else f"{name}.yaml")
    return packaged if os.path.isfile(packaged) else None


def find_shards(path: str) -> str:
    """The path, or the bundled shards of the package that it names if the path does not exist."""
    packaged = PACKAGES / path
    bundled = Path(path).is_relative_to(BUNDLED) and not os.path.exists(path)
    return str(packaged) if bundled and os.path.isdir(packaged) else path
