"""The files of a run, without torch: JSON files that are whole or not there, and JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shards.files import sync_file, sync_folder, try_lock, write_synced, write_whole

__all__ = [
    "Lines",
    "read_json",
    "read_lines",
    "sync_folder",
    "try_lock",
    "write_json",
    "write_synced",
    "write_whole",
]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(content, indent=1).encode() + b"\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None if there is no file. ValueError if it is damaged."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        content = None
    if isinstance(content, dict):
        return content
    raise ValueError(f"{path} is damaged: it does not hold a JSON object; restore or remove it")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines, without damaged lines (a killed run may leave half of
    one); empty if there is no file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    found = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [line for line in found if isinstance(line, dict)]


class Lines:
    """A file of JSON lines to append to.

    `size` is the length a checkpoint recorded: what was written after it is cut off. None keeps all.
    `lost` counts the bytes that the checkpoint knew of and that are no longer there.
    """

    def __init__(self, path: Path, size: int | None) -> None:
        self.file = path.open("ab")
        there = self.file.tell()
        self.lost = max(0, (size or 0) - there)
        self.file.truncate(there if size is None else min(size, there))
        self.file.seek(0, os.SEEK_END)

    def write(self, line: Mapping[str, object]) -> None:
        self.file.write(json.dumps(line).encode() + b"\n")
        self.file.flush()

    def synced(self) -> int:
        """The size of the file, once all of it is on disk."""
        sync_file(self.file)
        return self.file.tell()
