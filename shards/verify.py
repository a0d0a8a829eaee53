"""Check every byte of a folder of shards:

python shards/verify.py data/cub200

Compares all checksums with the manifest and the index, and all members of the tars with the index; with
--deep it also decodes every image. Nothing is unpacked to disk. Prints one line per problem; the exit code
is 1 if there are any.
"""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path, PurePosixPath

if not __package__:  # run as a file: Python put shards/ on the path, but imports start above it
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from tqdm import tqdm

from shards.cache import Cache
from shards.checksums import differing
from shards.images import check
from shards.index import (
    INDEXED,
    VERSION,
    ImageReader,
    Index,
    load_index,
    read_manifest,
)
from shards.item import ShardError
from shards.output import STOPPED, Progress, exit_code, program_name
from shards.workers import default_workers, in_order

LARGEST_TEXT = 2**20  # bytes of a label or json file in a tar


def _is_hostile(member: tarfile.TarInfo) -> bool:
    path = PurePosixPath(member.name)
    return path.is_absolute() or ".." in path.parts or member.type != tarfile.REGTYPE


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)  # a view into the tar; nothing is written
    assert file is not None
    return file.read(LARGEST_TEXT)


def _member_problems(tar: tarfile.TarFile, index: Index, shard: int) -> Iterator[str]:
    members = tar.getmembers()
    if hostile := [member for member in members if _is_hostile(member)]:
        yield from (f"refused member {member.name!r}" for member in hostile)
        return
    numbers = np.flatnonzero(index.rows["shard"] == shard)
    if len(members) != 3 * len(numbers):
        yield f"has {len(members)} members, but the index needs {3 * len(numbers)}"
        return
    for number, (image, cls, about) in zip(
        numbers, zip(*[iter(members)] * 3, strict=True), strict=True
    ):
        key, row = f"{number:08d}", index.rows[number]
        if image.name not in (f"{key}.jpg", f"{key}.png", f"{key}.npy"):
            yield f"{image.name!r} should be {key}.jpg or {key}.png (or {key}.npy)"
        elif (image.offset_data, image.size) != (row["offset"], row["size"]):
            yield f"{image.name} has another offset or size than in the index"
        if cls.name != f"{key}.cls" or _content(tar, cls) != b"%d" % row["label"]:
            yield f"{cls.name!r} is not the label of {key}"
        expected = (index.class_names[row["label"]], index.splits[row["split"]])
        try:
            found = json.loads(_content(tar, about))
            if about.name != f"{key}.json" or (found["class"], found["split"]) != expected:
                yield f"{about.name!r} disagrees with the index on the class or split of {key}"
        except (ValueError, TypeError, KeyError, RecursionError):
            yield f"{about.name!r} is not the json of {key}"


def _foreign_problems(tar: tarfile.TarFile, index: Index, shard: int) -> Iterator[str]:
    """Problems of a tar that shards/index_tars.py has indexed: any names, but the same places."""
    members = {(member.offset_data, member.size): member for member in tar}
    for number in np.flatnonzero(index.rows["shard"] == shard):
        row = index.rows[number]
        member = members.get((int(row["offset"]), int(row["size"])))
        if member is None or not member.isreg():
            yield f"has no member where the index has image {number:08d}"


def _shard_problems(index: Index, shard: int) -> Iterator[str]:
    name = index.shards[shard].name
    foreign = index.manifest["version"] == INDEXED
    problems = _foreign_problems if foreign else _member_problems
    try:
        with tarfile.open(index.local(shard), "r:") as tar:
            yield from (f"{name}: {problem}" for problem in problems(tar, index, shard))
    except ShardError as error:  # of the server
        yield str(error)
    except (tarfile.TarError, OSError, ValueError, EOFError, MemoryError, RecursionError) as error:
        yield f"{name}: cannot be read as a tar ({str(error) or type(error).__name__})"


def _read(reader: ImageReader, number: int) -> tuple[str, bytes | ShardError]:
    """The name of an image, and its bytes or why they cannot be used."""
    index = reader.index
    name = f"{index.shards[index.rows['shard'][number]].name}: {number:08d}"
    try:
        return name, reader.read(number)
    except ShardError as error:
        return name, error


def _checksum_problem(image: tuple[str, bytes | ShardError]) -> str | None:
    return str(image[1]) if isinstance(image[1], ShardError) else None


def _image_problem(
    image: tuple[str, bytes | ShardError], converted_too: bool = False
) -> str | None:
    """converted_too: formats that shards/build.py converts are no problem."""
    name, data = image
    if isinstance(data, ShardError):
        return str(data)
    try:
        converted = check(data).converted
    except ShardError as error:
        return f"{name} {error}"
    return f"{name} is neither JPEG nor PNG" if converted and not converted_too else None


def verify(
    directory: str | Path, workers: int = 1, deep: bool = False, cache: Cache | None = None
) -> Iterator[str]:
    """Yield every problem as one line. deep: decode every image. cache: for shards on a server."""
    try:
        index = load_index(directory, cache)
    except ShardError as error:
        yield str(error)
        return
    foreign = index.manifest["version"] == INDEXED
    for stray in sorted(set(index.root.glob("*.tar")) - set(index.shards)):
        yield f"{stray.name}: is not in the manifest"
    for shard, problem in differing(index, range(len(index.shards))):
        yield f"{index.shards[shard].name}: {problem}"
    for shard in range(len(index.shards)):
        yield from _shard_problems(index, shard)
    reader = ImageReader(index)
    # a shard that did not come has been reported
    there = np.array([index.is_here(shard) for shard in range(len(index.shards))])
    numbers = np.flatnonzero(there[index.rows["shard"]]).tolist()
    images = (_read(reader, number) for number in numbers)
    look = partial(_image_problem, converted_too=foreign) if deep else _checksum_problem
    with (
        closing(in_order(look, images, workers if deep else 1)) as found,
        closing(Progress(len(numbers), "image")) as progress,
    ):
        for wrong in found:
            if wrong:
                yield wrong
            progress.update()
    reader.close()


def main(argv: Sequence[str] | None = None) -> int:
    about, example, promise = (__doc__ or "").strip().split("\n\n")
    parser = argparse.ArgumentParser(
        prog=program_name("shards/verify.py"),
        description=f"{about}\n\n  {example}\n\n{promise}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", help="a folder made by shards/build.py, or its address")
    parser.add_argument("--deep", action="store_true", help="also decode every image")
    parser.add_argument("--cache", type=Path, help="a folder to keep shards of a server in")
    workers = "processes (default: %(default)s on this machine)"
    parser.add_argument("--workers", type=int, default=default_workers(), help=workers)
    args = parser.parse_args(argv)
    problems, cache = 0, Cache(args.cache.absolute()) if args.cache else None
    try:
        for problem in verify(args.directory, max(1, args.workers), args.deep, cache):
            tqdm.write(problem)  # print would break the progress bar
            problems += 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return STOPPED
    except ShardError as error:  # of the worker processes
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.directory}: {f'{problems} problems' if problems else 'no problems'}")
    if not problems and (version := read_manifest(args.directory, cache)["version"]) < VERSION:
        print(
            f"note: shards of version {version} have no checksum per image, so training cannot notice "
            "a changed bit; shards that are built again have one"
        )
    return 1 if problems else 0


if __name__ == "__main__":
    # if the reader leaves, the problems may not all have been seen: not a success
    sys.exit(exit_code(main, reader_left=1))
