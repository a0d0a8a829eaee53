"""Images or vectors to embed, from a folder of files, from shards or a .npy file; all read one by its
name."""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from shards.files import check_size, read_bounded
from shards.index import SUPER_CLASS, ImageReader, Index, load_index, load_npy
from shards.item import LARGEST_IMAGE, ShardError
from shards.photo import SUFFIXES
from shards.vector import DTYPES, encoded


@dataclass(frozen=True)
class Entry:
    """image: a path below the folder, or a row of the shards as the tars name it, 00000042."""

    image: str
    class_name: str | None
    split: str | None = None  # of shards
    super_class: str | None = None


@dataclass(frozen=True)
class Source(ABC):
    """Sources are pickled to loader workers."""

    root: Path  # absolute

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The encoded image; OSError or ShardError if there is none."""


@dataclass(frozen=True)
class Files(Source):
    def read(self, name: str) -> bytes:
        check_size(self.root / name, LARGEST_IMAGE)
        return (self.root / name).read_bytes()


@dataclass(frozen=True)
class Rows(Source):
    reader: ImageReader

    def read(self, name: str) -> bytes:
        return self.reader.read(int(name))


@dataclass(frozen=True)
class Matrix(Source):
    vectors: Mapping[str, NDArray[Any]]
    size: int

    def read(self, name: str) -> bytes:
        return encoded(self.vectors[name])


def in_shards(index: Index, split: str) -> tuple[Rows, list[Entry]]:
    """The images of a split, or of `all`, in the order of the tars."""
    rows = range(len(index.rows)) if split == "all" else index.positions(split).tolist()
    names, labels = index.class_names, index.rows["label"].tolist()
    splits, groups = index.rows["split"].tolist(), super_classes(index)
    entries = [
        Entry(f"{row:08d}", names[labels[row]], index.splits[splits[row]], groups[row])
        for row in rows
    ]
    return Rows(index.root, ImageReader(index)), entries


def super_classes(index: Index) -> Sequence[str | None]:
    """The name of the super-class of every row; None where there are none."""
    if SUPER_CLASS[0] not in (index.rows.dtype.names or ()):
        return [None] * len(index.rows)
    names = index.manifest["super_classes"]
    return [names[number] for number in index.rows[SUPER_CLASS[0]].tolist()]


def in_npy(path: Path) -> tuple[Matrix, list[Entry]]:
    """The vectors of a .npy file: one vector, or a matrix with a vector per row."""
    try:
        X = load_npy(io.BytesIO(read_bounded(path)))
    except OSError as error:
        raise ShardError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ShardError(
            f"{path} is {error}: give a vector, or a matrix with a vector per row"
        ) from None
    if X.ndim not in (1, 2) or X.dtype.str not in DTYPES:
        raise ShardError(
            f"{path} holds {X.dtype} of the shape {X.shape}: give a vector of float16 or float32, or a "
            "matrix with a vector per row"
        )
    names = [path.name] if X.ndim == 1 else [f"{path.name}[{row}]" for row in range(len(X))]
    vectors = X.reshape(-1, X.shape[-1])
    return Matrix(path.absolute().parent, dict(zip(names, vectors, strict=True)), X.shape[-1]), [
        Entry(name, None) for name in names
    ]


def in_folder(root: Path) -> tuple[Files, list[Entry]]:
    """The images below a folder, sorted by path. The class of an image is the sub-folder it is in."""
    root = root.absolute()
    paths = sorted(path.relative_to(root).as_posix() for path in below(root))
    if not paths:
        raise ShardError(f"{root} has no images ({', '.join(SUFFIXES)}) in it: check the path")
    return Files(root), [Entry(path, Path(path).parent.name or None) for path in paths]


def below(root: Path) -> Iterator[Path]:
    """Every image below a folder, except hidden ones. Links to folders are followed, each folder once,
    since a link may lead back up."""
    seen = {root.resolve()}
    for place, folders, files in os.walk(root, onerror=refuse, followlinks=True):
        inner = {name: Path(place, name).resolve() for name in sorted(folders)}
        folders[:] = [n for n in inner if not n.startswith(".") and inner[n] not in seen]
        seen.update(inner[name] for name in folders)
        for name in files:
            if not name.startswith(".") and name.lower().endswith(SUFFIXES):
                yield Path(place, name)


def refuse(error: OSError) -> None:
    raise ShardError(f"{error.filename} cannot be read: {error.strerror}") from None


def find_images(path: Path, split: str | None) -> tuple[Source, list[Entry]]:
    """The images of a folder or of shards; shards have a manifest. split: of shards; None means all."""
    if not path.is_dir():
        what = "is a file" if path.exists() else "is not there"
        raise ShardError(f"{path} {what}: give a folder of images, or of shards")
    if (path / "manifest.json").exists():
        return in_shards(load_index(path), split or "all")
    if split is not None:
        raise ShardError(f"--split {split}: {path} is no folder of shards (no manifest.json in it)")
    return in_folder(path)
