"""The one way to open an image: as a person sees it, in 8-bit RGB.

Photos are turned as their EXIF says, 16 bits and floats become 8, transparent parts are white, and of an
animation the first frame counts. Building, training, embedding, searching and contact sheets all use it.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError
from PIL.Image import Transpose

# Pillow reads many more formats, but starts other programs for some of them (Ghostscript for EPS).
FORMATS = ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF"]
SUFFIXES = (
    *(".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm"),
    *(".avif", ".heic", ".heif"),
)
Box = tuple[float, float, float, float]

# EXIF's orientation -> how the stored pixels are turned to stand upright
UPRIGHT = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}
# ... and where the upright box (left, top, right, bottom) lies in the stored pixels, w x h
STORED: dict[int, Callable[[Box, int, int], Box]] = {
    2: lambda b, w, h: (w - b[2], b[1], w - b[0], b[3]),
    3: lambda b, w, h: (w - b[2], h - b[3], w - b[0], h - b[1]),
    4: lambda b, w, h: (b[0], h - b[3], b[2], h - b[1]),
    5: lambda b, w, h: (b[1], b[0], b[3], b[2]),
    6: lambda b, w, h: (b[1], h - b[2], b[3], h - b[0]),
    7: lambda b, w, h: (w - b[3], h - b[2], w - b[1], h - b[0]),
    8: lambda b, w, h: (w - b[3], b[0], w - b[1], b[2]),
}


if find_spec("pillow_heif"):
    from pillow_heif import register_heif_opener

    register_heif_opener()
    FORMATS.append("HEIF")


@dataclass(frozen=True)
class Photo:
    """An image that is decoded when it is used. image: as stored. orientation: by EXIF, 1 is upright."""

    image: Image.Image
    orientation: int = 1

    @property
    def size(self) -> tuple[int, int]:
        """Width and height, upright."""
        w, h = self.image.size
        return (h, w) if self.orientation >= 5 else (w, h)

    def whole(self) -> Image.Image:
        self.image.load()
        return self.upright(rgb(self.image))

    def resized(self, box: Box, size: int) -> Image.Image:
        """A box of the upright image, resized to size x size. A large JPEG is decoded at the smallest
        scale that has enough pixels, which saves most of the time."""
        image = self.image
        w, h = image.size
        if self.orientation in STORED:
            box = STORED[self.orientation](box, w, h)
        scale = min(box[2] - box[0], box[3] - box[1]) / size
        if image.format in ("JPEG", "MPO") and scale >= 2:  # MPO: several JPEGs in one file
            image.draft("RGB", (int(w / scale), int(h / scale)))
            x, y = image.size[0] / w, image.size[1] / h
            box = box[0] * x, box[1] * y, box[2] * x, box[3] * y
        if not plain_grey(image):  # grey is resized as one channel, in less than half of the time
            image = rgb(image)
        return self.upright(rgb(image.resize((size, size), Image.Resampling.BILINEAR, box)))

    def upright(self, image: Image.Image) -> Image.Image:
        turn = UPRIGHT.get(self.orientation)
        return image if turn is None else image.transpose(turn)


def open_photo(data: bytes, size: int = 0) -> Photo:
    """Open an image; UnidentifiedImageError or another error of Pillow's if it is none.

    A small plain JPEG is decoded at once: Pillow would spend a quarter of the time on opening it. size:
    the side to which it will be resized; 0 if the whole image is wanted.
    """
    w, h = plain_jpeg_size(data) or (0, 0)
    if 0 < min(w, h) < 2 * size and max(w, h) < 4 * size:
        try:
            return Photo(Image.frombytes("RGB", (w, h), data, "jpeg", "RGB", ""))
        except ValueError:
            pass  # damaged: Pillow's own reader says how
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        if data[4:8] == b"ftyp" and data[8:12] in HEIC_BRANDS:
            raise ValueError("a HEIC photo, which needs pip install 'dml[heic]'") from None
        raise
    return Photo(image, orientation_of(image, data))


def orientation_of(image: Image.Image, data: bytes) -> int:
    if image.format in ("HEIF", "TIFF"):  # their readers turn the image themselves
        return 1
    if (
        image.format == "PNG" and b"eXIf" not in data
    ):  # to ask Pillow takes a tenth of a small image's time
        return 1
    return int(image.getexif().get(ExifTags.Base.Orientation, 1))


HEIC_BRANDS = (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1")
FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive
EXIF = 0xE1


def plain_jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Width and height of an 8-bit JPEG with three colours and without EXIF; None for anything else."""
    at = 2
    while data[:2] == b"\xff\xd8" and data[at : at + 1] == b"\xff" and at + 10 <= len(data):
        if data[at + 1] == EXIF:
            return None
        if data[at + 1] in FRAMES:
            bits, h, w, colours = struct.unpack_from(">BHHB", data, at + 4)
            return (w, h) if (bits, colours) == (8, 3) else None
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None


def plain_grey(image: Image.Image) -> bool:
    """Whether all three channels in RGB would be this one, also after resizing."""
    return image.mode == "L" and not image.has_transparency_data


def rgb(image: Image.Image) -> Image.Image:
    """The image in 8-bit RGB; transparent parts are white."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
    elif image.mode in ("I", "F"):
        image = Image.fromarray(to_bytes(np.asarray(image, dtype=np.float64)))
    if image.has_transparency_data:
        above = image.convert("RGBA")
        white = Image.new("RGBA", above.size, "white")
        image = Image.alpha_composite(white, above)
    return image.convert("RGB")


def to_bytes(x: np.ndarray) -> np.ndarray:
    """Grey values of unknown range: 0 to 1, to 255 or to 65535 if they fit, else lowest to highest."""
    low, high = np.nanmin(x), np.nanmax(x)
    top = next((top for top in (1.0, 255.0, 65535.0) if 0 <= low and high <= top), None)
    if top is None:
        x, top = x - low, (high - low) or 1.0
    scaled: np.ndarray = np.nan_to_num(x * (255 / top)).round().astype(np.uint8)
    return scaled
