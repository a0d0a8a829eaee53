"""The training loader against the bare decoder, and random access against a sequential read.

    python benchmarks/loader.py SHARDS [--size 96] [--images 3200]

SHARDS is a folder made by shards/build.py. The limit is one thread that decodes the same images,
held in memory, with Pillow and resizes a crop of each to an array: no file, no randomness, no flip, no batch. A
loader with one worker has that very core for the same work (Linux), as cores differ in what else they
have to do, and the process that takes its batches another; two workers have two. Random access reads the
images of the batches at their offsets, against the same images in the order of the tar, and from the
tar as a stream. The limit is measured before a loader and again after it: a machine's speed drifts.
A new worker is slower for some twenty batches, as it copies page by page what it shares with the process
it was forked from: forty pass before it is timed.
The goals are of Cars-196, photographs; other shards have none.
"""

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


def main() -> int:
    parse = parser(__doc__)
    parse.add_argument("shards", type=Path)
    parse.add_argument("--size", type=int, default=96, help="pixels (default: %(default)s)")
    parse.add_argument("--images", type=int, default=3200, help="default: %(default)s")
    parse.add_argument("--repeats", type=int, default=15, help="default: %(default)s")
    args = parse.parse_args()
    torch.set_num_threads(1)
    index = load_index(args.shards)
    batches = Batches(index.positions("train"), index.labels("train"), 16, 5, seed=0)
    steps = args.images // 80
    rows = np.concatenate([batches(step)[0] for step in range(steps)])
    reader = ImageReader(index)
    memory = [reader.read(int(row)) for row in rows]
    spec = Input(size=args.size, resize=args.size)

    boxes = [
        random_box(*Image.open(io.BytesIO(data)).size, iter(uniforms(NUMBERS, mix(i))))
        for i, data in enumerate(memory)
    ]

    cores = sorted(os.sched_getaffinity(0))

    def bare() -> None:
        os.sched_setaffinity(0, cores[-1:])
        for data, box in zip(memory, boxes, strict=True):
            image = Image.open(io.BytesIO(data)).convert("RGB")
            np.asarray(image.resize((args.size, args.size), Image.Resampling.BILINEAR, box))

    def loading(workers: int) -> float:
        """Seconds for all images once the workers run at their pace: from one batch to another."""
        first = 5 + 40 * workers
        os.sched_setaffinity(0, cores[-1:] if workers < 2 else cores)
        own = loader(TrainBatches(index, batches, spec), range(first + steps), workers)
        start = 0.0
        for n, _ in enumerate(own, 1):
            if n == 1 and workers:
                os.sched_setaffinity(0, cores)  # the workers stay where they are
            if n == first:
                start = time.perf_counter()
        return time.perf_counter() - start

    in_order = np.sort(rows)
    wanted = set(in_order.tolist())

    def read(order: NDArray[np.int64]) -> None:
        for row in order:
            reader.read(int(row))

    def stream() -> None:
        """The tars from end to end, taking the same images, as a streaming loader does."""
        for shard in index.shards:
            with tarfile.open(shard, "r|") as tar:
                for member in tar:
                    key, kind = member.name.split(".")
                    if kind in ("jpg", "png") and int(key) in wanted:
                        tar.extractfile(member).read()  # type: ignore[union-attr]

    loaded: dict[str, list[float]] = {"no worker": [], "one worker": [], "two workers": []}
    work: dict[str, Callable[[], object]] = {"bare": bare}
    for workers, name in enumerate(loaded):
        work[name] = lambda n=workers, name=name: loaded[name].append(loading(n))
        work[f"bare after {name}"] = bare
    work |= {
        "random access": lambda: read(rows),
        "in tar order": lambda: read(in_order),
        "tar stream": stream,
    }
    seconds = interleaved(work, args.repeats)

    source = index.manifest["source"]
    goals = source == GOALS_OF
    where = f"{source} at {args.size} px"
    names = list(work)
    found: list[Row] = []
    for name, times in loaded.items():
        took = times[1:]  # without the warm-up
        around = [seconds[names[names.index(name) + step]] for step in (-1, 1)]
        ratios = [(a + b) / 2 / t for a, b, t in zip(*around, took, strict=True)]
        value = f"{number(len(rows) / statistics.median(took))} images/s"
        goal = AT_LEAST * (goals and name == "one worker")
        found.append(compared("loader", f"{name}, {where}", value, "the decoder", ratios, goal))
    for name, goal in (("tar stream", AT_MOST * goals), ("in tar order", "")):
        own = seconds["random access"]
        found.append(timed("loader", f"random access, {source}", own, name, seconds[name], goal))
    return finish(found, args.json)


if __name__ == "__main__":
    sys.exit(main())
