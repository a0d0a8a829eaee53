"""Thumbnails, many to a file.

A browser decodes a whole sheet to show one image of it, and the neighbours of a query lie in as many
sheets. Scrolling through 60,000 images in sheets of 16 x 16 took three times as long per frame as in
sheets of 4 x 4, with pauses of seconds.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dml.data.sources import Source
from dml.errors import RunError
from dml.inference.picture import cell
from shards.cores import available_cores
from shards.output import Progress
from shards.photo import open_photo

THUMB, ACROSS = 64, 4  # pixels; thumbnails per row and column
PER_SHEET = ACROSS * ACROSS
AT_A_TIME = 256  # images in memory
SMALL = 32  # pixels of the grey images that are compared
Grey = NDArray[np.uint8]  # n x SMALL x SMALL


@dataclass(frozen=True, eq=False)
class Sheets:
    """files: encoded sheets, in order. grey: every image, small, to be compared with others."""

    files: Sequence[bytes]
    grey: Grey


def thumbnail(data: bytes) -> Image.Image:
    """The whole image in a white square of THUMB pixels."""
    photo = open_photo(data)
    if photo.image.format in ("JPEG", "MPO"):
        photo.image.draft("RGB", (2 * THUMB, 2 * THUMB))  # most photos are much larger
    return cell(photo.whole(), THUMB)


def thumbnails(source: Source, names: Sequence[str]) -> Iterator[Image.Image]:
    """In order; a few hundred images are decoded at a time, on all cores."""
    with ThreadPoolExecutor(available_cores()) as pool:
        for start in range(0, len(names), AT_A_TIME):
            part = names[start : start + AT_A_TIME]
            data = [source.read(name) for name in part]  # a reader is for one thread
            yield from pool.map(drawn, (source.root / name for name in part), data)


def drawn(path: Path, data: bytes) -> Image.Image:
    try:
        return thumbnail(data)
    except Exception as error:  # noqa: BLE001  decoders raise almost any exception on damaged bytes
        raise RunError(
            f"{path} cannot be read as an image ({error}): repair or remove it"
        ) from None


def in_grey(image: Image.Image) -> Grey:
    return np.asarray(image.convert("L").resize((SMALL, SMALL), Image.Resampling.BOX))


def draw_sheets(source: Source, names: Sequence[str]) -> Sheets:
    files, grey = [], np.empty((len(names), SMALL, SMALL), np.uint8)
    side = THUMB * ACROSS
    sheet = Image.new("RGB", (side, side), "white")
    with closing(Progress(len(names), "thumbnail", leave=False)) as progress:
        for i, image in enumerate(thumbnails(source, names)):
            row, column = divmod(i % PER_SHEET, ACROSS)
            sheet.paste(image, (column * THUMB, row * THUMB))
            grey[i] = in_grey(image)
            if i % PER_SHEET == PER_SHEET - 1 or i == len(names) - 1:
                file = io.BytesIO()
                sheet.crop((0, 0, side, (row + 1) * THUMB)).save(file, "WEBP", quality=80, method=2)
                files.append(file.getvalue())
            progress.update()
    return Sheets(files, grey)
