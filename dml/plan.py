"""All numbers that follow from a config, the number of processes and the size of the dataset.

python -m dml.plan --config configs/sop_bs1000.yaml --processes 8
python -m dml.plan --config configs/icons_mini.yaml --processes 2 --measure
"""

import argparse
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from dml.catalogue import DATASETS
from dml.config import Config, add_arguments, load
from dml.config.mixing import Mixed, Part, Sizes, dataset_names, mixed, problems_of_parts
from dml.config.remembering import problems_of_memory
from dml.config.sections import Data
from dml.config.towers import problems_of_towers
from dml.cost import (
    MemoryCost,
    costs_of_loss,
    in_units,
    known,
    memory_bytes_sent,
    memory_cost,
)
from dml.errors import ConfigError, in_full
from dml.measuring import measure, measured_rows
from dml.rules import MOST_STEPS, Problem
from shards.cache import Cache
from shards.output import exit_code, program_name
from shards.remote import is_remote

LARGEST_MEMORY = 2**44  # bytes per process: 16 TiB, more than a machine has
ASSUMED_SIZE = 224  # pixels of the side of an image where data.size leaves it to the backbone
ASSUMED_FEATURES = 1024  # numbers in a vector, which only the shards know


@dataclass(frozen=True)
class Plan:
    """None means unknown until the shards give the size of the dataset."""

    batch_size: int
    processes: int
    images_per_process: int
    micro_batches: int
    train_classes: int | None
    validation_classes: int | None
    steps: int
    images: int
    epochs: float | None
    steps_per_epoch: int | None
    loss_bytes_sent: int
    loss_memory: int
    loss_flops: int
    datasets: tuple[Mixed, ...] = ()  # if there are several
    memory: MemoryCost | None = None
    proxy_memory: int | None = None  # if the loss has proxies
    towers: str | None = None  # what y is, if there are two

    def to_dict(self) -> dict[str, Any]:
        """The content of plan.json."""
        optional = ("datasets", "memory", "proxy_memory", "towers")
        return {key: value for key, value in asdict(self).items() if key not in optional or value}

    def __str__(self) -> str:
        return as_rows(self.rows())

    def rows(self) -> dict[str, str]:
        return {
            "batch size": f"{self.batch_size:,} images",
            "processes": f"{self.processes:,}",
            "images per process": f"{self.images_per_process:,}",
            "micro-batches per process": f"{self.micro_batches:,}",
            **({"two towers": f"every image, x, with its y: {self.towers}"} if self.towers else {}),
            "training classes": known(self.train_classes),
            "validation classes": known(self.validation_classes),
            "steps": f"{self.steps:,}",
            "images": f"{self.images:,}",
            "epochs": known(self.epochs),
            "steps per epoch": known(self.steps_per_epoch),
            **{
                f"of {each.name}": f"{each.classes_per_batch:,} classes per batch; each image is seen "
                f"{each.times_seen:,.2f} times on average"
                for each in self.datasets
            },
            "sent for the loss": f"{in_units(self.loss_bytes_sent)} per process and step"
            " (the reduction of the model's gradient is not included)",
            "memory of the loss": f"{in_units(self.loss_memory)} per process",
            **self.proxy_rows(),
            "work of the loss": f"{self.loss_flops / 1e9:,.3g} GFLOP per process and step",
            **({"cross-batch memory": str(self.memory)} if self.memory else {}),
        }

    def proxy_rows(self) -> dict[str, str]:
        if self.proxy_memory is None:
            return {}
        return {
            "memory of the proxies": f"{in_units(self.proxy_memory)} per process, with gradient and "
            "optimizer; none is sent"
        }


def as_rows(rows: Mapping[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def plan(
    config: Config,
    processes: int = 1,
    train_classes: int | None = None,
    train_images: int | None = None,
    parts: Sequence[Part] = (),
) -> Plan:
    """The plan of a config, or ConfigError with every problem. The sizes of the training split default
    to those of the catalogue. parts: the datasets, if their sizes are known."""
    dataset, share = DATASETS[config.data.dataset], config.eval.validation_classes
    several = len(config.data.folders) > 1
    published = (None, None) if several else (dataset.train_classes, dataset.train_images)
    classes = published[0] if train_classes is None else train_classes
    images = published[1] if train_images is None else train_images
    held_out = None if classes is None else round(share * classes)
    if several and parts:
        held_out = sum(part.held_out(share) for part in parts)
    problems = list(_problems(config, processes, classes, images, held_out))
    problems += problems_of_parts(config, parts) if several else []
    where = f"the plan of {config.run.name} for {processes} process{'es' * (processes != 1)}"
    if problems:
        raise ConfigError(problems, where)

    m = config.batch.classes * config.batch.per_class
    b = m // processes
    if classes and images and held_out:
        # Held-out classes are assumed to have average size, so that an epoch is the same number on a
        # login node, which knows only the catalogue, as in training.
        images = round(images * (classes - held_out) / classes)
    length = config.length
    if length.steps is not None:
        steps = length.steps
    elif length.images is not None:
        steps = math.ceil(length.images / m)
    else:
        assert length.epochs is not None
        assert images is not None
        # the decimal as written: 1.1 in binary is slightly more and would add a step
        steps = math.ceil(Fraction(str(length.epochs)) * images / m)
    if found := list(problems_of_memory(config.memory, config.loss.name, m, steps)):
        raise ConfigError(found, where)
    if steps > MOST_STEPS:
        problem = Problem("length", None, f"{steps:,} steps are too many", "train for less")
        raise ConfigError([problem], where)
    return Plan(
        batch_size=m,
        processes=processes,
        images_per_process=b,
        micro_batches=math.ceil(b / (config.engine.micro_batch or b)),
        train_classes=None if classes is None or held_out is None else classes - held_out,
        validation_classes=held_out,
        steps=steps,
        images=steps * m,
        epochs=steps * m / images if images else None,
        steps_per_epoch=math.ceil(images / m) if images else None,
        datasets=tuple(mixed(config, steps, parts)) if several else (),
        memory=memory_of(config, processes),
        towers=config.towers.y,
        **costs_of(config, processes, classes, held_out),
    )


def costs_of(
    config: Config, processes: int, classes: int | None, held_out: int | None
) -> dict[str, Any]:
    """What the loss costs. Of unknown classes, only those of a batch are counted."""
    batch, d, tile = config.batch, config.model.embedding_size, config.engine.tile
    n = batch.classes if classes is None else classes - (held_out or 0)
    m = batch.classes * batch.per_class
    towers = config.towers.y is not None
    return costs_of_loss(config.loss.name, m, d, processes, tile, n, config.optim.name, towers)


def memory_of(config: Config, processes: int) -> MemoryCost | None:
    size, start, d = config.memory.size, config.memory.from_step, config.model.embedding_size
    if size is None:
        return None
    b = -(-config.batch.classes * config.batch.per_class // processes)
    sent = memory_bytes_sent(config.loss.name, config.loss.parameters, processes)
    return memory_cost(size, start, b, d, config.engine.tile, sent)


def _problems(
    config: Config, processes: int, classes: int | None, images: int | None, held_out: int | None
) -> Iterator[Problem]:
    if processes < 1:
        yield Problem("processes", processes, "must be at least 1", "for example --processes 8")
        return
    batch, engine, batchnorm = config.batch, config.engine, config.model.batchnorm
    m = batch.classes * batch.per_class
    if m % processes:
        stride = processes // math.gcd(processes, batch.per_class)
        below = batch.classes // stride * stride
        near = " or ".join(f"batch.classes={n}" for n in (below, below + stride) if n >= 2)
        text = f"{m} images are not divisible by {processes} processes"
        yield Problem("batch.classes", batch.classes, text, f"set {near}")
    if classes is not None and held_out is not None:
        share = config.eval.validation_classes
        if share and not 2 <= held_out <= classes - 2:
            text = f"holds out {held_out} of {classes} classes; both parts need at least 2"
            yield Problem("eval.validation_classes", share, text, "choose another share")
        elif batch.classes > classes - held_out:
            text = f"only {classes - held_out} classes to train on"
            fix = f"set batch.classes to at most {classes - held_out}"
            yield Problem("batch.classes", batch.classes, text, fix)
    b = math.ceil(m / processes)
    if engine.micro_batch is not None and engine.micro_batch > b:
        text = f"must not be larger than the {b} images per process"
        fix = f"set engine.micro_batch to at most {b}, or null for no gradient caching"
        yield Problem("engine.micro_batch", engine.micro_batch, text, fix)
    if engine.micro_batch is not None and engine.micro_batch < b and batchnorm != "frozen":
        text = (
            "with more than one micro-batch, BatchNorm would use the statistics of each micro-batch,"
            " not those of the whole batch"
        )
        yield Problem("model.batchnorm", batchnorm, text, "set model.batchnorm=frozen")
    if config.model.checkpointing and batchnorm != "frozen":
        text = (
            "computes activations twice, and BatchNorm would count the statistics of a batch twice"
        )
        fix = "set model.batchnorm=frozen or model.checkpointing=false"
        yield Problem("model.checkpointing", True, text, fix)
    of_others = config.loss.name, config.memory.size, engine.kind, config.eval.frozen
    yield from problems_of_towers(config.towers, *of_others)
    if processes > 1 and batchnorm == "local":
        text = "with several processes, each would normalise with the statistics of its own images"
        fix = "set model.batchnorm=frozen or model.batchnorm=synced"
        yield Problem("model.batchnorm", batchnorm, text, fix)
    size = config.data.size or ASSUMED_SIZE
    batches = 2  # that of this step, and the next one
    sample = 4 * ASSUMED_FEATURES if config.model.backbone == "none" else 3 * size**2
    needed = batches * b * sample * (1 if config.towers.y is None else 2)
    of_loss = costs_of(config, processes, classes, held_out)
    needed += of_loss["loss_memory"] + of_loss.get("proxy_memory", 0)
    if remembered := memory_of(config, processes):
        needed += remembered.bytes
    if needed > LARGEST_MEMORY:
        text = (
            f"the images and the loss need {in_units(needed)} of memory per process, for {batches:,} "
            f"batches of {b:,} images"
        )
        fix = "lower batch.classes, or use more processes"
        yield Problem("batch.classes", batch.classes, text, fix)
    if config.length.epochs is not None and images is None:
        text = f"the size of {config.data.dataset} is unknown until the shards are read"
        fix = "set length.steps or length.images"
        yield Problem("length.epochs", config.length.epochs, text, fix)


def built_sizes(config: Config) -> Sizes:
    """The numbers of training classes and images, if all shards are built already."""
    folders = config.data.folders
    if not all(map(has_shards, folders)):
        return None, None, ()
    from shards.index import read_manifest  # imports numpy, which takes time

    cache = cache_of(config.data)
    splits = [read_manifest(folder, cache)["splits"] for folder in folders]
    if not all("train" in each for each in splits):
        return None, None, ()
    parts = [
        Part(name, each["train"]["classes"], each["train"]["images"])
        for name, each in zip(dataset_names(folders), splits, strict=True)
    ]
    return sum(part.classes for part in parts), sum(part.images for part in parts), parts


def has_shards(shards: str) -> bool:
    """Whether there are shards, or a server that may have them."""
    return is_remote(shards) or os.path.exists(os.path.join(shards, "manifest.json"))


def cache_of(data: Data) -> Cache | None:
    """Where shards that come from a server are kept."""
    if data.cache is None:
        return None
    limit = None if data.cache_gib is None else round(data.cache_gib * 2**30)
    folder = Path(os.path.expanduser(data.cache)).absolute()
    return Cache(folder, limit, ranges=data.remote == "range")


def missing_files(config: Config) -> list[str]:
    """What training would not find, a sentence each."""
    weights, found = config.model.weights, []
    of_y = [] if config.towers.folder is None else [("towers.y", config.towers.folder)]
    for key, shards in (*(("data.shards", each) for each in config.data.folders), *of_y):
        if not has_shards(shards):
            found.append(
                f"{key} = {in_full(shards)}: there are no shards; build them or fix the path"
            )
    if weights not in (None, "pretrained") and not os.path.exists(os.path.expanduser(weights)):
        found.append(f"model.weights = {in_full(weights)}: there is no such file; fix the path")
    return found


def add_processes(parser: argparse.ArgumentParser, about: str, most: int) -> None:
    def count(text: str) -> int:
        if text == "auto":
            return max(1, count_gpus())
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"{text!r} is neither a number from 1 to {most} nor auto"
            )
        return int(text)

    parser.add_argument(
        "--processes",
        type=count,
        default=1,
        metavar="N|auto",
        help=f"{about} (default: 1); auto: one per GPU, or one without GPUs",
    )


def count_gpus() -> int:
    import torch  # here: a plan needs no torch

    return torch.cuda.device_count()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=program_name("python -m dml.plan"),
        description="Check a config and print every number that follows from it.",
    )
    add_arguments(parser)
    add_processes(parser, "how many processes will train", most=100_000)
    parser.add_argument(
        "--measure",
        action="store_true",
        help="make a few steps with N processes on this machine and estimate the time of the run; "
        "nothing is kept",
    )
    arguments = parser.parse_args(argv)
    try:
        config = load(arguments.config, arguments.set)
        found = plan(config, arguments.processes, *built_sizes(config))
        rows = found.rows()
        if arguments.measure:
            speed = measure(arguments.config, arguments.set, found.processes)
            rows |= measured_rows(found.images, found.steps, speed)
        print(as_rows(rows))
    except ValueError as error:  # ConfigError, or ShardError for damaged shards
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
