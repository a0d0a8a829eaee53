"""The training loader against the bare decoder, and random access against a sequential read.

    python benchmarks/loader.py SHARDS [--size 96] [--images 3200]

SHARDS is a folder made by shards/build.py. The limit is one thread that decodes the same images from
memory with Pillow and resizes a crop of each to an array, without files, randomness, flips or batches.
Cores differ in what else they have to do, so a single worker runs on the same core as the limit (Linux)
and the process that takes its batches on another; two workers use two cores. Random access reads the
images of the batches at their offsets; it is compared with the same images in the order of the tar, and
with the tar as a stream. The limit is measured before and after each loader, because the speed of a
machine drifts. A new worker is slower for about twenty batches, while it copies memory pages that it
shares with the process it was forked from; forty batches pass before it is timed.
The goals hold for Cars-196, which has photographs; other shards have none.
"""

import argparse
import io
import os
import statistics
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from measure import Row, compared, finish, interleaved, number, parser, timed
from numpy.typing import NDArray
from PIL import Image

from dml.data.batches import Batches, TrainBatches
from dml.data.deck import mix, uniforms
from dml.data.loader import loader
from dml.data.preprocessing import NUMBERS, Input, random_box
from shards.index import ImageReader, load_index

GOALS_OF = "cars196"
AT_LEAST = ">= 0.9"  # of the limit, one worker
AT_MOST = "<= 1.05"  # random access against the stream
CLASSES, PER_CLASS = 16, 5
LOADERS = ("no worker", "one worker", "two workers")  # by number of workers


class Images:
    """The images of the first batches, and the ways to read or decode them that are timed."""

    def __init__(self, shards: Path, size: int, images: int) -> None:
        self.index = load_index(shards)
        labels = self.index.labels("train")
        self.batches = Batches(self.index.positions("train"), labels, CLASSES, PER_CLASS, seed=0)
        self.steps = images // (CLASSES * PER_CLASS)
        self.rows = np.concatenate([self.batches(step)[0] for step in range(self.steps)])
        self.reader = ImageReader(self.index)
        self.encoded = [self.reader.read(int(row)) for row in self.rows]
        self.spec = Input(size=size, resize=size)
        self.boxes = [
            random_box(*Image.open(io.BytesIO(data)).size, iter(uniforms(NUMBERS, mix(i))))
            for i, data in enumerate(self.encoded)
        ]
        self.cores = sorted(os.sched_getaffinity(0))

    def decode(self) -> None:
        """The limit."""
        os.sched_setaffinity(0, self.cores[-1:])
        size = (self.spec.size, self.spec.size)
        for data, box in zip(self.encoded, self.boxes, strict=True):
            image = Image.open(io.BytesIO(data)).convert("RGB")
            np.asarray(image.resize(size, Image.Resampling.BILINEAR, box))

    def load(self, workers: int) -> float:
        """Seconds of the loader for all images, after its warm-up."""
        first = 5 + 40 * workers
        os.sched_setaffinity(0, self.cores[-1:] if workers < 2 else self.cores)
        batches = TrainBatches(self.index, self.batches, self.spec)
        start = 0.0
        for n, _ in enumerate(loader(batches, range(first + self.steps), workers), 1):
            if n == 1 and workers:
                os.sched_setaffinity(0, self.cores)  # of this process; the workers keep theirs
            if n == first:
                start = time.perf_counter()
        return time.perf_counter() - start

    def read(self, rows: NDArray[np.int64]) -> None:
        for row in rows:
            self.reader.read(int(row))

    def stream(self) -> None:
        """Read the tars from end to end and take the same images, as a streaming loader does."""
        wanted = set(self.rows.tolist())
        for shard in self.index.shards:
            with tarfile.open(shard, "r|") as tar:
                for member in tar:
                    key, kind = member.name.split(".")
                    if kind in ("jpg", "png") and int(key) in wanted:
                        tar.extractfile(member).read()  # type: ignore[union-attr]


def rows_of(images: Images, repeats: int) -> list[Row]:
    loaded: dict[str, list[float]] = {name: [] for name in LOADERS}
    work: dict[str, Callable[[], object]] = {"bare": images.decode}
    for workers, name in enumerate(LOADERS):
        work[name] = lambda n=workers, name=name: loaded[name].append(images.load(n))
        work[f"bare after {name}"] = images.decode
    in_order = np.sort(images.rows)
    work["random access"] = lambda: images.read(images.rows)
    work["in tar order"] = lambda: images.read(in_order)
    work["tar stream"] = images.stream
    seconds = interleaved(work, repeats)

    source = images.index.manifest["source"]
    goals, names = source == GOALS_OF, list(work)
    found: list[Row] = []
    for name, times in loaded.items():
        took = times[1:]  # without the warm-up
        around = [seconds[names[names.index(name) + step]] for step in (-1, 1)]
        ratios = [(a + b) / 2 / t for a, b, t in zip(*around, took, strict=True)]
        what = f"{name}, {source} at {images.spec.size} px"
        value = f"{number(len(images.rows) / statistics.median(took))} images/s"
        goal = AT_LEAST * (goals and name == "one worker")
        found.append(compared("loader", what, value, "the decoder", ratios, goal))
    for name, goal in (("tar stream", AT_MOST * goals), ("in tar order", "")):
        own = seconds["random access"]
        found.append(timed("loader", f"random access, {source}", own, name, seconds[name], goal))
    return found


def arguments() -> argparse.Namespace:
    parse = parser(__doc__)
    parse.add_argument("shards", type=Path, help="a folder made by shards/build.py")
    parse.add_argument("--size", type=int, default=96, help="pixels (default: %(default)s)")
    parse.add_argument("--images", type=int, default=3200, help="default: %(default)s")
    parse.add_argument("--repeats", type=int, default=15, help="default: %(default)s")
    return parse.parse_args()


def main() -> int:
    args = arguments()
    torch.set_num_threads(1)
    images = Images(args.shards, args.size, args.images)
    return finish(rows_of(images, args.repeats), args.json)


if __name__ == "__main__":
    sys.exit(main())
