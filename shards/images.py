"""Checks images by decoding them in full, so that training never meets a damaged one."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from typing import Literal

from PIL import Image, UnidentifiedImageError

from shards.item import Item, ShardError

# Pillow reads many more formats, but starts other programs for some of them (Ghostscript for EPS).
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")


@dataclass(frozen=True)
class Picture:
    data: bytes
    suffix: Literal["jpg", "png"]
    converted: bool = False


def check(data: bytes) -> Picture:
    """The image as shards store it; ShardError says in a few words what is wrong with it.

    The format follows from the content, not from the file's name. JPEG and PNG keep their bytes, all
    other formats are converted to PNG.
    """
    try:
        with warnings.catch_warnings():
            # between one and two times its limit Pillow only warns
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                image.load()
                if image.format in ("JPEG", "MPO"):  # MPO: several JPEGs in one file
                    return Picture(data, "jpg")
                if image.format == "PNG":
                    return Picture(data, "png")
                lossless = io.BytesIO()
                image.save(lossless, "PNG")
                return Picture(lossless.getvalue(), "png", converted=True)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        limit = f"{Image.MAX_IMAGE_PIXELS:,} pixels"
        raise ShardError(f"is a decompression bomb (more than {limit})") from None
    except UnidentifiedImageError:
        raise ShardError(f"is not an image ({', '.join(FORMATS)})") from None
    # decoders raise many kinds of errors on damaged bytes: OSError, SyntaxError, struct.error, ...
    except Exception as error:  # noqa: BLE001
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ShardError(f"is a damaged image ({reason})") from None


def load(item: Item) -> Picture | str:
    """The item's image, or a text that says what is wrong; a worker process can return both."""
    try:
        return check(item.encoded())
    except ShardError as error:
        return str(error)
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
