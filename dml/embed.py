"""Embed images with a trained model, to search them or for programs of your own.

    python dml/embed.py runs/icons_mini photos --out embedded/photos
    python dml/embed.py runs/icons_mini data/sop --split test --out embedded/sop
    python dml/embed.py efficientnet_lite0 data/sop --features --out features/sop

IMAGES is a folder of images (JPEG, PNG, WebP, ...), with sub-folders or without (the sub-folder that an
image is in is its class), or a folder of shards. DIR is written whole or not at all:

    embeddings.npy      n x d float32, unit length: similarities are dot products
    index.jsonl         a line per embedding, in the same order: {"image": "mug/1.jpg", "class": "mug"}
    info.json           which model, which images, how many
    embeddings.parquet  with --parquet: columns image, class, embedding (duckdb, pandas, embedding-atlas)

An image is embedded as in evaluation: its centre crop, at the size that the model was trained for. The
result does not depend on --workers. Of a run with two encoders (two towers), --tower y embeds with that of
y. With --features the rows are what the backbone computes, before the
head, of any length; RUN may then name a backbone with published weights, and shards/build.py features
packs DIR to train heads on. Exit codes: 0 done, 2 a mistake in what was asked for.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from dml.config.keys import BACKBONE
from dml.config.sections import MOST_PIXELS
from dml.errors import EmbeddedError, Mistake, run_command
from shards.cores import available_cores
from shards.item import ShardError
from shards.output import program_name, run_program

if TYPE_CHECKING:
    from dml.models import Embedder


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=program_name("dml/embed.py"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="folder of a finished training; with --features also a backbone, such as timm:NAME",
    )
    parser.add_argument("images", type=Path, metavar="IMAGES", help="folder of images or of shards")
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="folder to write")
    parser.add_argument(
        "--split",
        choices=("train", "test", "query", "gallery", "all"),
        help="which images of shards (default: all)",
    )
    parser.add_argument(
        "--tower", choices=("x", "y"), help="which encoder of a RUN with two of them (default: x)"
    )
    parser.add_argument(
        "--features", action="store_true", help="write the features before the head"
    )
    parser.add_argument(
        "--weights",
        metavar="FILE",
        help="of a backbone that RUN names (default: those that an installed package carries)",
    )
    parser.add_argument(
        "--size",
        type=int,
        metavar="N",
        help="side of the crop in pixels, for a backbone that RUN names (default: what it expects)",
    )
    parser.add_argument(
        "--resize",
        type=int,
        metavar="N",
        help="short side of an image before its crop (default: in proportion to --size)",
    )
    parser.add_argument(
        "--batch", type=int, default=256, metavar="N", help="images per forward pass (256)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes that decode images (one per core, up to 8)",
    )
    parser.add_argument(
        "--skip-unreadable",
        action="store_true",
        help="leave out images that cannot be read, and name them; without this flag the first one is an error",
    )
    parser.add_argument("--parquet", action="store_true", help="write embeddings.parquet as well")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace DIR if this program wrote it"
    )
    args = parser.parse_args(argv)
    if args.batch < 1:
        parser.error(f"--batch must be at least 1, not {args.batch}")
    if args.workers is not None and args.workers < 0:
        parser.error(f"--workers must be at least 0, not {args.workers}")
    for option, pixels in (("--size", args.size), ("--resize", args.resize)):
        if pixels is not None and not 1 <= pixels <= MOST_PIXELS:
            parser.error(f"{option} must be from 1 to {MOST_PIXELS:,}, not {pixels}")
    return run(args)


def run(args: argparse.Namespace) -> int:
    return run_command(
        program_name("dml/embed.py"),
        lambda: print(embed_images(args)),
        interrupted="interrupted, nothing was written",
        to_need_less=("--batch", "--workers"),
    )


def embed_images(args: argparse.Namespace) -> str:
    """Write the folder; return a line that sums it up."""
    # after parsing: --help needs no torch
    from itertools import compress

    from tqdm import tqdm

    from dml.data.sources import Rows, find_images
    from dml.distributed.malloc import keep_freed_memory
    from dml.inference.embedded import Embedded, Info, is_only_ours, write
    from dml.inference.trained import embed
    from dml.inference.whole_folder import refuse_occupied

    def unreadable(path: Path, reason: str) -> None:
        sentence = f"{path} cannot be read as an image ({reason})"
        if not args.skip_unreadable:
            raise ShardError(
                f"{sentence}: repair or remove it, or let --skip-unreadable leave it out"
            )
        tqdm.write(f"left out: {sentence}", file=sys.stderr)

    if args.parquet and find_spec("pyarrow") is None:
        raise EmbeddedError("--parquet needs pyarrow: pip install 'dml[parquet]'")
    refuse_occupied(args.out, is_only_ours, "embeddings", "dml embed", args.overwrite)
    keep_freed_memory()
    model, run, sha256 = find_model(args)
    source, entries = find_images(args.images, args.split)
    workers = min(8, available_cores()) if args.workers is None else args.workers
    started = time.monotonic()
    X, readable = embed(
        model,
        source,
        [entry.image for entry in entries],
        unreadable=unreadable,
        batch=args.batch,
        workers=workers,
        features=args.features,
    )
    seconds = time.monotonic() - started
    kept = list(compress(entries, readable))
    if not kept:
        raise ShardError(f"none of the {len(entries)} images of {args.images} can be read")
    shards = source.reader.index.manifest["index"]["sha256"] if isinstance(source, Rows) else None
    info = Info(
        run=run,
        model_sha256=sha256,
        source=str(source.root),
        split=(args.split or "all") if shards else None,
        shards_sha256=shards,
        count=len(kept),
        dimensions=X.shape[1],
        unreadable=len(entries) - len(kept),
        features=args.features,
        tower=args.tower,
    )
    write(args.out, Embedded(X[readable], kept, info), args.parquet)
    classes = len({entry.class_name for entry in kept} - {None})
    of_classes = f" of {classes:,} classes" if classes else ""
    rate = f"{seconds:.1f} s, {len(entries) / seconds:,.0f} images/s"
    left_out = f"; left out {info.unreadable:,} that cannot be read" if info.unreadable else ""
    return f"{args.out}: {len(kept):,} images{of_classes} in {rate}{left_out}"


def find_model(args: argparse.Namespace) -> tuple[Embedder, str, str]:
    """The model of a run or of a backbone's name, what it is called, and its checksum."""
    from dml.inference.trained import load_backbone, load_trained, model_sha256, weights_sha256

    name = str(args.run)
    if not args.features or args.run.is_dir() or not BACKBONE.holds(name) or name == "none":
        for option in ("weights", "size", "resize"):
            given = getattr(args, option)
            if given is not None:
                raise Mistake(f"--{option} {given} is for --features of a backbone by name")
        model = load_trained(args.run, args.tower)
        return model, str(args.run.absolute()), model_sha256(args.run)
    if args.tower is not None:
        raise Mistake(f"--tower {args.tower} is for a run with two encoders, not for a backbone")
    model = load_backbone(name, args.weights or "pretrained", args.size, args.resize)
    return model, name, weights_sha256(model)


if __name__ == "__main__":
    run_program(main)
