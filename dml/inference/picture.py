"""The retrieval picture: each query at the left, then its nearest neighbours, framed by whether they
have its class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

RIGHT, WRONG, PLAIN = (40, 160, 70), (205, 50, 50), (150, 150, 150)
CELL, FRAME, GAP = 96, 4, 6
LINE = 13  # pixels of a line of a caption


@dataclass(frozen=True)
class Found:
    """A retrieved image. right: whether it has the query's class; None if unknown. caption: lines below
    it."""

    image: Image.Image
    right: bool | None
    caption: Sequence[str] = ()


def retrieval_picture(
    rows: Sequence[tuple[Image.Image, Sequence[Found]]], captions: Sequence[Sequence[str]] = ()
) -> Image.Image:
    """Draw a row per query: the query, then what was found for it, nearest first. captions: of the
    queries."""
    captions = captions or [()] * len(rows)
    every = [*captions, *(one.caption for _, found in rows for one in found)]
    text = LINE * max(map(len, every))
    widest = max(len(found) for _, found in rows)
    pitch = CELL + 2 * FRAME + GAP
    size = (GAP + (widest + 1) * pitch + GAP, GAP + len(rows) * (pitch + text))
    picture = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(picture)
    for i, ((query, found), caption) in enumerate(zip(rows, captions, strict=True)):
        y = GAP + i * (pitch + text)
        below = y + CELL + 2 * FRAME
        picture.paste(cell(query), (GAP + FRAME, y + FRAME))
        write_lines(draw, GAP, below, caption)
        for j, one in enumerate(found, start=1):
            x = 2 * GAP + j * pitch  # a gap after the query
            colour = PLAIN if one.right is None else RIGHT if one.right else WRONG
            draw.rectangle((x, y, x + CELL + 2 * FRAME - 1, y + CELL + 2 * FRAME - 1), fill=colour)
            picture.paste(cell(one.image), (x + FRAME, y + FRAME))
            write_lines(draw, x, below, one.caption)
    return picture


def write_lines(draw: ImageDraw.ImageDraw, x: int, y: int, lines: Sequence[str]) -> None:
    """Each line is cut where the next image begins."""
    font = ImageFont.load_default(LINE - 2)
    for i, line in enumerate(lines):
        shown = line.encode(errors="replace").decode()  # a file name need not be text
        while draw.textlength(shown, font) > CELL + 2 * FRAME:
            shown = f"{shown.removesuffix('…')[:-1]}…"
        draw.text((x, y + i * LINE), shown, "black", font)


def cell(image: Image.Image, side: int = CELL) -> Image.Image:
    """The whole image in a white square."""
    scale = side / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    square = Image.new("RGB", (side, side), "white")
    square.paste(
        image.convert("RGB").resize(size, Image.Resampling.LANCZOS),
        ((side - size[0]) // 2, (side - size[1]) // 2),
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
