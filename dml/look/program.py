"""Write a page to look at a run: its errors, its classes, its labels, and a map of its embeddings.

    dml look runs/icons_mini
    dml look runs/icons_mini --beside runs/other
    dml look runs/icons_mini --serve

The page opens in a browser without a server. It shows Recall@K, the worst queries with their neighbours,
the classes that are confused most, near-duplicates across classes and splits, images whose neighbours agree
on another class (likely label errors), and a map. Images of other splits are embedded as well, to find
near-duplicates. --serve also shows a field for a photo, whose neighbours are found; the photo is not kept.

Exit codes: 0 done, 2 a mistake in what was asked for.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from dml.errors import RunError, run_command
from shards.cores import available_cores
from shards.output import program_name, run_program

if TYPE_CHECKING:
    from dml.config import Config
    from dml.inference.neighbours import Vectors
    from dml.look.images import Gallery
    from dml.models import Embedder

HERE = "127.0.0.1:8000"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=program_name("dml/look/program.py"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a finished training")
    parser.add_argument("--beside", type=Path, metavar="RUN", help="another run, to compare with")
    parser.add_argument(
        "--split",
        default="test",
        choices=("train", "test", "query", "gallery", "all"),
        help="which images of the shards (default: %(default)s)",
    )
    parser.add_argument(
        "--images",
        type=Path,
        metavar="DIR",
        help="shards, or photos in a folder per class (default: the shards of RUN)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="the folder to write (default: RUN/look)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes that decode images (one per core, up to 8)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace DIR if it is such a page")
    parser.add_argument(
        "--serve",
        nargs="?",
        const=HERE,
        metavar="ADDRESS",
        help=f"serve the page with a field for a photo, at {HERE} if no address is given",
    )
    args = parser.parse_args(argv)
    if args.workers is not None and args.workers < 0:
        parser.error(f"--workers must be at least 0, not {args.workers}")
    return run(args)


def run(args: argparse.Namespace) -> int:
    return run_command(
        program_name("dml/look/program.py"),
        lambda: look(args),
        interrupted="ended",
        to_need_less=("the number of images", "--workers"),
    )


def look(args: argparse.Namespace) -> None:
    # after parsing: --help needs no torch
    from dml.distributed.malloc import keep_freed_memory
    from dml.inference.trained import load_trained, read_config
    from dml.inference.whole_folder import refuse_occupied
    from dml.look.images import gallery_of
    from dml.look.page import is_page
    from dml.look.serve import Server, parse_address

    out = args.out or args.run / "look"
    address = parse_address(args.serve) if args.serve else None
    config, folders = read_config(args.run), [args.run, args.beside] if args.beside else [args.run]
    for folder in folders:
        if read_config(folder).towers.two_encoders:
            raise RunError(
                f"{folder} has two encoders, which find each other's images; a page shows those of "
                "one: search with dml search --tower"
            )
    refuse_occupied(out, is_page, "a page", "dml look", args.overwrite)
    keep_freed_memory()
    gallery = gallery_of(args.images or images_of(args.run, config), args.split)
    models = [load_trained(folder) for folder in folders]
    workers = min(8, available_cores()) if args.workers is None else args.workers
    with Server(address) if address else nullcontext() as server:
        X = write(out, gallery, folders, models, sorted({1, *config.eval.ks}), workers)
        if gallery.without_class:
            print(
                f"{gallery.without_class:,} images without a class are not shown", file=sys.stderr
            )
        counts = f"{len(gallery.entries):,} images of {len(gallery.class_names):,} classes"
        print(f"{out / 'index.html'}: {counts}")
        if server:
            server.show(out, models[0], X[gallery.searched], gallery.searched.start)
            print(f"{server.url} (end with Ctrl-C)", flush=True)
            server.serve_forever()


def images_of(run: Path, config: Config) -> Path:
    """The folder of shards that the run was trained on."""
    if config.model.backbone == "none":
        raise RunError(f"{run} was trained on features: there are no images to look at")
    if isinstance(config.data.shards, tuple):
        several = ", ".join(config.data.shards)
        raise RunError(f"{run} was trained on several datasets: name one of {several} by --images")
    return Path(config.data.shards)


def write(
    out: Path,
    gallery: Gallery,
    folders: Sequence[Path],
    models: Sequence[Embedder],
    ks: Sequence[int],
    workers: int,
) -> Vectors:
    """Write the page; return the embeddings of the images by the first model."""
    import numpy as np

    from dml.look.copies import across_classes, across_splits, near_duplicates, numbered
    from dml.look.findings import findings
    from dml.look.layout import layout
    from dml.look.page import Looked, data_of, write_page
    from dml.look.sheets import draw_sheets

    images = [entry.image for entry in gallery.entries]
    embedded = [embed_all(model, gallery, images, workers) for model in models]
    others = [entry.image for entry, _ in gallery.others]
    pairs = [
        across_splits(X, embed_all(model, gallery, others, workers))
        for model, X in zip(models, embedded, strict=True)
    ]
    extra, pairs = numbered(pairs, len(images))
    sheets = draw_sheets(gallery.source, images + [others[i] for i in extra])
    runs = []
    names = [folder.resolve().name for folder in folders]
    names = names if len(set(names)) == len(names) else [str(folder) for folder in folders]
    for name, X, across in zip(names, embedded, pairs, strict=True):
        found = findings(X, gallery, ks)
        both = np.concatenate([across_classes(found.places, gallery.labels), across])
        few = found.places[:, :5]
        edges = np.stack([np.repeat(np.arange(len(few)), few.shape[1]), few.ravel()], 1)
        copies = near_duplicates(sheets.grey, both)
        runs.append(Looked(name, found, copies, layout(X, edges)))
    write_page(out, data_of(gallery, extra, len(sheets.grey), runs), sheets.files)
    return embedded[0]


def embed_all(model: Embedder, gallery: Gallery, names: Sequence[str], workers: int) -> Vectors:
    from dml.inference.trained import embed

    X, _ = embed(model, gallery.source, names, unreadable=refuse, workers=workers)
    return X


def refuse(path: Path, reason: str) -> None:
    raise RunError(f"{path} cannot be read as an image ({reason}): repair or remove it")


if __name__ == "__main__":
    run_program(main)
