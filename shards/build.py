"""Pack a dataset into shards:

python shards/build.py cub200 --root ~/CUB_200_2011 --out data/cub200

Every image is decoded as a check. The folder --out appears only when it is complete.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

if not __package__:  # run as a file: Python put shards/ on the path, but imports start above it
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


from shards.images import Picture, load
from shards.item import Collection, Item, ShardError, is_safe
from shards.output import STOPPED, Progress, exit_code, program_name
from shards.pack import Packer, atomic_folder
from shards.vector import form_of
from shards.workers import default_workers, in_order

SOURCES = ("sop", "cub200", "cars196", "inshop", "icons", "icons_mini", "folder", "features")
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def _count_problems(items: Sequence[Item], expected: dict[str, tuple[int, int]]) -> list[str]:
    images, classes = Counter[str](), Counter[str]()
    images.update(item.split for item in items)
    classes.update(split for split, _ in {(item.split, item.class_name) for item in items})
    return [
        f"{split} has {classes[split]:,} classes and {images[split]:,} images, "
        f"but {expected[split][0]:,} and {expected[split][1]:,} were published"
        for split in expected
        if (classes[split], images[split]) != expected[split]
    ]


def _refuse_unsafe(items: Sequence[Item]) -> None:
    """Refuse names that no reader of the shards could show; the last one would be TensorBoard, after
    the training."""
    for item in items:
        for what, name in (("class name", item.class_name), ("file name", item.name)):
            if not is_safe(name):
                raise ShardError(
                    f"the {what} {name!r} in {item.split} is not UTF-8 or holds control characters: "
                    "rename it"
                )


def _refuse_singles(train: Counter[str]) -> None:
    """Refuse a train class with a single image, whose only positives would be its own crops."""
    single = [name for name, images in train.items() if images == 1]
    if single:
        more = f" (and {len(single) - 1:,} more)" if len(single) > 1 else ""
        raise ShardError(
            f"the train class {single[0]!r}{more} has a single image, so it has no positive pair: "
            "add images or remove the class, or pass --allow-singles"
        )


def _refuse_super_classes(items: Sequence[Item]) -> None:
    """Refuse a class with several super-classes, and super-classes of some images only."""
    known: dict[str, str | None] = {}
    for item in items:
        other = known.setdefault(item.class_name, item.super_class)
        if other != item.super_class:
            raise ShardError(
                f"the class {item.class_name!r} has the super-classes {other!r} and "
                f"{item.super_class!r}: a class belongs to one"
            )
    without = [name for name, found in known.items() if found is None]
    if without and len(without) < len(known):
        raise ShardError(f"the class {without[0]!r} has no super-class, but others have: add it")


def build(
    collection: Collection,
    source: str,
    out: Path,
    *,
    max_bytes: int = 256 * 2**20,
    resize: int | None = None,
    workers: int = 1,
    bad: Literal["fail", "skip"] = "fail",
    allow_counts: bool = False,
    allow_singles: bool = False,
) -> dict[str, Any]:
    """Pack the collection into `out` and return the manifest.

    resize: the largest short side of an image, in pixels. Raises ShardError if the counts, a class or an
    image is wrong and no option allows it.
    """
    # images and labels of a split are contiguous: train first, then the order of the source
    splits = dict.fromkeys(["train", *(item.split for item in collection.items)])
    order = {split: i for i, split in enumerate(splits)}
    items = sorted(collection.items, key=lambda item: order[item.split])
    if not items:
        raise ShardError(f"the {source} source found no images")
    if wrong := [split for split in splits if not re.fullmatch("[a-z]+", split)]:
        raise ShardError(f"the split name {wrong[0]!r} must consist of lower-case letters")
    _refuse_unsafe(items)
    notes = list(collection.notes)
    if problems := _count_problems(items, dict(collection.expected)):
        if not allow_counts:
            raise ShardError(f"{'; '.join(problems)}: complete the dataset, or pass --allow-counts")
        notes += problems
    if not allow_singles:
        _refuse_singles(Counter(item.class_name for item in items if item.split == "train"))
    _refuse_super_classes(items)

    skipped: list[str] = []
    converted = 0
    with (
        atomic_folder(out) as folder,
        closing(Packer(folder, max_bytes)) as packer,
        closing(in_order(partial(load, resize=resize), items, workers)) as pictures,
        closing(Progress(len(items), "image")) as progress,
    ):
        train, twins, forms = Counter[str](), Twins(), OneForm()
        for item, picture in zip(items, pictures, strict=True):
            progress.update()
            if not isinstance(picture, str):
                forms.check(item, picture)
                packer.add(item, picture)
                converted += picture.converted
                train[item.class_name] += item.split == "train"
                twins.add(item, picture.data)
            elif bad == "skip":
                skipped.append(f"{item.name} {picture}")
            else:
                raise ShardError(f"{item.name} {picture}: repair the file, or pass --bad skip")
        if skipped and not allow_singles:
            _refuse_singles(train)
        if converted and resize:
            notes.append(f"{converted:,} images were made smaller or converted to PNG")
        elif converted:
            notes.append(f"{converted:,} images of other formats were converted to PNG, losslessly")
        notes += twins.notes()
        return packer.finish(source, notes, skipped)


class OneForm:
    """Shards hold images, or else vectors that all have the same size and type."""

    def __init__(self) -> None:
        self.first: tuple[Item, str] | None = None

    def check(self, item: Item, picture: Picture) -> None:
        form = "an image"
        if picture.suffix == "npy":
            found = form_of(picture.data)
            form = f"a vector of {found.size:,} numbers ({found.dtype})"
        self.first = self.first or (item, form)
        if form != self.first[1]:
            raise ShardError(
                f"{self.first[0].name} is {self.first[1]} but {item.name} is {form}: build each kind "
                "into a folder of its own"
            )


class Twins:
    """Images with the same bytes that are in several classes or splits."""

    def __init__(self) -> None:
        self.first: dict[bytes, Item] = {}
        self.pairs: dict[str, list[tuple[Item, Item]]] = {"classes": [], "splits": []}

    def add(self, item: Item, data: bytes) -> None:
        other = self.first.setdefault(hashlib.blake2b(data, digest_size=16).digest(), item)
        if other.class_name != item.class_name:
            self.pairs["classes"].append((other, item))
        elif other.split != item.split:
            self.pairs["splits"].append((other, item))

    def notes(self) -> list[str]:
        return [
            f"{len(pairs):,} images are in several {what}, such as {pairs[0][0].name} and "
            f"{pairs[0][1].name}"
            for what, pairs in self.pairs.items()
            if pairs
        ]


def _summary(manifest: dict[str, Any], out: Path, seconds: float) -> str:
    images = sum(split["images"] for split in manifest["splits"].values())
    size = sum(shard["bytes"] for shard in manifest["shards"]) / 2**20
    lines = [f"{out}: {images:,} images of {len(manifest['classes']):,} classes"]
    for split, counts in manifest["splits"].items():
        lines.append(f"  {split:8}{counts['classes']:>8,} classes{counts['images']:>10,} images")
    lines.append(f"  {size:,.1f} MiB in {len(manifest['shards'])} shards")
    lines.append(f"  {seconds:.1f} s, {images / seconds:,.0f} images/s")
    lines += [f"  note: {note}" for note in manifest["notes"]]
    lines += [f"  skipped: {image}" for image in manifest["skipped"]]
    if manifest["skipped"]:
        lines.append(f"  skipped {len(manifest['skipped']):,} images in all")
    return "\n".join(lines)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]+) ?([KMG]?)(?:i?B)?", text)
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 256MiB, 1G or 1000000")
    return int(match[1]) * UNITS[match[2]]


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share between 0 and 1")
    return share


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    about, example, promise = (__doc__ or "").strip().split("\n\n")
    parser = argparse.ArgumentParser(
        prog=program_name("shards/build.py"),
        description=f"{about}\n\n  {example}\n\n{promise}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "source",
        choices=SOURCES,
        help="the dataset; folder means your own images, features vectors",
    )
    add(
        "--root",
        type=Path,
        required=True,
        help="the dataset as it was published; for folder SPLIT/CLASS/IMAGE, CLASS/IMAGE, or a .csv or "
        ".parquet with the columns path, label and perhaps split and super_class; for features a folder "
        "with a .npy of n x d numbers and a .csv with the column label, or what dml/embed.py wrote",
    )
    add("--out", type=Path, required=True, help="the folder to create")
    add("--max-bytes", type=_bytes, default="256MiB", help="size of a tar (default: %(default)s)")
    add(
        "--resize", type=_positive, metavar="N", help="make images with a larger short side smaller"
    )
    add(
        "--test-classes",
        type=_share,
        metavar="SHARE",
        help="folder or features without splits: the share of classes held out as test (default: 0.5)",
    )
    add("--seed", type=int, default=0, help="chooses the test classes (default: %(default)s)")
    workers = "processes (default: %(default)s on this machine)"
    add("--workers", type=_positive, default=default_workers(), help=workers)
    add(
        "--bad",
        choices=("fail", "skip"),
        default="fail",
        help="unreadable images: stop at the first, or leave them out and list them (default: fail)",
    )
    add("--allow-counts", action="store_true", help="accept counts other than the published ones")
    add("--allow-singles", action="store_true", help="accept train classes with a single image")
    return parser.parse_args(argv)


def _collect(args: argparse.Namespace) -> Collection:
    collect: Callable[..., Collection] = import_module(f"shards.sources.{args.source}").collect
    if args.source in ("folder", "features"):
        return collect(args.root, args.test_classes, args.seed)
    if args.test_classes is not None:
        raise ShardError(f"--test-classes is for folder; {args.source} has splits of its own")
    return collect(args.root)


def main(argv: Sequence[str] | None = None) -> int:
    args, start = _parse(argv), time.perf_counter()
    try:
        collection = _collect(args)
        manifest = build(
            collection,
            args.source,
            args.out,
            max_bytes=args.max_bytes,
            resize=args.resize,
            workers=args.workers,
            bad=args.bad,
            allow_counts=args.allow_counts,
            allow_singles=args.allow_singles,
        )
    except KeyboardInterrupt:
        print(f"interrupted: {args.out} was not built, nothing is left behind", file=sys.stderr)
        return STOPPED
    except ShardError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        ours = str(error.filename).startswith(f"{args.out.absolute()}.partial")
        reason = f"{error.strerror}; choose another --out" if ours else str(error)
        reason = "the disk is full" if full else reason
        print(f"error: {args.out} was not built: {reason}", file=sys.stderr)
        return 2
    print(_summary(manifest, args.out, time.perf_counter() - start))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
