"""Small images, and datasets of them, for the tests of shards."""

import atexit
import hashlib
import io
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from shards.index import ROW_1, load_index, manifest_sha256

BUNDLED = Path(__file__).parents[1] / "shards" / "bundled" / "icons-mini"


@cache
def few_icons():
    """The bundled icons with 120 of their 1,000 test images: most of the time of a short run would be
    its last evaluation."""
    folder = Path(tempfile.mkdtemp(prefix="icons-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shards = shutil.copytree(BUNDLED, folder / "icons-mini")
    index = load_index(shards)
    splits = {**index.manifest["splits"], "test": {"classes": 60, "images": 120}}
    put_index(shards, index.rows[: splits["train"]["images"] + 120], splits=splits)
    return shards


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


def reseal(out, **changes):
    """Change the manifest, with a true checksum: only its content can be found wrong."""
    manifest = json.loads((out / "manifest.json").read_text()) | changes
    if manifest["version"] != 1:
        manifest["sha256"] = manifest_sha256(manifest)
    (out / "manifest.json").write_text(json.dumps(manifest))


def put_index(out, data, **changes):
    """Another index.npy, given as rows or as bytes, with true checksums."""
    if not isinstance(data, bytes):
        file = io.BytesIO()
        np.save(file, data)
        data = file.getvalue()
    (out / "index.npy").write_bytes(data)
    reseal(out, index={"sha256": hashlib.sha256(data).hexdigest()}, **changes)


def as_version_1(out):
    """The shards as the first version wrote them."""
    rows = load_index(out).rows
    old = np.empty(len(rows), ROW_1)
    for column in ROW_1.names:
        old[column] = rows[column]
    manifest = json.loads((out / "manifest.json").read_text())
    del manifest["sha256"]
    (out / "manifest.json").write_text(json.dumps(manifest))
    put_index(out, old, version=1)
