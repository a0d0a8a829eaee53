"""Make an index of embeddings, with which dml search searches large sets faster.

    dml index embedded/photos
    dml index embedded/photos --kind ivfpq

DIR gets index.faiss, which any program that uses faiss can read, and index.faiss.json. The last line says
which share of the ten nearest neighbours the index finds. Up to about 100,000 images no index is needed.
Exit codes: 0 done, 2 a mistake in what was asked for.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from dml.errors import run_command
from shards.output import program_name, run_program


def main(argv: Sequence[str] | None = None) -> int:
    name = program_name("dml/inference/make_index.py")
    parser = argparse.ArgumentParser(
        prog=name, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("embedded", type=Path, metavar="DIR", help="what dml embed wrote")
    parser.add_argument(
        "--kind",
        choices=("flat", "hnsw", "ivfpq"),
        default="hnsw",
        help="flat: exact; hnsw: a graph, fast; ivfpq: small (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    return run_command(name, lambda: print(make_index(args)))


def make_index(args: argparse.Namespace) -> str:
    # after parsing: --help needs no torch
    from dml.inference.embedded import FAISS, read
    from dml.inference.index_file import NEIGHBOURS, write_index

    started = time.monotonic()
    embedded = read(args.embedded)
    info = write_index(args.embedded, embedded.X, args.kind)
    path = args.embedded / FAISS
    return (
        f"{path}: {info.kind}, {len(embedded.X):,} images, {path.stat().st_size / 2**20:,.1f} MiB in "
        f"{time.monotonic() - started:.1f} s; finds {info.recall:.2%} of the {NEIGHBOURS} nearest "
        "neighbours"
    )


if __name__ == "__main__":
    run_program(main)
