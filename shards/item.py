"""What a source gives to the builder: images with a split and a class, read one at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


class ShardError(ValueError):
    """Something is wrong with a dataset or its shards. The text is one sentence that says what, where,
    and what to do; programs print it and exit with 2."""


@dataclass(frozen=True, kw_only=True)
class Item(ABC):
    """One image. Items are pickled to worker processes, so they hold paths, not open files."""

    split: str  # train or test; in In-Shop train, query or gallery
    class_name: str  # the same name is the same class in every split
    name: str  # where it comes from, for messages and its json
    extra: Mapping[str, str] = field(default_factory=dict)  # more fields for its json

    @abstractmethod
    def encoded(self) -> bytes:
        """The bytes of a JPEG or PNG file; ShardError or OSError if there are none."""


@dataclass(frozen=True, kw_only=True)
class FileItem(Item):
    path: Path

    def encoded(self) -> bytes:
        return self.path.read_bytes()


@dataclass(frozen=True)
class Collection:
    """All items of a dataset, in a fixed order, and how many there should be."""

    items: Sequence[Item]
    # split -> (classes, images) of the published dataset; empty if none were published
    expected: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    notes: Sequence[str] = ()  # what the source did, for the summary and the manifest
