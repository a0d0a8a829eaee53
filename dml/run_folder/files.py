"""The files of a run, without torch: JSON files that are whole or not there, and JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shards.files import (
    no_follow,
    open_lock,
    regular,
    sync_file,
    sync_folder,
    try_lock,
    write_synced,
    write_whole,
)

__all__ = [
    "DamagedError",
    "Lines",
    "open_lock",
    "read_json",
    "read_lines",
    "sync_file",
    "sync_folder",
    "try_lock",
    "write_json",
    "write_synced",
    "write_whole",
]

LONGEST = 2**20  # bytes of a JSON file, and of a JSON line


class DamagedError(ValueError):
    """A file of a run that cannot be used; the text names it."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} is damaged: {why}; restore or remove it")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(content, indent=1).encode() + b"\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None if there is no file. DamagedError if it holds anything else."""
    try:
        with open(path, "rb", opener=regular) as file:
            data = file.read(LONGEST + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedError(path, str(error.strerror)) from None
    content = parse_object(data)
    if content is None:
        raise DamagedError(path, "it does not hold a JSON object")
    return content


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines, without damaged lines (a killed run may leave half of
    one); empty if there is no file. DamagedError if it has lines and none of them is an object."""
    found, complete = [], False
    try:
        with open(path, "rb", opener=regular) as file:
            while line := file.readline(LONGEST + 1):
                if len(line) > LONGEST:
                    raise DamagedError(path, f"a line is longer than {LONGEST:,} bytes")
                complete = complete or line.endswith(b"\n")
                content = parse_object(line)
                found += [] if content is None else [content]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DamagedError(path, str(error.strerror)) from None
    if complete and not found:
        raise DamagedError(path, "none of its lines is a JSON object")
    return found


def parse_object(data: bytes) -> dict[str, Any] | None:
    """The JSON object in some bytes, or None if they hold anything else."""
    try:
        content = json.loads(data.decode()) if len(data) <= LONGEST else None
    except (ValueError, RecursionError):  # ValueError: also not UTF-8, or a number of 5,000 digits
        return None
    return content if isinstance(content, dict) else None


class Lines:
    """A file of JSON lines to append to.

    `size` is the length a checkpoint recorded: what was written after it is cut off. None keeps all.
    `lost` counts the bytes that the checkpoint knew of and that are no longer there.
    """

    def __init__(self, path: Path, size: int | None) -> None:
        self.file = os.fdopen(no_follow(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")
        there = self.file.tell()
        self.lost = max(0, (size or 0) - there)
        self.file.truncate(there if size is None else min(size, there))
        self.file.seek(0, os.SEEK_END)

    def write(self, line: Mapping[str, object]) -> None:
        self.file.write(json.dumps(line).encode() + b"\n")
        self.file.flush()
