"""The retrieval picture: each query at the left, then its nearest neighbours, framed by whether they
have its class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw

RIGHT, WRONG, PLAIN = (40, 160, 70), (205, 50, 50), (150, 150, 150)
CELL, FRAME, GAP = 96, 4, 6


@dataclass(frozen=True)
class Found:
    """A retrieved image. right: whether it has the query's class; None if unknown."""

    image: Image.Image
    right: bool | None


def retrieval_picture(rows: Sequence[tuple[Image.Image, Sequence[Found]]]) -> Image.Image:
    """Draw a row per query: the query, then what was found for it, nearest first."""
    widest = max(len(found) for _, found in rows)
    pitch = CELL + 2 * FRAME + GAP
    picture = Image.new("RGB", (GAP + (widest + 1) * pitch + GAP, GAP + len(rows) * pitch), "white")
    draw = ImageDraw.Draw(picture)
    for i, (query, found) in enumerate(rows):
        y = GAP + i * pitch
        picture.paste(cell(query), (GAP + FRAME, y + FRAME))
        for j, one in enumerate(found, start=1):
            x = 2 * GAP + j * pitch  # a gap after the query
            colour = PLAIN if one.right is None else RIGHT if one.right else WRONG
            draw.rectangle((x, y, x + CELL + 2 * FRAME - 1, y + CELL + 2 * FRAME - 1), fill=colour)
            picture.paste(cell(one.image), (x + FRAME, y + FRAME))
    return picture


def cell(image: Image.Image) -> Image.Image:
    """The whole image in a white square of CELL pixels."""
    scale = CELL / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    square = Image.new("RGB", (CELL, CELL), "white")
    square.paste(
        image.convert("RGB").resize(size, Image.Resampling.LANCZOS),
        ((CELL - size[0]) // 2, (CELL - size[1]) // 2),
    )
    return square


def stacked(pictures: Sequence[Image.Image]) -> Image.Image:
    """Pictures below each other."""
    width, height = max(each.width for each in pictures), sum(each.height for each in pictures)
    whole, y = Image.new("RGB", (width, height), "white"), 0
    for each in pictures:
        whole.paste(each, (0, y))
        y += each.height
    return whole
