"""Index webdataset tars where they are, so that training reads them as its own shards:

python shards/index_tars.py 'https://host/laion-{000000..000099}.tar' --label cls --out data/laion

Every tar is read once, for checksums and offsets, and stays where it is. Keys are grouped as webdataset
groups them. A key has one image (jpg, jpeg, png, webp) or vector (npy), and a label.
"""

from __future__ import annotations

import argparse
import glob
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

if not __package__:  # run as a file: Python put shards/ on the path, but imports start above it
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from shards.index import INDEXED, MOST_IMAGES, ROW
from shards.item import ShardError, is_safe
from shards.output import STOPPED, Progress, exit_code, program_name
from shards.pack import atomic_folder, write_index
from shards.remote import is_remote
from shards.sources.tables import read_csv
from shards.tars import Tar, read_tar, samples_of
from shards.workers import default_workers, in_order

IMAGES = ("jpg", "jpeg", "png", "webp", "npy")


def expand(patterns: Sequence[str]) -> list[str]:
    """Addresses and paths, with {000..099} expanded as in webdataset, and local globs."""
    from webdataset.shardlists import expand_urls  # here: it imports torch, which takes time

    found: list[str] = []
    for pattern in patterns:
        for each in expand_urls(pattern) if "{" in pattern else [pattern]:
            if is_remote(each):
                found.append(each)
            elif matches := sorted(glob.glob(each)):
                found += [str(Path(match).resolve()) for match in matches]
            else:
                raise ShardError(f"{each}: there is no such file")
    if twice := [place for place, count in Counter(found).items() if count > 1]:
        raise ShardError(f"{twice[0]} is named twice: name each tar once")
    return found


Label = Callable[[str, Mapping[str, Any]], str]  # key, sample -> class name


def make_label(text: str) -> tuple[Label, str | None]:
    """What --label says, and the suffix of the files it reads, if any."""
    kind, _, rest = text.partition(":")
    if text == "cls":
        return partial(_from_text, suffix="cls"), "cls"
    if kind == "json" and rest:
        return partial(_from_json, path=rest), "json"
    if text == "key-prefix":
        return _from_key, None
    if kind == "csv" and rest:
        return partial(_from_table, table=_table(Path(rest)), path=rest), None
    raise ShardError(f"--label {text} is none of cls, json:FIELD, key-prefix, csv:FILE")


def _from_text(key: str, sample: Mapping[str, Any], suffix: str) -> str:
    if suffix not in sample or sample[suffix].text is None:
        raise ShardError(f"has no {key}.{suffix}: choose another --label")
    return str(sample[suffix].text.decode("utf-8", "surrogateescape").strip())


def _from_json(key: str, sample: Mapping[str, Any], path: str) -> str:
    try:
        value = json.loads(_from_text(key, sample, "json"))
        for name in path.split("."):
            value = value[name]
    except (KeyError, TypeError):
        raise ShardError(f"has no {path!r} in {key}.json: choose another --label") from None
    except (json.JSONDecodeError, RecursionError):
        raise ShardError(f"{key}.json is no JSON") from None
    if not isinstance(value, str | int):
        raise ShardError(f"{path!r} in {key}.json is neither text nor a whole number")
    return str(value)


def _from_key(key: str, sample: Mapping[str, Any]) -> str:
    prefix, found, _ = key.rpartition("/" if "/" in key else "_")
    if not found or not prefix:
        raise ShardError(f"has the key {key!r}, which has no / and no _: choose another --label")
    return prefix


def _table(path: Path) -> dict[str, str]:
    rows = {str(row["key"]): str(row["label"]) for _, row in read_csv(path, ("key", "label"))}
    if not rows:
        raise ShardError(f"{path} has no rows")
    return rows


def _from_table(key: str, sample: Mapping[str, Any], table: dict[str, str], path: str) -> str:
    if key not in table:
        raise ShardError(f"has the key {key!r}, which {path} does not have")
    return table[key]


def parse_splits(text: str | None) -> list[tuple[str, str]]:
    """train=train-*,test=test-* as pairs."""
    if text is None:
        return [("train", "*")]
    pairs = [
        (name, pattern) for name, _, pattern in (each.partition("=") for each in text.split(","))
    ]
    if bad := [name for name, pattern in pairs if not re.fullmatch("[a-z]+", name) or not pattern]:
        raise ShardError(
            f"--split {text}: {bad[0]!r} is not NAME=PATTERN with a name of lower-case letters"
        )
    return pairs


def split_of(name: str, pairs: Sequence[tuple[str, str]]) -> str:
    found = list(dict.fromkeys(split for split, pattern in pairs if fnmatch(name, pattern)))
    if len(found) != 1:
        what = f"belongs to the splits {' and '.join(found)}" if found else "belongs to no split"
        raise ShardError(f"{name} {what}: change --split")
    return found[0]


@dataclass
class Rows:
    """The index as it grows."""

    splits: Sequence[str]
    label: Label
    rows: list[tuple[int, ...]] = field(default_factory=list)
    shards: list[dict[str, Any]] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)  # checksum -> tar
    labels: dict[str, int] = field(default_factory=dict)
    classes: dict[str, set[int]] = field(default_factory=dict)
    images: Counter[str] = field(default_factory=Counter)
    without: int = 0  # keys that have no image

    def add(self, tar: Tar, name: str, split: str) -> None:
        if tar.problem:
            raise ShardError(f"{tar.place} {tar.problem}")
        first = self.places.setdefault(tar.sha256, tar.place)
        if first != tar.place:
            raise ShardError(f"{tar.place} has the same bytes as {first}: name it once")
        for sample in samples_of(tar):
            self._add_sample(tar, split, sample)
        about = {"name": name, "url": tar.place, "bytes": tar.size, "sha256": tar.sha256}
        self.shards.append(about)

    def _add_sample(self, tar: Tar, split: str, sample: Mapping[str, Any]) -> None:
        key = sample["__key__"]
        found = [suffix for suffix in sample if suffix.rpartition(".")[2] in IMAGES]
        plain = [suffix for suffix in found if suffix in IMAGES]
        if not found:
            self.without += 1
            return
        if len(plain or found) > 1:
            names = " and ".join(f"{key}.{suffix}" for suffix in plain or found)
            raise ShardError(f"{tar.place} has {names}: a key may have one image")
        if len(self.rows) == MOST_IMAGES:
            raise ShardError(
                f"there are more than {MOST_IMAGES:,} images: index fewer tars at a time"
            )
        try:
            name = self.label(key, sample)
        except ShardError as error:
            raise ShardError(f"{tar.place} {error}") from None
        if not name or not is_safe(name):
            raise ShardError(
                f"{tar.place}: the label {name!r} of {key} is empty, not UTF-8 or has control characters"
            )
        image = sample[(plain or found)[0]]
        if not image.size:
            raise ShardError(f"{tar.place}: {image.name} is empty: leave it out")
        label = self.labels.setdefault(name, len(self.labels))
        row = (self.splits.index(split), label, len(self.shards), image.offset, image.size)
        self.rows.append((*row, image.crc32))
        self.images[split] += 1
        self.classes.setdefault(split, set()).add(label)


def index_tars(
    patterns: Sequence[str], label: str, split: str | None, out: Path, workers: int = 1
) -> dict[str, Any]:
    """Write index and manifest of the tars into `out`; return the manifest."""
    read_label, wanted = make_label(label)
    places, pairs = expand(patterns), parse_splits(split)
    names = [unquote(urlsplit(place).path if is_remote(place) else place) for place in places]
    names = [name.rpartition("/")[2] for name in names]
    splits = [split_of(name, pairs) for name in names]
    order = sorted(set(splits), key=[name for name, _ in pairs].index)
    found = Rows(order, read_label)
    with (
        atomic_folder(out) as folder,
        closing(in_order(partial(read_tar, wanted=wanted), places, workers, chunk=1)) as tars,
        closing(Progress(len(places), "tar")) as progress,
    ):
        for tar, name, each in zip(tars, names, splits, strict=True):
            found.add(tar, name, each)
            progress.update()
        if not found.rows:
            raise ShardError(f"{places[0]} has no images ({', '.join(IMAGES)})")
        notes = [f"{found.without:,} keys have no image"] if found.without else []
        return write_index(
            folder,
            np.array(found.rows, ROW),
            {
                "version": INDEXED,
                "source": "folder",
                "splits": {
                    name: {
                        "classes": len(found.classes.get(name, ())),
                        "images": found.images[name],
                    }
                    for name in order
                },
                "shards": found.shards,
                "notes": notes,
                "skipped": [],
                "classes": list(found.labels),
            },
        )


def main(argv: Sequence[str] | None = None) -> int:
    about, example, promise = (__doc__ or "").strip().split("\n\n")
    parser = argparse.ArgumentParser(
        prog=program_name("shards/index_tars.py"),
        description=f"{about}\n\n  {example}\n\n{promise}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "tars",
        nargs="+",
        help="https://, s3://, file:// or a path; {000..099} and local globs are expanded",
    )
    add(
        "--label",
        required=True,
        help="where the class is: cls (KEY.cls), json:FIELD (of KEY.json; A.B for a field in a field), "
        "key-prefix (of the key, up to its last / or else _), csv:FILE (columns key and label)",
    )
    add(
        "--split",
        help="'train=train-*,test=test-*': splits by the names of the tars (default: all is train)",
    )
    add("--out", type=Path, required=True, help="the folder to create")
    workers = "processes (default: %(default)s on this machine)"
    add("--workers", type=int, default=default_workers(), help=workers)
    args, start = parser.parse_args(argv), time.perf_counter()
    try:
        manifest = index_tars(args.tars, args.label, args.split, args.out, max(1, args.workers))
    except KeyboardInterrupt:
        print(f"interrupted: {args.out} was not made, nothing is left behind", file=sys.stderr)
        return STOPPED
    except (ShardError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    counts = manifest["splits"].items()
    print(
        f"{args.out}: {sum(each['images'] for _, each in counts):,} images of "
        f"{len(manifest['classes']):,} classes in {len(manifest['shards']):,} tars, "
        f"{time.perf_counter() - start:.1f} s"
    )
    for name, each in counts:
        print(f"  {name:8}{each['classes']:>8,} classes{each['images']:>10,} images")
    for note in manifest["notes"]:
        print(f"  note: {note}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
