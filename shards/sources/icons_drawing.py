"""Draws the SVG of an icon in grey pixels. An untrusted SVG is checked before it is rendered."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import skia
from numpy.typing import NDArray

from shards.item import ShardError

# The elements of still drawings. All others are refused: <image>, <script>, <style>, <foreignObject>,
# animations; and <use>, because nested copies can take forever to draw.
ELEMENTS = (
    "svg g defs path rect circle ellipse line polyline polygon mask clipPath"
    " linearGradient radialGradient stop"
)
ATTRIBUTES = (
    "id class d points x y x1 y1 x2 y2 cx cy r rx ry fx fy width height viewBox transform color"
    " fill fill-rule fill-opacity stroke stroke-width stroke-linecap stroke-linejoin"
    " stroke-miterlimit stroke-dasharray stroke-dashoffset stroke-opacity opacity vector-effect"
    " mask maskUnits mask-type clip-path clip-rule offset stop-color stop-opacity"
    " gradientUnits gradientTransform"
)
TAGS = {f"{{http://www.w3.org/2000/svg}}{name}": name for name in ELEMENTS.split()}
NAMES = frozenset(ATTRIBUTES.split())
LINK = re.compile(r"url\(#[\w-]+\)")  # to an element of the same drawing
MAX_CHARACTERS = 100_000
MAX_DEPTH = 32  # the renderer recurses once per level


def check(svg: str) -> None:
    """Raise ShardError unless the drawing consists of shapes that refer to nothing outside it."""
    if len(svg) > MAX_CHARACTERS:
        raise ShardError(f"an SVG of {len(svg):,} characters; at most {MAX_CHARACTERS:,} are drawn")
    if any(mark in svg for mark in ("<!", "<?", "&", "\\")):  # before a parser expands them
        raise ShardError("an SVG with a declaration, an entity or an escape; only shapes are drawn")
    try:
        todo = [(ElementTree.fromstring(svg), 1, False)]
    except ElementTree.ParseError as error:
        raise ShardError(f"not an SVG: {error}") from None
    while todo:
        element, depth, masking = todo.pop()
        if element.tag not in TAGS:
            raise ShardError(f"an SVG with <{element.tag}>; only shapes are drawn")
        if depth > MAX_DEPTH:
            raise ShardError(f"an SVG of more than {MAX_DEPTH} levels; only shapes are drawn")
        # nested masks can take forever to draw, too
        masking = masking or TAGS[element.tag] in ("mask", "clipPath")
        for name, value in element.items():
            linked = "url" in value.lower()
            if name not in NAMES or (linked and (masking or not LINK.fullmatch(value))):
                raise ShardError(f'an SVG with {name}="{value[:40]}"; only shapes are drawn')
        todo += [(child, depth + 1, masking) for child in element]


def document(body: str, left: float, top: float, width: float, height: float) -> str:
    """A square black SVG around the body of an icon, with a margin because some touch their edges."""
    side = max(width, height) * 1.1
    x, y = left - (side - width) / 2, top - (side - height) / 2
    body = body.replace("currentColor", "black")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{x:g} {y:g} {side:g} {side:g}">'
        f"{body}</svg>"
    )


def surface(svg: str, pixels: int) -> skia.Surface:
    check(svg)
    # True: skia copies the text, because it reads it after this call returns
    drawing = skia.SVGDOM.MakeFromStream(skia.MemoryStream(svg.encode(), True))
    if drawing is None:
        raise ShardError("an SVG that the renderer cannot read")
    grey = skia.ImageInfo.Make(pixels, pixels, skia.kGray_8_ColorType, skia.kOpaque_AlphaType)
    result = skia.Surface.MakeRaster(grey)
    with result as canvas:
        canvas.clear(skia.ColorWHITE)
        drawing.setContainerSize(skia.Size(pixels, pixels))
        drawing.render(canvas)
    return result


def ink(svg: str, pixels: int) -> NDArray[np.uint8]:
    """The darkness of every pixel; 0 is white."""
    result = np.empty((pixels, pixels), np.uint8)
    drawn = surface(svg, pixels)
    if not drawn.readPixels(drawn.imageInfo(), result, pixels, 0, 0):
        raise ShardError("an SVG that the renderer cannot read")
    return 255 - result


def png(svg: str, pixels: int) -> bytes:
    return bytes(surface(svg, pixels).makeImageSnapshot().encodeToData(skia.kPNG, 100))
