"""Checks images and vectors by decoding them in full, so that training never meets a damaged one."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from typing import Literal

from PIL import Image, UnidentifiedImageError

from shards.item import Item, ShardError
from shards.photo import FORMATS, open_photo
from shards.vector import decoded, is_vector

QUALITY = 95  # of a JPEG that was made smaller


@dataclass(frozen=True)
class Picture:
    data: bytes
    suffix: Literal["jpg", "png", "npy"]
    converted: bool = False


def check(data: bytes, resize: int | None = None) -> Picture:
    """The image as shards store it; ShardError says in a few words what is wrong with it.

    The format follows from the content, not from the file's name. JPEG and PNG keep their bytes, all
    other formats are converted to PNG. resize: the largest short side; a larger image is made smaller, a
    JPEG as a JPEG. A vector of features keeps its bytes.
    """
    if is_vector(data):
        decoded(data)
        return Picture(data, "npy")
    try:
        with warnings.catch_warnings():
            # between one and two times its limit Pillow only warns
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            photo = open_photo(data)
            image, is_jpeg = photo.whole(), photo.image.format in ("JPEG", "MPO")
            if resize and min(image.size) > resize:
                return encoded(shrunk(image, resize), "jpg" if is_jpeg else "png")
            if is_jpeg:
                return Picture(data, "jpg")
            return Picture(data, "png") if photo.image.format == "PNG" else encoded(image, "png")
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        limit = f"{Image.MAX_IMAGE_PIXELS:,} pixels"
        raise ShardError(f"is a decompression bomb (more than {limit})") from None
    except UnidentifiedImageError:
        raise ShardError(f"is not an image ({', '.join(FORMATS)})") from None
    # decoders raise many kinds of errors on damaged bytes: OSError, SyntaxError, struct.error, ...
    except Exception as error:  # noqa: BLE001
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ShardError(f"is a damaged image ({reason})") from None


def shrunk(image: Image.Image, side: int) -> Image.Image:
    """The image with a short side of `side` pixels."""
    scale = side / min(image.size)
    w, h = (max(side, round(scale * each)) for each in image.size)
    return image.resize((w, h), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, suffix: Literal["jpg", "png"]) -> Picture:
    file = io.BytesIO()
    if suffix == "jpg":
        image.save(file, "JPEG", quality=QUALITY, subsampling=0)
    else:
        image.save(file, "PNG")
    return Picture(file.getvalue(), suffix, converted=True)


def load(item: Item, resize: int | None = None) -> Picture | str:
    """The item's image, or a text that says what is wrong; a worker process can return both."""
    try:
        return check(item.encoded(), resize)
    except ShardError as error:
        return str(error)
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
