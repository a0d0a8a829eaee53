"""What a source gives to the builder: images with a split and a class, read one at a time."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shards.files import check_size

# Bytes of a file. An image that passes Pillow's limit of pixels is smaller even without compression.
LARGEST_IMAGE = 2**30
# control characters, line separators, and what stands for bytes that are not UTF-8
UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class ShardError(ValueError):
    """Something is wrong with a dataset or its shards. The text is one sentence that says what, where,
    and what to do; programs print it and exit with 2."""


def is_safe(name: str) -> bool:
    """Whether a name can be written as UTF-8 and shown on one line, in a table, a log or a terminal."""
    return UNSAFE.search(name) is None


def escaped(name: str) -> str:
    """A name with its unsafe characters as \\n, \\x1b, \\udce9 and the like."""
    return UNSAFE.sub(lambda found: ascii(found[0])[1:-1], name)


@dataclass(frozen=True, kw_only=True)
class Item(ABC):
    """One image. Items are pickled to worker processes, so they hold paths, not open files."""

    split: str  # train or test; in In-Shop train, query or gallery
    class_name: str  # the same name is the same class in every split
    name: str  # where it comes from, for messages and its json
    extra: Mapping[str, str] = field(default_factory=dict)  # more fields for its json
    super_class: str | None = None  # of its class; all items have one, or none has

    @abstractmethod
    def encoded(self) -> bytes:
        """The bytes of an image file, or of a .npy file with a vector; ShardError or OSError if there
        are none."""


@dataclass(frozen=True, kw_only=True)
class FileItem(Item):
    path: Path

    def encoded(self) -> bytes:
        check_size(self.path, LARGEST_IMAGE)
        return self.path.read_bytes()


@dataclass(frozen=True)
class Collection:
    """All items of a dataset, in a fixed order, and how many there should be."""

    items: Sequence[Item]
    # split -> (classes, images) of the published dataset; empty if none were published
    expected: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    notes: Sequence[str] = ()  # what the source did, for the summary and the manifest
