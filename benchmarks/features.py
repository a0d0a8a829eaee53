"""Features as data: vectors from shards against a bare copy, and the step of a linear head.

    python benchmarks/features.py [--vectors 65536] [--sizes 4096 16384 65536]

Packs random vectors of 1,280 numbers, four per class, into shards, and reads batches of the first size from
them. The bare copies are one of the finished batches, which are contiguous in memory, and one of the
same vectors out of a matrix that holds all of them. A step reads a batch, embeds it by one linear layer
(1,280 to 512), and computes the loss, its gradient and Adam's update; with pytorch-metric-learning the same,
except for the loss. That is not run beyond the first size: its pair lists grow as m^2. Linux only:
memory is read from /proc.
"""

import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from measure import (
    MIB,
    Row,
    as_in_training,
    compared,
    duration,
    extra_memory,
    finish,
    interleaved,
    number,
    parser,
    timed,
)
from torch import Tensor, nn
from torch.nn.functional import normalize

from dml.data.batches import Batches, TrainBatches
from dml.data.loader import loader
from dml.data.vectors import Features
from dml.gpw import GlobalPairLoss, make_loss
from shards.images import Picture
from shards.index import Index, load_index
from shards.pack import Packer
from shards.sources.features import VectorItem
from shards.vector import encoded

PER_CLASS, EMBEDDING = 4, 512
SHARED = 3.0  # how large the mean is
COPY_GOAL, STEP_GOAL = ">= 0.8", "<= 0.2"  # of the speed of a copy; of the time of the peer
MS = {"alpha": 2.0, "beta": 40.0, "lam": 0.5, "eps": 0.1}


def matrix(count: int, size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Classes around centres, not negative and with a mean that all of them share, as the features of a
    network are: EfficientNet-Lite0's of Cars-196 have 48% zeros, and behind a random head 95% of their
    negatives are mined. Here these are 49% and 99%."""
    rng = np.random.default_rng(0)
    X = np.repeat(rng.standard_normal((count // PER_CLASS, size), np.float32), PER_CLASS, axis=0)
    X += rng.standard_normal(X.shape, np.float32)
    X += SHARED * rng.standard_normal(size, np.float32)
    np.maximum(X, 0, out=X)
    return X


def pack(X: np.ndarray[tuple[int, ...], np.dtype[np.float32]], folder: Path) -> Index:
    packer = Packer(folder, 256 * MIB)
    for row, vector in enumerate(X):
        name = str(row // PER_CLASS)
        item = VectorItem(split="train", class_name=name, name=str(row), path=folder, row=row)
        packer.add(item, Picture(encoded(vector), "npy"))
    packer.finish("features", [], [])
    return load_index(folder)


def batches_of(index: Index, m: int, size: int) -> TrainBatches:
    rows, labels = index.positions("train"), index.labels("train")
    return TrainBatches(index, Batches(rows, labels, m // PER_CLASS, PER_CLASS, 0), Features(size))


def endless(batches: TrainBatches) -> Iterator[tuple[Tensor, Tensor]]:
    return loader(batches, range(10**6))


def reading(
    index: Index, X: np.ndarray[tuple[int, ...], np.dtype[np.float32]], m: int, repeats: int
) -> list[Row]:
    batches, whole = batches_of(index, m, X.shape[1]), torch.from_numpy(X)
    epoch = len(X) // m
    for step in range(epoch):  # every vector is checked once
        batches[step]
    rows = [torch.from_numpy(batches.batches(step)[0]) for step in range(epoch)]
    copies = [whole[own] for own in rows]
    coming, turn, other = endless(batches), cycle(copies), cycle(rows)
    seconds = interleaved(
        {
            "ours": lambda: next(coming),
            "copy": lambda: next(turn).clone(),
            "rows": lambda: whole[next(other)],
        },
        repeats,
    )
    value = f"{number(m / statistics.median(seconds['ours']))} vectors/s"
    found = []
    for name, against, goal in (
        ("copy", "a copy of the finished batch", ""),
        ("rows", "a copy of the same vectors from one matrix", COPY_GOAL),
    ):
        ratios = [a / b for a, b in zip(seconds[name], seconds["ours"], strict=True)]
        what = f"batches of {m:,} vectors of {X.shape[1]:,} numbers"
        found.append(compared("features", what, value, against, ratios, goal))
    return found


def ours() -> Callable[[Tensor, Tensor], Tensor]:
    return GlobalPairLoss(make_loss("multi_similarity", **MS))


def theirs() -> Callable[[Tensor, Tensor], Tensor]:
    from pytorch_metric_learning.losses import MultiSimilarityLoss
    from pytorch_metric_learning.miners import MultiSimilarityMiner

    miner = MultiSimilarityMiner(epsilon=MS["eps"])
    loss = MultiSimilarityLoss(alpha=MS["alpha"], beta=MS["beta"], base=MS["lam"])
    return lambda x, labels: loss(x, labels, miner(x, labels))


def step_of(
    index: Index, size: int, m: int, loss: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[], None]:
    """One training step of a linear head, and the next one with every call."""
    torch.manual_seed(0)
    head, coming = nn.Linear(size, EMBEDDING), endless(batches_of(index, m, size))
    optimizer = torch.optim.Adam(head.parameters(), 1e-4)

    def step() -> None:
        vectors, labels = next(coming)
        loss(normalize(head(vectors)), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def stepping(index: Index, size: int, sizes: list[int], repeats: int) -> list[Row]:
    first, *larger = sizes
    work = {
        name: step_of(index, size, first, make())
        for name, make in (("ours", ours), ("theirs", theirs))
    }
    # first: later on, memory that was freed is used again
    memory = {name: extra_memory(step) for name, step in work.items()}
    seconds = interleaved(work, repeats)
    peer = f"pytorch-metric-learning {version('pytorch-metric-learning')}"
    what = f"step of a linear head, {size:,} to {EMBEDDING}, m = {first:,}"
    rows = [timed("features", what, seconds["ours"], peer, seconds["theirs"], STEP_GOAL)]
    value = f"{number(memory['ours'] / MIB)} MiB"
    rows.append(
        compared(
            "features",
            f"memory of it, m = {first:,}",
            value,
            peer,
            [memory["ours"] / memory["theirs"]],
        )
    )
    for m in larger:
        step, took = step_of(index, size, m, ours()), list[float]()
        batch = 4 * m * (size + EMBEDDING)
        extra = extra_memory(
            lambda step=step, took=took: took.extend(interleaved({"": step}, 1, 0)[""])
        )
        what = f"memory of a step, m = {m:,}, in {duration(took[0])}"
        against = f"the batch and its embeddings, {number(batch / MIB)} MiB"
        rows.append(
            compared("features", what, f"{number(extra / MIB)} MiB", against, [extra / batch])
        )
    return rows


def main() -> int:
    parse = parser(__doc__)
    parse.add_argument("--vectors", type=int, default=65_536, help="default: %(default)s")
    parse.add_argument(
        "--numbers", type=int, default=1_280, help="per vector (default: %(default)s)"
    )
    parse.add_argument("--sizes", type=int, nargs="+", default=[4_096, 16_384, 65_536], help="of m")
    parse.add_argument("--repeats", type=int, default=15, help="default: %(default)s")
    args = parse.parse_args()
    as_in_training()
    with tempfile.TemporaryDirectory() as folder:
        X = matrix(args.vectors, args.numbers)
        index = pack(X, Path(folder))
        rows = reading(index, X, args.sizes[0], 4 * args.repeats)
        del X
        rows += stepping(index, args.numbers, args.sizes, max(1, args.repeats // 3))
    return finish(rows, args.json)


if __name__ == "__main__":
    sys.exit(main())
