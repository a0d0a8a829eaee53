"""A whole training step against the bare model: how much of the machine's speed is left for training.

    python benchmarks/whole_step.py [--batch 32] [--size 128] [--repeats 11]

The bare model is the backbone and its head, forward and backward, on images that are already there as
floats, in the memory layout that is fastest for it (of images and of weights; each is tried first). The
step is what training does: a batch from the loader with one worker process that decodes the bundled
icons, normalisation, the model, multi-similarity, backward, the norm of the gradient, Adam. Both have two
threads. The worker makes a batch while the next thing is measured, so a repetition is several steps in a
row, after one that is not measured. The ratio is the speed of the step as a fraction of the bare model's.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from accelerate import Accelerator
from measure import Row, as_in_training, compared, duration, finish, parser
from torch import nn
from tqdm import tqdm

from dml.config import Data, Model, Optim
from dml.data.batches import Batches, TrainBatches
from dml.data.loader import loader
from dml.gpw import GlobalPairLoss, make_loss
from dml.models import Embedder, make_model
from dml.optim import make_optimizer
from dml.step import update
from shards.index import load_index

SHARDS = Path(__file__).parents[1] / "shards" / "bundled" / "icons-mini"
BACKBONES = ("efficientnet_lite0", "resnet50")
GOAL = ">= 0.95"
PER_CLASS = 4
IN_A_ROW = 3  # steps
Work = Callable[[], object]


def model_of(backbone: str, size: int) -> Embedder:
    return make_model(
        Model(backbone=backbone), Data(dataset="folder", shards="none", size=size), seed=0
    )


def bare(backbone: str, batch: int, size: int) -> tuple[str, Work]:
    """The fastest layout and a forward and backward pass in it."""
    works, seconds = {}, {}
    for name, layout in {
        "NCHW": torch.contiguous_format,
        "NHWC": torch.channels_last,
    }.items():
        for weights in ("plain weights", "NHWC weights"):
            model = model_of(backbone, size)
            network = nn.Sequential(model.backbone, model.head)
            if weights == "NHWC weights":
                network = network.to(memory_format=torch.channels_last)
            images = torch.randn(batch, 3, size, size).to(memory_format=layout)
            works[f"{name}, {weights}"] = step_of(network, images)
    for name, work in works.items():
        work()
        times = []
        for _ in range(2):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        seconds[name] = min(times)
    best = min(seconds, key=lambda name: seconds[name])
    return best, works[best]


def step_of(network: nn.Module, images: torch.Tensor) -> Work:
    def step() -> None:
        network.zero_grad()
        network(images).sum().backward()

    return step


def whole(backbone: str, batch: int, size: int) -> Work:
    """A step of training."""
    index = load_index(SHARDS)
    labels = index.labels("train")
    deck = Batches(index.positions("train"), labels, batch // PER_CLASS, PER_CLASS, seed=0)
    model = model_of(backbone, size).to(memory_format=torch.channels_last)
    batches = loader(TrainBatches(index, deck, model.spec), range(10**6), workers=1)
    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, make_optimizer(Optim(), model))
    loss_fn = GlobalPairLoss(make_loss("multi_similarity"))
    coming = next(batches)

    def prepare() -> None:
        nonlocal coming
        coming = next(batches)

    def step() -> None:
        images, own = coming
        update(
            accelerator,
            prepared,
            loss_fn,
            optimizer,
            images,
            own,
            all_labels=own,
            meanwhile=prepare,
        )

    return step


def in_a_row(work: Mapping[str, Work], repeats: int) -> dict[str, list[float]]:
    """Seconds per step of every repetition, each of which measures all work."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in tqdm(range(repeats), "whole_step", leave=False):
        for name, step in work.items():
            step()
            start = time.perf_counter()
            for _ in range(IN_A_ROW):
                step()
            seconds[name].append((time.perf_counter() - start) / IN_A_ROW)
    return seconds


def row(backbone: str, batch: int, size: int, repeats: int) -> Row:
    layout, model = bare(backbone, batch, size)
    seconds = in_a_row({"step": whole(backbone, batch, size), "bare": model}, repeats)
    speeds = [b / s for s, b in zip(seconds["step"], seconds["bare"], strict=True)]
    what = f"{backbone}, {batch} images at {size} px"
    value = duration(statistics.median(seconds["step"]))
    return compared("whole_step", what, value, f"the bare model ({layout})", speeds, GOAL)


def main() -> int:
    parse = parser(__doc__)
    parse.add_argument("--batch", type=int, default=32, help="images (default: %(default)s)")
    parse.add_argument("--size", type=int, default=128, help="pixels (default: %(default)s)")
    parse.add_argument("--repeats", type=int, default=11, help="default: %(default)s")
    args = parse.parse_args()
    as_in_training()
    torch.manual_seed(0)
    return finish([row(b, args.batch, args.size, args.repeats) for b in BACKBONES], args.json)


if __name__ == "__main__":
    sys.exit(main())
