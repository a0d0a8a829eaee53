"""From the SVG of an icon to grey pixels. A stranger's SVG is checked before the renderer sees it."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import skia
from numpy.typing import NDArray

from shards.item import ShardError

# What still drawings are made of. Everything else is refused by not being here: <image>, <script>,
# <style>, <foreignObject>, animations; and <use>, whose copies of copies can take for ever to draw.
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
LINK = re.compile(r"url\(#[\w-]+\)")  # to something in the drawing itself
MAX_CHARACTERS = 100_000
MAX_DEPTH = 32  # the renderer calls itself for every level


def check(svg: str) -> None:
    """ShardError unless the drawing is plain shapes that refer to nothing outside it."""
    if len(svg) > MAX_CHARACTERS:
        raise ShardError(f"an SVG of {len(svg):,} characters; at most {MAX_CHARACTERS:,} are drawn")
    if any(mark in svg for mark in ("<!", "<?", "&", "\\")):  # before a parser could expand them
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
        # masks of masks of masks take for ever, too
        masking = masking or TAGS[element.tag] in ("mask", "clipPath")
        for name, value in element.items():
            linked = "url" in value.lower()
            if name not in NAMES or (linked and (masking or not LINK.fullmatch(value))):
                raise ShardError(f'an SVG with {name}="{value[:40]}"; only shapes are drawn')
        todo += [(child, depth + 1, masking) for child in element]


def document(body: str, left: float, top: float, width: float, height: float) -> str:
    """A square SVG in black around the body of an icon; a margin, for some touch their edges."""
    side = max(width, height) * 1.1
    x, y = left - (side - width) / 2, top - (side - height) / 2
    body = body.replace("currentColor", "black")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{x:g} {y:g} {side:g} {side:g}">'
        f"{body}</svg>"
    )


def surface(svg: str, pixels: int) -> skia.Surface:
    check(svg)
    # skia reads the text after this call returns: it must have its own copy
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
    """How dark every pixel is: 0 for paper."""
    result = np.empty((pixels, pixels), np.uint8)
    drawn = surface(svg, pixels)
    if not drawn.readPixels(drawn.imageInfo(), result, pixels, 0, 0):
        raise ShardError("an SVG that the renderer cannot read")
    return 255 - result


def png(svg: str, pixels: int) -> bytes:
    return bytes(surface(svg, pixels).makeImageSnapshot().encodeToData(skia.kPNG, 100))
