"""The folder that a browser opens, without a server and without a request to anywhere.

DIR/
    index.html look.css *.js      the page, the same for every run
    data.js                       what is shown: arrays in base64, names
    sheets/0.webp ...             thumbnails
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dml.inference.whole_folder import replace_folder
from dml.look.copies import Copy
from dml.look.findings import Findings
from dml.look.images import Gallery
from dml.look.sheets import ACROSS, THUMB

STATIC = Path(__file__).parent / "page"
DATA = "data.js"
MARK = "<!-- dml look -->"  # in every page that this program wrote
SCALE = 10_000  # similarities are whole numbers of 1 / SCALE


@dataclass(frozen=True, eq=False)
class Looked:
    """What a page says about one run."""

    name: str
    found: Findings
    copies: Sequence[Copy]
    map: NDArray[np.float32]  # images x 2, within 0 and 1


def packed(array: NDArray[Any], kind: str) -> str:
    """An array as base64, in the byte order of browsers."""
    return base64.b64encode(np.ascontiguousarray(array).astype(f"<{kind}").tobytes()).decode()


def about_run(looked: Looked) -> dict[str, Any]:
    found = looked.found
    return {
        "name": looked.name,
        "scores": found.scores,
        "places": packed(found.places, "i4"),
        "similarities": packed((found.similarities * SCALE).round(), "i2"),
        "ahead": packed(found.ahead, "i4"),
        "own": packed(found.own, "i4"),
        "ownSimilarity": packed((found.own_similarity * SCALE).round(), "i2"),
        "map": packed((looked.map * 65535).round(), "u2"),
        "confused": [[*each.classes, each.count, each.examples] for each in found.confused],
        "suspects": [[s.query, s.other, round(s.suspicion, 4)] for s in found.suspects],
        "copies": [[*copy.images, round(copy.correlation, 4)] for copy in looked.copies],
    }


def data_of(
    gallery: Gallery, extra: Sequence[int], thumbnails: int, runs: Sequence[Looked]
) -> dict[str, Any]:
    """extra: numbers of `gallery.others` that are shown as well, after the images."""
    others = [gallery.others[i] for i in extra]
    class_names = list(gallery.class_names)
    number = {name: i for i, name in enumerate(class_names)}
    labels = gallery.labels.tolist()
    for entry, _ in others:
        labels.append(number.setdefault(entry.class_name or "", len(number)))
    return {
        "split": gallery.split,
        "images": len(gallery.entries),
        "queries": gallery.queries,
        "neighbours": runs[0].found.places.shape[1],
        "scale": SCALE,
        "classes": list(number),
        "labels": packed(np.array(labels), "i4"),
        "names": [e.image for e in gallery.entries] + [e.image for e, _ in others],
        "otherSplits": [split for _, split in others],
        "thumb": THUMB,
        "across": ACROSS,
        "thumbnails": thumbnails,
        "runs": [about_run(run) for run in runs],
    }


def files_of(data: Mapping[str, Any], sheets: Sequence[bytes]) -> Iterator[tuple[str, bytes]]:
    for path in sorted(STATIC.iterdir()):
        yield path.name, path.read_bytes()
    yield DATA, b"const DATA = " + json.dumps(data, separators=(",", ":")).encode() + b";\n"
    for i, sheet in enumerate(sheets):
        yield f"sheets/{i}.webp", sheet


def is_page(folder: Path) -> bool:
    try:
        return MARK in (folder / "index.html").read_text()
    except (OSError, UnicodeDecodeError):
        return False


def write_page(folder: Path, data: Mapping[str, Any], sheets: Sequence[bytes]) -> None:
    """Write the page whole, or leave what is there. Files are not synced one by one, which would take a
    second per 300 sheets: a page that a power cut damages is made again."""
    replace_folder(folder, files_of(data, sheets), synced=False)
