"""Reads a webdataset tar as a stream: where its members are, their checksums, and its samples."""

from __future__ import annotations

import hashlib
import re
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shards.item import LARGEST_IMAGE, ShardError
from shards.remote import Patience, Stream, Unreachable, is_remote, open_range

LARGEST_TEXT = 2**20  # bytes of a label or json file
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"(\xb5/\xfd": "zstd"}
META = re.compile(r"__[^/]*__($|/)")  # what webdataset leaves out


@dataclass(frozen=True)
class Member:
    name: str
    offset: int
    size: int
    crc32: int
    text: bytes | None  # of a file that may be the label


@dataclass(frozen=True)
class Tar:
    """What a tar holds, or why it cannot be used."""

    place: str
    size: int = 0
    sha256: str = ""
    members: tuple[Member, ...] = ()
    problem: str | None = None


class _Hashed:
    """A file on its way to tarfile."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.digest, self.size = stream, hashlib.sha256(), 0
        self.used = 0  # bytes up to the last one that is not zero

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size and (block := self.stream.read(size - len(data))):
            data += block
        if not self.size and (kind := [k for k in COMPRESSED if data.startswith(k)]):
            raise ShardError(
                f"is compressed ({COMPRESSED[kind[0]]}), so single images cannot be read: unpack it"
            )
        self.digest.update(data)
        if content := len(data.rstrip(b"\0")):
            self.used = self.size + content
        self.size += len(data)
        return data


def read_tar(place: str, wanted: str | None) -> Tar:
    """The members of a tar. wanted: the suffix of files whose text is needed, if any."""
    url = place if is_remote(place) else Path(place).as_uri()
    patience = Patience(place)
    while True:
        try:
            with open_range(url) as stream:
                return _members(place, _Hashed(stream), wanted)
        except Unreachable as error:
            try:
                patience.wait(error)
            except ShardError as problem:
                return Tar(place, problem=str(problem).removeprefix(f"{place} "))
        except ShardError as error:
            return Tar(place, problem=str(error).removeprefix(f"{url} "))
        except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
            reason = str(error) or type(error).__name__
            return Tar(place, problem=f"is damaged, or no tar ({reason}): copy it again")


def _members(place: str, file: _Hashed, wanted: str | None) -> Tar:
    found, end = [], 0
    with tarfile.open(fileobj=file, mode="r|") as tar:  # type: ignore[call-overload]
        for member in tar:
            blocks = -(-member.size // tarfile.BLOCKSIZE)
            end = member.offset_data + blocks * tarfile.BLOCKSIZE
            if not member.isreg() or META.match(member.name):
                continue
            if member.size > LARGEST_IMAGE:
                raise ShardError(
                    f"has {member.name} of {member.size:,} bytes, more than the {LARGEST_IMAGE:,} that "
                    "an image may have: leave it out"
                )
            content = tar.extractfile(member)
            assert content is not None
            data = content.read()
            if len(data) != member.size:
                raise tarfile.ReadError("unexpected end of data")
            text = (
                wanted and member.name.lower().endswith(f".{wanted}") and len(data) <= LARGEST_TEXT
            )
            crc32 = zlib.crc32(data)
            found.append(
                Member(member.name, member.offset_data, len(data), crc32, data if text else None)
            )
            tar.members = []  # tarfile would keep them all
    while file.read(2**20):  # what follows the end of a tar belongs to its checksum
        pass
    if file.used > end:  # tarfile ends silently at a header that it cannot read
        raise tarfile.ReadError(f"no header at offset {end:,}")
    return Tar(place, file.size, file.digest.hexdigest(), tuple(found))


def samples_of(tar: Tar) -> Iterator[Mapping[str, Any]]:
    """The samples of a tar as webdataset groups them: suffix -> Member, and __key__."""
    from webdataset.tariterators import group_by_keys

    files = ({"fname": m.name, "data": m, "__url__": tar.place} for m in tar.members)
    try:
        yield from group_by_keys(files)
    except ValueError as error:
        name = str(error.args[0]).partition(": ")[0]
        raise ShardError(f"{tar.place} has {name} twice: leave one out") from None
