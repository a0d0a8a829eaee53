"""How a photo becomes what an exported model takes: in words and numbers, and as a Python file."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from typing import Any

from dml.data.preprocessing import Input
from dml.data.vectors import Features
from shards import photo

FILE = "preprocess.py"
HEAD = '''"""Turn an encoded photo into what the model takes: size x size x 3 uint8 RGB. Needs Pillow and numpy.

image = load_image(open("photo.jpg", "rb").read())
"""

'''
TAIL = '''

SIZE, RESIZE = {size}, {resize}


def load_image(data: bytes) -> np.ndarray:
    """The centre crop of SIZE, after resizing the short side to RESIZE."""
    photo = open_photo(data, SIZE)
    w, h = photo.size
    side = min(w, h) * SIZE / RESIZE
    x, y = (w - side) / 2, (h - side) / 2
    return np.asarray(photo.resized((x, y, x + side, y + side), SIZE))
'''


def source(spec: Input) -> str:
    """A Python file that needs no dml: the project's own reader of photos, and the centre crop."""
    _, _, code = inspect.getsource(photo).split('"""', 2)
    return HEAD + code.lstrip("\n") + TAIL.format(size=spec.size, resize=spec.resize)


def description(spec: Input | Features) -> dict[str, Any]:
    output = "N x d, float32, unit length: similarities are dot products"
    if isinstance(spec, Features):
        what = f"N x {spec.size}, float32: vectors of the encoder whose features it was trained on"
        return {"input": what, "output": output}
    return {
        "input": f"N x {spec.size} x {spec.size} x 3, uint8, RGB",
        "output": output,
        "steps": [
            "decode, turn as EXIF says, convert to 8-bit RGB; transparent parts are white",
            f"take the centred square whose side is {spec.size} / {spec.resize} of the short side",
            f"resize it to {spec.size} x {spec.size}, bilinear with antialiasing (Pillow, box=)",
        ],
        "inside_the_model": "normalisation by mean, std, channels and top",
        "code": FILE,
        **asdict(spec),
    }
