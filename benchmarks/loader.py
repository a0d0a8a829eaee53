"""The training loader against the bare decoder, and random access against a sequential read.

    python benchmarks/loader.py SHARDS [--size 96] [--images 1600]

SHARDS is a folder made by shards/build.py. The limit is one thread that decodes the same images,
held in memory, and resizes a crop of each to an array: no file, no randomness, no flip, no batch. A loader with one worker has one core for the same
work, with two workers two. Random access reads the images of the batches at their offsets; beside it, the same images in the
order of the tar, and from the tar as a stream. The limit is measured before each repetition and again
after it: a machine's speed drifts. Medians of these ratios; exits with 1 when one is missed.
"""

import argparse
import io
import statistics
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from dml.data import NUMBERS, Batches, Input, TrainBatches, loader, random_box
from dml.deck import mix, uniforms
from shards.index import ImageReader, load_index

AT_LEAST = 0.9  # of the limit, one worker
AT_MOST = 1.05  # random access against sequential


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shards", type=Path)
    parser.add_argument("--size", type=int, default=96, help="pixels (default: %(default)s)")
    parser.add_argument("--images", type=int, default=1600, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=15, help="default: %(default)s")
    args = parser.parse_args()
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

    def bare() -> None:
        for data, box in zip(memory, boxes, strict=True):
            image = Image.open(io.BytesIO(data)).convert("RGB")
            np.asarray(image.resize((args.size, args.size), Image.Resampling.BILINEAR, box))

    def loading(workers: int) -> float:
        """Seconds for all images once the workers run: the time from one batch to another."""
        first = 5
        own = loader(TrainBatches(index, batches, spec), range(first + steps), workers)
        start = 0.0
        for n, _ in enumerate(own, 1):
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

    work: dict[str, Callable[[], float]] = {
        "bare": lambda: timed(bare),
        "0 workers": lambda: loading(0),
        "1 worker": lambda: loading(1),
        "2 workers": lambda: loading(2),
        "random access": lambda: timed(lambda: read(rows)),
        "in tar order": lambda: timed(lambda: read(in_order)),
        "tar stream": lambda: timed(stream),
    }
    for action in work.values():
        action()  # the page cache is warm for all of them
    seconds: dict[str, list[float]] = {name: [] for name in work}
    ratios: dict[str, list[float]] = {name: [] for name in work if "worker" in name}
    for _ in range(args.repeats):
        for name, action in work.items():
            seconds[name].append(action())
            if name in ratios:
                seconds["bare"].append(work["bare"]())
                limit = (seconds["bare"][-2] + seconds["bare"][-1]) / 2
                ratios[name].append(limit / seconds[name][-1])
    n = len(rows)
    print(f"{n} images at {args.size} px from {args.shards.name}, {args.repeats} repetitions")
    print(f"{'':<15}{'images/s':>10}{'spread':>18}{'of the limit':>14}")
    median = {name: statistics.median(times) for name, times in seconds.items()}
    for name, times in seconds.items():
        spread = f"{n / max(times):,.0f} - {n / min(times):,.0f}"
        ratio = f"{statistics.median(ratios[name]):.2f}" if name in ratios else ""
        print(f"{name:<15}{n / median[name]:>10,.0f}{spread:>18}{ratio:>14}")
    speed = statistics.median(ratios["1 worker"])
    cost = median["random access"] / median["tar stream"]
    ordered = median["random access"] / median["in tar order"]
    print(f"one worker: {speed:.2f} of the limit; random access: {cost:.3f} x the tar as a stream,")
    print(f"{ordered:.2f} x our reads in the order of the tar")
    return int(speed < AT_LEAST or cost > AT_MOST)


if __name__ == "__main__":
    sys.exit(main())
