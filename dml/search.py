"""Find the nearest neighbours of an image, or of each image of a folder, in a set of images.

    python dml/embed.py runs/icons_mini photos --out embedded/photos
    python dml/search.py runs/icons_mini embedded/photos mug.jpg --picture mug.png

Similarity is the dot product of embeddings: 1 for the same image, less for images that are less alike.
The search is exact: every image is compared, by faiss if it is installed, else by torch. In a set with an
index (dml index) the index is searched, and what it finds is compared exactly. If RUN was trained on
features, QUERY is a .npy file with a vector or a matrix, or a folder of shards of features. If RUN has two
encoders, --tower y embeds QUERY with that of y, for a search of y in x.

A query that is itself in the set (the same path) is not among its own neighbours. The picture has a row
per query: the query, then its neighbours with class and similarity, framed green if they have the query's
class, red if they have another, grey if a class is unknown. A query's class is the class that it has in the
set, or the sub-folder of QUERY that it is in; for a single image, the folder that it is in if the set has a
class of that name. Exit codes: 0 done, 2 a mistake in what was asked for.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dml.errors import EmbeddedError, run_command
from dml.run_folder.files import write_whole
from shards.item import ShardError
from shards.output import discard_output, escape_unprintable, program_name, run_program

if TYPE_CHECKING:
    from PIL import Image

    from dml.data.sources import Entry, Source

ROWS = 50  # of a picture


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=program_name("dml/search.py"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a finished training")
    parser.add_argument(
        "embedded", type=Path, metavar="EMBEDDED", help="what dml embed wrote with this RUN"
    )
    parser.add_argument("query", type=Path, metavar="QUERY", help="an image, or a folder of images")
    parser.add_argument(
        "--tower",
        choices=("x", "y"),
        help="which encoder of a RUN with two of them embeds QUERY (default: x)",
    )
    parser.add_argument("--k", type=int, default=5, metavar="K", help="neighbours per query (5)")
    parser.add_argument(
        "--picture", type=Path, metavar="PNG", help=f"draw them, up to {ROWS} queries"
    )
    parser.add_argument(
        "--exact", action="store_true", help="compare every image even if EMBEDDED has an index"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per query")
    args = parser.parse_args(argv)
    if args.k < 1:
        parser.error(f"--k must be at least 1, not {args.k}")
    if args.picture and args.picture.suffix.lower() != ".png":
        parser.error(f"--picture {args.picture} must end in .png")
    if args.picture and not args.picture.absolute().parent.is_dir():
        parser.error(f"--picture {args.picture}: there is no folder {args.picture.parent}")
    return run(args)


def run(args: argparse.Namespace) -> int:
    def work() -> None:
        try:
            search(args)
            sys.stdout.flush()
        except BrokenPipeError:  # an OSError too, but no mistake: the reader of a pipe has left
            discard_output()

    return run_command(program_name("dml/search.py"), work)


@dataclass(frozen=True)
class Answer:
    """A query and its neighbours, nearest first: (similarity, entry)."""

    path: Path
    class_name: str | None
    found: Sequence[tuple[float, Entry]]


def search(args: argparse.Namespace) -> None:
    # after parsing: --help needs no torch
    from dml.data.vectors import Features
    from dml.inference.embedded import read, source_of
    from dml.inference.index_file import nearest_by_index, read_index
    from dml.inference.neighbours import nearest
    from dml.inference.trained import embed, load_trained, model_sha256

    embedded = read(args.embedded)
    if embedded.info.features:
        raise EmbeddedError(
            f"{args.embedded} holds features, before the head: embed the images without --features"
        )
    if embedded.info.model_sha256 != model_sha256(args.run):
        raise EmbeddedError(
            f"{args.embedded} was made by another model, of {embedded.info.run}, than that of "
            f"{args.run}: search with that run, or embed the images with this one"
        )
    pictures = source_of(embedded.info) if args.picture else None
    model = load_trained(args.run, args.tower)
    if isinstance(model.spec, Features) and args.picture:
        raise EmbeddedError(
            f"--picture {args.picture}: {args.run} was trained on features, not images"
        )
    source, queries = find_queries(args.query, isinstance(model.spec, Features))
    Q, _ = embed(model, source, [q.image for q in queries], unreadable=refuse_query)
    # one more than asked for, since a query may find itself
    index = None if args.exact else read_index(args.embedded, embedded.X)
    similarities, places = (
        nearest(Q, embedded.X, args.k + 1)
        if index is None
        else nearest_by_index(index, Q, embedded.X, args.k + 1)
    )
    root, place_of = (
        Path(embedded.info.source),
        {e.image: i for i, e in enumerate(embedded.entries)},
    )
    single, known = not args.query.is_dir(), {e.class_name for e in embedded.entries}
    answers = []
    for query, S, order in zip(queries, similarities.tolist(), places.tolist(), strict=True):
        own = itself(source.root / query.image, root, place_of)
        class_name = query.class_name if own is None else embedded.entries[own].class_name
        class_name = class_name if class_name in known or not single else None
        found = [
            (s, embedded.entries[i]) for s, i in zip(S, order, strict=True) if i not in (own, -1)
        ]
        path = (args.query if args.query.is_dir() else args.query.parent) / query.image
        answers.append(Answer(path, class_name, found[: args.k]))
    if pictures:
        draw(answers, pictures, args.picture)
    escape_unprintable()  # a file name need not be text
    for answer in answers:
        print(as_json(answer) if args.json else as_text(answer))


def find_queries(path: Path, features: bool) -> tuple[Source, list[Entry]]:
    from dml.data.sources import Entry, Files, find_images, in_folder, in_npy

    if features and path.exists():
        return in_npy(path) if path.is_file() else find_images(path, None)
    if path.is_dir():
        return in_folder(path)
    if not path.exists():
        raise ShardError(f"{path} is not there: give an image, or a folder of images")
    folder = path.absolute().parent
    return Files(folder), [Entry(path.name, folder.name)]


def refuse_query(path: Path, reason: str) -> None:
    raise ShardError(f"{path} cannot be read as an image ({reason}): give another query")


def itself(query: Path, root: Path, place_of: Mapping[str, int]) -> int | None:
    """The row of a query that is in the set, by its path as written or with links followed."""
    for path, base in (
        (Path(os.path.abspath(query)), Path(os.path.abspath(root))),
        (query.resolve(), root.resolve()),
    ):
        if path.is_relative_to(base) and path.relative_to(base).as_posix() in place_of:
            return place_of[path.relative_to(base).as_posix()]
    return None


def as_json(answer: Answer) -> str:
    found = [
        {"similarity": round(similarity, 6), "image": entry.image, "class": entry.class_name}
        for similarity, entry in answer.found
    ]
    return json.dumps({"query": str(answer.path), "class": answer.class_name, "found": found})


def as_text(answer: Answer) -> str:
    width = max((len(entry.image) for _, entry in answer.found), default=0)
    lines = [
        f"  {similarity:7.4f}  {entry.image:{width}}  {entry.class_name or ''}".rstrip()
        for similarity, entry in answer.found
    ]
    known = f"  ({answer.class_name})" if answer.class_name is not None else ""
    return "\n".join([f"{answer.path}{known}", *(lines or ["  nothing else is in the set"])])


def draw(answers: Sequence[Answer], pictures: Source, path: Path) -> None:
    from dml.data.sources import Files
    from dml.inference.picture import Found, retrieval_picture

    rows = []
    for answer in answers[:ROWS]:
        query = answer.path.absolute()
        found = [
            Found(
                shown(pictures, entry.image),
                same(answer.class_name, entry.class_name),
                (caption(entry.class_name, entry.image), f"{similarity:.3f}"),
            )
            for similarity, entry in answer.found
        ]
        rows.append((shown(Files(query.parent), query.name), found))
    captions = [(caption(a.class_name, a.path.name), "query") for a in answers[:ROWS]]
    png = io.BytesIO()
    retrieval_picture(rows, captions).save(png, "PNG")
    try:
        write_whole(path, png.getvalue())
    except OSError as error:
        raise EmbeddedError(f"--picture {path} cannot be written: {error.strerror}") from None
    if len(answers) > ROWS:
        print(f"{path}: the first {ROWS} of {len(answers):,} queries", file=sys.stderr)


def caption(class_name: str | None, image: str) -> str:
    return Path(image).name if class_name is None else class_name


def same(a: str | None, b: str | None) -> bool | None:
    return None if a is None or b is None else a == b


def shown(source: Source, name: str) -> Image.Image:
    """The whole image, which was readable when it was embedded."""
    from shards.photo import open_photo

    try:
        return open_photo(source.read(name)).whole()
    except (OSError, ShardError, ValueError, IndexError) as error:
        text = (error.strerror if isinstance(error, OSError) else None) or error
        raise EmbeddedError(
            f"{source.root / name} is no longer readable ({text}): put it back, or embed the "
            "images again"
        ) from None


if __name__ == "__main__":
    run_program(main)
