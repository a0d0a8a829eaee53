"""Vectors of any encoder: a folder with one matrix and a table of its rows.

    root/X.npy            n x d, float16 or float32; any name
    root/labels.csv       column label, and perhaps split, super_class and name; any name
    root/index.jsonl      instead of a .csv: image, class and perhaps split and super_class, as
                          `dml/embed.py --features` writes it

Row i of the table belongs to vector i.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shards.files import read_bounded
from shards.item import Collection, Item, ShardError
from shards.sources.folder import hold_out
from shards.sources.layout import need_folder
from shards.sources.tables import SPLITS
from shards.vector import DTYPES, encoded

LARGEST_TABLE = 2**32  # bytes


@dataclass(frozen=True, kw_only=True)
class VectorItem(Item):
    path: Path
    row: int

    def encoded(self) -> bytes:
        return encoded(matrix(self.path)[self.row])


@lru_cache(maxsize=1)
def matrix(path: Path) -> NDArray[Any]:
    """The matrix of a file, read where it is needed; ShardError if it is none."""
    try:
        X: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise ShardError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # noqa: BLE001  numpy raises many kinds on damaged files
        raise ShardError(f"{path} is a damaged .npy file ({error})") from None
    if not isinstance(X, np.ndarray) or X.ndim != 2 or X.dtype.str not in DTYPES:
        what = f"{X.dtype} of the shape {X.shape}" if isinstance(X, np.ndarray) else "no array"
        raise ShardError(f"{path} holds {what}, but it must be n x d in float16 or float32")
    return X


def collect(root: Path, test_classes: float | None = None, seed: int = 0) -> Collection:
    """test_classes: the share of the classes to hold out where there are no splits."""
    need_folder(root)
    vectors = the_one(root, "*.npy", "a matrix n x d of float16 or float32")
    listing = root / "index.jsonl"
    listing = listing if listing.exists() else the_one(root, "*.csv", "a .csv with a column label")
    read = read_jsonl if listing.suffix == ".jsonl" else read_csv
    items: list[Item] = [
        _item(row, where, number, vectors) for number, (where, row) in enumerate(read(listing))
    ]
    if len(items) != len(matrix(vectors)):
        raise ShardError(
            f"{listing} has {len(items):,} rows, but {vectors} has {len(matrix(vectors)):,} vectors"
        )
    splits = {item.split for item in items}
    if splits == {""}:
        return hold_out(Collection(items), 0.5 if test_classes is None else test_classes, seed)
    if test_classes is not None:
        raise ShardError(f"--test-classes is for vectors without splits, but {listing} has splits")
    if splits not in map(set, SPLITS):
        raise ShardError(
            f"{listing} has the splits {', '.join(map(repr, sorted(splits)))}, but it needs train and "
            "test, or train, query and gallery, or none"
        )
    return Collection(items)


def the_one(root: Path, pattern: str, what: str) -> Path:
    found = sorted(root.glob(pattern))
    if len(found) != 1:
        names = f" ({', '.join(path.name for path in found[:3])})" if found else ""
        raise ShardError(
            f"--root {root} has {len(found)} files {pattern}{names}, but it needs one: {what}"
        )
    return found[0].absolute()


def _item(row: Mapping[str, Any], where: str, number: int, vectors: Path) -> Item:
    texts = {key: row.get(key) for key in ("name", "label", "split", "super_class")}
    wrong = [key for key, text in texts.items() if not isinstance(text, str | None)]
    if wrong:
        raise ShardError(f"{where}: the {wrong[0]} is {row[wrong[0]]!r}, not text")
    if not texts["label"]:
        raise ShardError(f"{where} has no label")
    return VectorItem(
        split=texts["split"] or "",
        class_name=texts["label"],
        name=texts["name"] or f"{vectors.name} row {number}",
        super_class=texts["super_class"] or None,
        path=vectors,
        row=number,
    )


def read_csv(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows, and where each of them is."""
    lines = csv.DictReader(io.StringIO(read_text(path), newline=""), restval="")
    try:
        if "label" not in (lines.fieldnames or ()):
            names = ", ".join(map(repr, lines.fieldnames or ())) or "(none)"
            raise ShardError(f"{path} has no column 'label', only {names}")
        yield from ((f"{path}:{lines.line_num}", row) for row in lines)
    except csv.Error as error:
        raise ShardError(f"{path}:{lines.line_num} is not CSV ({error})") from None


def read_jsonl(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        try:
            row = json.loads(line)
            row = {**row, "name": row.get("image"), "label": row.get("class")}
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise ShardError(
                f"{path}:{number} is not a line of JSON with image and class"
            ) from None
        yield f"{path}:{number}", row


def read_text(path: Path) -> str:
    try:
        return read_bounded(path, LARGEST_TABLE).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ShardError(f"{path} is not UTF-8") from None
    except OSError as error:
        raise ShardError(f"{path} cannot be read: {error.strerror}") from None
