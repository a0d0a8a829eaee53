"""Small images, and datasets of them, for the tests of shards."""

import io

import numpy as np
from PIL import Image


def encode(seed, kind="JPEG", mode="RGB", size=(20, 16)):
    """The file of a random image."""
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, kind)
    return file.getvalue()


def pixels(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def put(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)


def make_folder(root, classes=3, images=4, splits=("train", "test")):
    """root/split/class/image; query and gallery share their classes, train and test do not."""
    for s, split in enumerate(splits):
        for c in range(classes):
            name = f"class{c}" if split in ("query", "gallery") else f"{split}{c}"
            for i in range(images):
                kind = "JPEG" if i % 2 else "PNG"
                seed = s * 1000 + c * 100 + i
                put(root / split / name / f"{i}.{kind.lower()}", encode(seed, kind))
    return root
