"""A list of images as a table: columns `path` and `label`, and perhaps `split` and `super_class`. Other
columns are ignored."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shards.files import read_bounded
from shards.item import Collection, FileItem, Item, ShardError

SPLITS = (("train", "test"), ("train", "query", "gallery"))
COLUMNS = ("path", "label")
LARGEST = 2**30  # bytes of a table


def is_table(path: Path) -> bool:
    return path.suffix.lower() in (".csv", ".parquet") and path.is_file()


def collect_table(path: Path) -> Collection:
    read = read_csv if path.suffix.lower() == ".csv" else read_parquet
    folder = Path(os.path.abspath(path.parent))
    items: list[Item] = [_item(row, where, folder) for where, row in read(path)]
    if not items:
        raise ShardError(f"{path} has no rows")
    splits = {item.split for item in items}
    if splits != {""} and splits not in map(set, SPLITS):
        raise ShardError(
            f"{path} has the splits {', '.join(map(repr, sorted(splits)))}, but it needs train and "
            "test, or train, query and gallery, or no column split"
        )
    return Collection(items)


def _item(row: Mapping[str, object], where: str, folder: Path) -> Item:
    path, label = str(row["path"] or ""), row["label"]
    if not path or label is None or label == "":
        raise ShardError(f"{where} has no {'label' if path else 'path'}")
    place = Path(os.path.normpath(folder / path))
    if not place.is_relative_to(folder):
        raise ShardError(f"{where}: {path!r} is not below {folder}: move the table, or the images")
    split, name = str(row.get("split") or ""), place.relative_to(folder).as_posix()
    group = row.get("super_class")
    return FileItem(
        split=split,
        class_name=str(label),
        name=name,
        path=place,
        super_class=None if group is None or group == "" else str(group),
    )


def read_csv(
    path: Path, needed: Sequence[str] = COLUMNS
) -> Iterator[tuple[str, Mapping[str, object]]]:
    """The rows, and where each of them is. needed: columns that there must be."""
    try:
        text = read_bounded(path, LARGEST).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ShardError(f"{path} is not UTF-8") from None
    except OSError as error:
        raise ShardError(f"{path} cannot be read: {error.strerror}") from None
    lines = csv.DictReader(io.StringIO(text, newline=""), restval="")
    try:
        _need_columns(path, lines.fieldnames or (), needed)
        yield from ((f"{path}:{lines.line_num}", row) for row in lines)
    except csv.Error as error:
        raise ShardError(f"{path}:{lines.line_num} is not CSV ({error})") from None


def read_parquet(path: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ShardError(f"{path}: to read parquet, pip install 'dml[parquet]'") from None
    try:
        table = parquet.ParquetFile(path)
        _need_columns(path, table.schema_arrow.names)
        known = ("path", "label", "split", "super_class")
        wanted = [name for name in known if name in table.schema_arrow.names]
        number = 0
        for batch in table.iter_batches(columns=wanted):
            for row in batch.to_pylist():
                yield f"{path}: row {number}", row
                number += 1
    except (ArrowException, OSError) as error:
        raise ShardError(f"{path} cannot be read ({error})") from None


def _need_columns(path: Path, names: Sequence[str], needed: Sequence[str] = COLUMNS) -> None:
    missing = [name for name in needed if name not in names]
    if missing:
        raise ShardError(
            f"{path} has no column {missing[0]!r}, only {', '.join(map(repr, names)) or '(none)'}"
        )
