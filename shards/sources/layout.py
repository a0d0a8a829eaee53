"""What the published layouts have in common: a root, and lists of paths below it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from shards.files import read_bounded
from shards.item import ShardError


def need_folder(root: Path) -> None:
    if not root.is_dir():
        raise ShardError(f"--root {root} {'is not a folder' if root.exists() else 'is not there'}")


def need(path: Path, what: str) -> Path:
    """The path, which must exist; `what` names the download that contains it."""
    if not path.exists():
        raise ShardError(f"{path} is missing: --root must be {what}")
    return path


def relative(text: str, where: str) -> PurePosixPath:
    """A path from a published list, which must stay below the root."""
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ShardError(f"{where}: the path {text!r} leads outside the dataset")
    return path


def rows(path: Path, columns: int, header: int = 0) -> Iterator[tuple[str, list[str]]]:
    """The lines after the header as (where, columns); blank lines are skipped."""
    try:
        lines = read_bounded(path).decode().splitlines()
    except UnicodeDecodeError:
        raise ShardError(f"{path} is not a text file") from None
    for number, line in enumerate(lines[header:], start=header + 1):
        if values := line.split():
            if len(values) != columns:
                raise ShardError(f"{path}:{number} has {len(values)} columns instead of {columns}")
            yield f"{path}:{number}", values
