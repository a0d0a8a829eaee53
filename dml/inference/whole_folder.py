"""A folder of files that is whole or not there: written aside, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from dml.errors import EmbeddedError
from dml.run_folder.files import sync_folder, write_synced


def refuse_occupied(
    folder: Path,
    ours: Callable[[Path], bool],
    what: str,
    program: str,
    overwrite: bool,
    option: str = "--out",
) -> None:
    """EmbeddedError if the folder cannot be made, or if something else would be destroyed; called
    before the work. ours: whether a folder is what the program wrote. what: the folder would hold, as in
    "embeddings" or "a page". option: names the folder."""
    another = f"give another {option}"
    if folder.exists() and not folder.is_dir():
        raise EmbeddedError(f"{folder} is a file: {another}")
    held = folder.exists() and os.listdir(folder)
    if held and not ours(folder):
        raise EmbeddedError(f"{folder} is not empty, and not what {program} wrote: {another}")
    if held and not overwrite:
        them = "it" if what.startswith("a ") else "them"
        raise EmbeddedError(
            f"{folder} holds {what} already: --overwrite replaces {them}, or {another}"
        )
    above = next(path for path in folder.absolute().parents if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise EmbeddedError(f"{folder} cannot be made: {above} cannot be written; {another}")


def replace_folder(
    folder: Path, files: Iterable[tuple[str, bytes]], *, synced: bool = True
) -> None:
    """Write files by their relative names. What is there is replaced: see refuse_occupied. synced: every
    file reaches the disk before the folder has its name."""
    folder = folder.resolve()
    aside, before = (folder.with_name(f".{folder.name}.{what}") for what in ("writing", "before"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        for name, data in files:
            (aside / name).parent.mkdir(exist_ok=True)
            if synced:
                write_synced(aside / name, data)
            else:
                (aside / name).write_bytes(data)
        sync_folder(aside)
        if folder.exists():
            shutil.rmtree(before, ignore_errors=True)
            folder.rename(before)
        aside.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise EmbeddedError(
            f"{folder} cannot be written: {error.strerror}; make room, or write it elsewhere"
        ) from None
    finally:
        if before.exists() and not folder.exists():
            before.rename(folder)
        for rest in (aside, before):
            shutil.rmtree(rest, ignore_errors=True)
