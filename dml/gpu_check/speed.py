"""Seconds against the bare limit: the loss, a training step, an all-gather."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dml.catalogue import PRESETS
from dml.config import Data, Model, Optim
from dml.distributed.collectives import Wire
from dml.distributed.precision import full_precision
from dml.gpu_check.exact import batch
from dml.gpu_check.place import Place, Sizes
from dml.gpu_check.verdict import OK, SKIPPED, SLOW, Line
from dml.gpw import GlobalPairLoss, make_loss
from dml.models import make_model
from dml.optim import make_optimizer
from dml.step import backward, update

LOSS_GOAL, TRAINING_GOAL, GATHER_GOAL = 1.5, 0.95, 0.8
EMBEDDINGS_MB = 2.0  # 1,000 embeddings of 512 dimensions
STRIP = 8_192  # rows of S that the bare products hold at a time


def seconds(
    functions: Mapping[str, Callable[[], Any]], device: torch.device, repeats: int
) -> dict[str, float]:
    """The median seconds of each, taken in turns so that all see the same machine."""
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for n in range(repeats + 3):
        for name, function in functions.items():
            synchronize(device)
            start = time.perf_counter()
            function()
            synchronize(device)
            if n >= 3:  # the first ones choose algorithms and fill caches
                taken[name].append(time.perf_counter() - start)
    return {name: median(each) for name, each in taken.items()}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def below(name: str, ratio: float, goal: float, text: str, **figures: Any) -> Line:
    return Line(
        name, OK if ratio <= goal else SLOW, text, {**figures, "ratio": ratio, "goal": goal}
    )


def above(name: str, ratio: float, goal: float, text: str, **figures: Any) -> Line:
    return Line(
        name, OK if ratio >= goal else SLOW, text, {**figures, "ratio": ratio, "goal": goal}
    )


# ---- the loss --------------------------------------------------------------------------------------


def loss_speed(device: torch.device, sizes: Sizes) -> Iterator[Line]:
    """Value and gradient against the two products that no engine can do without: X X^T and G X."""
    for m in sizes.speed_rows:
        X, y = batch(m, sizes.speed_dimensions, max(2, m // 5))
        x, labels = X.float().to(device), y.to(device)
        for preset in PRESETS:
            yield loss_line(x, labels, preset, sizes.repeats if m < 20_000 else 3)


def loss_line(x: Tensor, labels: Tensor, preset: str, repeats: int) -> Line:
    loss_fn = GlobalPairLoss(make_loss("multi_similarity", **PRESETS[preset]))
    (m, d), trained = x.shape, x.clone().requires_grad_()

    def loss() -> None:
        loss_fn(trained, labels).backward()

    def products() -> None:
        with full_precision(x.device):
            for first in range(0, m, STRIP):
                S = x[first : first + STRIP] @ x.T
                S @ x

    found = seconds({"loss": loss, "products": products}, x.device, repeats)
    ratio, tflops = found["loss"] / found["products"], 4 * m * m * d / found["products"] / 1e12
    text = f"{ratio:.2f} x two products, {1e3 * found['loss']:.2f} ms ({tflops:.1f} TFLOP/s bare)"
    return below(f"loss of {m:,}, {preset}", ratio, LOSS_GOAL, text, **found)


# ---- a training step -------------------------------------------------------------------------------


class Step:
    """A step of a model with random weights on images in the device's memory."""

    def __init__(self, place: Place) -> None:
        sizes, self.place = place.sizes, place
        chosen = Model(backbone=sizes.backbone, embedding_size=128)
        data = Data(dataset="folder", shards="none", size=sizes.pixels, resize=sizes.pixels)
        raw: Any = make_model(chosen, data, seed=0)
        raw.to(memory_format=torch.channels_last)  # as training does
        optimizer = make_optimizer(Optim(), raw)
        model, self.optimizer = place.accelerator.prepare(raw, optimizer)
        self.model: Any = model
        m, shape = sizes.images * place.size, (sizes.pixels, sizes.pixels, 3)
        generator = torch.Generator().manual_seed(place.rank)
        images = torch.randint(256, (sizes.images, *shape), dtype=torch.uint8, generator=generator)
        self.images = images.to(place.device)
        self.all_labels = torch.arange(m) // min(4, m // 2)
        self.labels = place.own(self.all_labels)
        self.loss_fn = GlobalPairLoss(make_loss("multi_similarity"))

    def update(self) -> None:
        given = self.model, self.loss_fn, self.optimizer, self.images, self.labels
        update(self.place.accelerator, *given, all_labels=self.all_labels)

    def backward(self) -> None:
        given = self.model, self.loss_fn, self.images, self.labels
        backward(self.place.accelerator, *given, all_labels=self.all_labels)


def training_speed(place: Place) -> Iterator[Line]:
    """Images per second of a step, against forward and backward of the bare model in its fastest
    layout, on one process, without loss, optimizer or reduction."""
    sizes, device = place.sizes, place.device
    step = Step(place)
    chosen = Model(backbone=sizes.backbone, embedding_size=128)
    data = Data(dataset="folder", shards="none", size=sizes.pixels, resize=sizes.pixels)
    model = make_model(chosen, data, seed=0).to(device)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    precision = "bf16" if place.accelerator.mixed_precision == "bf16" else "fp32"
    autocast = torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()

    def bare() -> None:
        with autocast:
            out = model(step.images)
        out.sum().backward()
        model.zero_grad()

    found = seconds({"step": step.update, "bare": bare}, device, sizes.repeats)
    ratio, speed = found["bare"] / found["step"], sizes.images * place.size / found["step"]
    name = f"{sizes.backbone} {precision}, {place.size} processes"
    text = f"{speed:,.0f} images/s, {ratio:.2f} of the bare model"
    yield above(name, ratio, TRAINING_GOAL, text, images_per_second=speed, **found)


# ---- an all-gather ---------------------------------------------------------------------------------


def gather_speed(place: Place) -> Iterator[Line]:
    """The gather of the loss, and of a large tensor, against one all-gather of torch."""
    if place.size == 1:
        yield Line("all-gather", SKIPPED, "one process has nothing to send")
        return
    wire = Wire()
    for mb in (EMBEDDINGS_MB, place.sizes.gathered_mb):
        x = torch.randn(int(mb * 2**18), device=place.device)
        everyone = x.new_empty(place.size * len(x))

        def plain(x: Tensor = x, everyone: Tensor = everyone) -> None:
            dist.all_gather_into_tensor(everyone, x)

        def ours(x: Tensor = x) -> None:
            wire.gather(x)

        found = seconds({"plain": plain, "ours": ours}, place.device, place.sizes.repeats)
        ratio = found["plain"] / found["ours"]
        gbs = (place.size - 1) * mb * 2**20 / found["ours"] / 1e9
        text = f"{gbs:.1f} GB/s per process, {ratio:.2f} of a bare all-gather"
        yield above(f"all-gather of {mb:g} MB", ratio, GATHER_GOAL, text, gb_per_s=gbs, **found)
