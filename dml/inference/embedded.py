"""A folder of embeddings: whole or not there.

DIR/
    embeddings.npy      n x d float32, unit length; features have any length
    index.jsonl         a line per embedding: {"image": "mug/1.jpg", "class": "mug"}; features of shards
                        also have "split" and "super_class"
    info.json           which model, which images, how many
    embeddings.parquet  the first two in one table, if asked for
    index.faiss         a faster search, if dml index made it, and index.faiss.json about it
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dml.data.sources import Entry, Files, Rows, Source
from dml.errors import EmbeddedError
from dml.inference.whole_folder import replace_folder
from shards.files import check_size, read_bounded, regular
from shards.index import ImageReader, load_index, load_npy
from shards.item import ShardError

FORMAT, VERSION = "dml-embeddings", 1
VECTORS, INDEX, INFO = "embeddings.npy", "index.jsonl", "info.json"
PARQUET = "embeddings.parquet"
FAISS, FAISS_INFO = "index.faiss", "index.faiss.json"  # dml index adds them
WRITTEN = {VECTORS, INDEX, INFO, PARQUET, FAISS, FAISS_INFO}
LARGEST_INFO = 2**20  # bytes


@dataclass(frozen=True)
class Info:
    run: str  # folder
    model_sha256: str
    source: str  # folder of images or of shards
    split: str | None  # of shards
    shards_sha256: str | None  # of the index of shards
    count: int
    dimensions: int
    unreadable: int  # images left out
    features: bool = False  # of the backbone, before the head
    tower: str | None = None  # of a run with two encoders; None: x, or there is one


@dataclass(frozen=True, eq=False)
class Embedded:
    X: NDArray[np.float32]
    entries: Sequence[Entry]
    info: Info


def as_lines(entries: Sequence[Entry], features: bool) -> bytes:
    return "".join(json.dumps(as_line(entry, features)) + "\n" for entry in entries).encode()


def as_line(entry: Entry, features: bool) -> dict[str, str | None]:
    line = {"image": entry.image, "class": entry.class_name}
    known = {"split": entry.split, "super_class": entry.super_class} if features else {}
    return line | {key: value for key, value in known.items() if value is not None}


def as_npy(X: NDArray[np.float32]) -> bytes:
    file = io.BytesIO()
    np.save(file, np.ascontiguousarray(X))
    return file.getvalue()


def as_parquet(embedded: Embedded) -> bytes:
    """Columns image, class and embedding, a list of d float32 per row."""
    import pyarrow
    from pyarrow import parquet

    flat = pyarrow.array(np.ascontiguousarray(embedded.X).ravel())
    table = pyarrow.table(
        {
            "image": pyarrow.array([e.image for e in embedded.entries], pyarrow.string()),
            "class": pyarrow.array([e.class_name for e in embedded.entries], pyarrow.string()),
            "embedding": pyarrow.FixedSizeListArray.from_arrays(flat, embedded.X.shape[1]),
        }
    )
    file = io.BytesIO()
    parquet.write_table(table, file)
    return file.getvalue()


def is_only_ours(folder: Path) -> bool:
    """Whether `write` made everything in a folder, so that it may be replaced."""
    return is_ours(folder) and {path.name for path in folder.iterdir()} <= WRITTEN


def is_ours(folder: Path) -> bool:
    try:
        return bool(json.loads(read_bounded(folder / INFO, LARGEST_INFO))["format"] == FORMAT)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return False


def write(folder: Path, embedded: Embedded, parquet: bool = False) -> None:
    """Write the folder whole, or leave what is there."""
    head = {"format": FORMAT, "version": VERSION, **asdict(embedded.info)}
    for key in ("features", "tower"):
        if not head[key]:
            del head[key]

    def files() -> Iterator[tuple[str, bytes]]:
        yield VECTORS, as_npy(embedded.X)
        yield INDEX, as_lines(embedded.entries, embedded.info.features)
        if parquet:
            yield PARQUET, as_parquet(embedded)
        yield INFO, json.dumps(head, indent=1).encode() + b"\n"

    replace_folder(folder, files())


def read(folder: Path) -> Embedded:
    again = "embed the images again"
    if not folder.is_dir():
        raise EmbeddedError(f"there is no folder {folder}: make it with dml embed")
    if not is_ours(folder):
        raise EmbeddedError(f"{folder} is not a folder of embeddings: make one with dml embed")
    try:
        head = json.loads(read_bounded(folder / INFO, LARGEST_INFO))
        if head["version"] != VERSION:
            raise EmbeddedError(
                f"{folder} is of version {head['version']}, this program reads {VERSION}: {again}"
            )
        info = as_info(head)
        X = read_vectors(folder / VECTORS)
        entries = [as_entry(line) for line in read_bounded(folder / INDEX).splitlines()]
    except OSError as error:
        raise EmbeddedError(f"{error.filename}: {error.strerror}; {again}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, EmbeddedError):
            raise
        raise EmbeddedError(f"{folder} is damaged ({error}): {again}") from None
    shape = (info.count, info.dimensions)
    if X.dtype != np.float32 or X.shape != shape or len(entries) != info.count:
        raise EmbeddedError(
            f"{folder} is damaged ({X.shape} embeddings and {len(entries)} lines where info.json "
            f"says {shape}): {again}"
        )
    return Embedded(X, entries, info)


def as_info(head: Mapping[str, Any]) -> Info:
    head = {"features": False, "tower": None, **head}  # earlier versions had embeddings only
    info = Info(**{field.name: head[field.name] for field in fields(Info)})
    if not all(isinstance(text, str) for text in (info.run, info.model_sha256, info.source)):
        raise TypeError(f"{INFO} has numbers where there should be text")
    return info


def as_entry(line: bytes) -> Entry:
    found = json.loads(line)
    entry = Entry(found["image"], found["class"])
    if not isinstance(entry.image, str) or not isinstance(entry.class_name, str | None):
        raise TypeError(f"{INDEX} names an image or a class that is not text")
    return entry


def read_vectors(path: Path) -> NDArray[Any]:
    check_size(path)
    with open(path, "rb", opener=regular) as file:
        return load_npy(file)


def source_of(info: Info) -> Source:
    """Where the images of embeddings can be read; EmbeddedError if they have moved."""
    root = Path(info.source)
    advice = "put them back, or embed the images again where they are now"
    try:
        if not root.is_dir():
            raise ShardError(f"{root} is not there")
        if info.shards_sha256 is None:
            return Files(root)
        index = load_index(root)
        if index.manifest["index"]["sha256"] != info.shards_sha256:
            raise ShardError(f"{root} has other shards now")
    except ShardError as error:
        raise EmbeddedError(f"the embedded images have moved ({error}): {advice}") from None
    return Rows(root, ImageReader(index))
