"""Draw a contact sheet of random classes, to check their labels by eye:

python shards/sheet.py data/icons sheet.png
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file: Python put shards/ on the path, but imports start above it
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from shards.index import ImageReader, Index, load_index
from shards.item import ShardError
from shards.output import exit_code, program_name
from shards.photo import open_photo

THUMB, TEXT = 44, 14  # pixels
ACROSS, COLUMNS = 12, 4  # thumbnails per class, columns of classes


def sheet(index: Index, classes: int, seed: int) -> Image.Image:
    """Random classes of all splits, each with its name and its first images."""
    labels = index.rows["label"]
    present = np.unique(labels).tolist()
    some = random.Random(seed).sample(present, min(classes, len(present)))
    width, height = THUMB * ACROSS + TEXT, THUMB + 2 * TEXT
    lines = -(-len(some) // COLUMNS)
    picture = Image.new("RGB", (width * COLUMNS, height * lines), "white")
    pen, font, reader = (
        ImageDraw.Draw(picture),
        ImageFont.load_default(TEXT - 2),
        ImageReader(index),
    )
    for cell, label in enumerate(sorted(some, key=index.class_names.__getitem__)):
        x, y = cell // lines * width, cell % lines * height
        rows = np.flatnonzero(labels == label)
        pen.text((x + 2, y), f"{index.class_names[label]} ({len(rows)})", "blue", font)
        for i, row in enumerate(rows[:ACROSS].tolist()):
            thumb = open_photo(reader.read(row)).whole()
            thumb.thumbnail((THUMB, THUMB))
            picture.paste(thumb, (x + i * THUMB, y + TEXT))
    return picture


def main(argv: Sequence[str] | None = None) -> int:
    about = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog=program_name("shards/sheet.py"), description=about)
    parser.add_argument("shards", type=Path, help="a folder made by shards/build.py")
    parser.add_argument("out", type=Path, help="the picture to write")
    parser.add_argument("--classes", type=int, default=100, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="chooses them (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        sheet(load_index(args.shards), args.classes, args.seed).save(args.out)
    except (ShardError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
