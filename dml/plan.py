"""All numbers that follow from a config, the number of processes and the size of the dataset.

python -m dml.plan --config configs/sop_bs1000.yaml --processes 8
python -m dml.plan --config configs/icons_mini.yaml --processes 2 --measure
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import Any

from dml.catalogue import DATASETS
from dml.config import Config, add_arguments, load
from dml.config.mixing import Mixed, Part, Sizes, dataset_names, mixed, problems_of_parts
from dml.config.sections import Data
from dml.cost import loss_bytes_sent, loss_flops, loss_memory
from dml.errors import ConfigError, Mistake, in_full
from dml.rules import MOST_STEPS, Problem
from shards.cache import Cache
from shards.output import duration, exit_code, program_name
from shards.remote import is_remote

LARGEST_MEMORY = 2**44  # bytes per process: 16 TiB, more than a machine has
WARM_UP, MEASURED = 2, 6  # steps of --measure: the first ones start the workers
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

    def to_dict(self) -> dict[str, Any]:
        """The content of plan.json."""
        return {key: value for key, value in asdict(self).items() if key != "datasets" or value}

    def __str__(self) -> str:
        return as_rows(self.rows())

    def rows(self) -> dict[str, str]:
        return {
            "batch size": f"{self.batch_size:,} images",
            "processes": f"{self.processes:,}",
            "images per process": f"{self.images_per_process:,}",
            "micro-batches per process": f"{self.micro_batches:,}",
            "training classes": _known(self.train_classes),
            "validation classes": _known(self.validation_classes),
            "steps": f"{self.steps:,}",
            "images": f"{self.images:,}",
            "epochs": _known(self.epochs),
            "steps per epoch": _known(self.steps_per_epoch),
            **{
                f"of {each.name}": f"{each.classes_per_batch:,} classes per batch; each image is seen "
                f"{each.times_seen:,.2f} times on average"
                for each in self.datasets
            },
            "sent for the loss": f"{_size(self.loss_bytes_sent)} per process and step"
            " (the reduction of the model's gradient is not included)",
            "memory of the loss": f"{_size(self.loss_memory)} per process",
            "work of the loss": f"{self.loss_flops / 1e9:,.3g} GFLOP per process and step",
        }


def as_rows(rows: Mapping[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def _known(number: float | None) -> str:
    if number is None:
        return "unknown until the shards are read"
    return f"{number:,}" if isinstance(number, int) else f"{number:,.2f}"


def _size(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:,.1f} {unit}"


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
        loss_bytes_sent=loss_bytes_sent(m, config.model.embedding_size, processes),
        loss_memory=loss_memory(m, config.model.embedding_size, processes, config.engine.tile),
        loss_flops=loss_flops(m, config.model.embedding_size, processes),
        datasets=tuple(mixed(config, steps, parts)) if several else (),
    )


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
    if processes > 1 and batchnorm == "local":
        text = "with several processes, each would normalise with the statistics of its own images"
        fix = "set model.batchnorm=frozen or model.batchnorm=synced"
        yield Problem("model.batchnorm", batchnorm, text, fix)
    size = config.data.size or ASSUMED_SIZE
    batches = 2  # that of this step, and the next one
    sample = 4 * ASSUMED_FEATURES if config.model.backbone == "none" else 3 * size**2
    needed = batches * b * sample
    needed += loss_memory(m, config.model.embedding_size, processes, engine.tile)
    if needed > LARGEST_MEMORY:
        text = (
            f"the images and the loss need {_size(needed)} of memory per process, for {batches:,} "
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
    for shards in config.data.folders:
        if not has_shards(shards):
            found.append(
                f"data.shards = {in_full(shards)}: there are no shards; build them or fix the path"
            )
    if weights not in (None, "pretrained") and not os.path.exists(os.path.expanduser(weights)):
        found.append(f"model.weights = {in_full(weights)}: there is no such file; fix the path")
    return found


def measure(files: Sequence[str], sets: Sequence[str], processes: int) -> float:
    """Images per second of some real steps on this machine, of all processes together. The training
    program makes them, in a folder that is removed afterwards. Mistake if it ends before."""
    program = ["dml.train", "--config", *files, "--set", *sets]
    if processes > 1:
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        program = [*torchrun, "-m", *program]
    with tempfile.TemporaryDirectory(prefix="dml-measure-") as folder:
        steps_alone = ["eval.every_steps=null", "eval.validation_classes=0", "eval.patience=null"]
        steps_alone += [
            "eval.untrained=false",
            "eval.frozen=false",
            "eval.test=true",
            "length.epochs=null",
            "length.images=null",
        ]
        steps_alone += [f"length.steps={MOST_STEPS}", "run.log_steps=1"]
        here = [f"run.dir={json.dumps(folder)}", "run.name=run"]
        log, timing = Path(folder, "log"), Path(folder, "run", "timing.jsonl")
        with log.open("wb") as errors:
            run = subprocess.Popen(
                [sys.executable, "-m", *program, *steps_alone, *here],
                env={**os.environ, "TMPDIR": folder},  # torch leaves files there
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,  # so that all its processes can be ended together
            )
        try:
            while run.poll() is None and len(whole_lines(timing)) < WARM_UP + MEASURED:
                time.sleep(0.2)
        finally:
            end(run)
        said, steps = log.read_text(errors="replace"), whole_lines(timing)
    if len(steps) < WARM_UP + MEASURED:
        own = [line for line in said.splitlines() if line.startswith("dml/train.py: ")]
        why = own[-1].removeprefix("dml/train.py: ") if own else said[-1000:]
        raise Mistake(f"--measure: the training ended after {len(steps)} steps: {why}")
    return float(median(json.loads(step)["images_per_second"] for step in steps[WARM_UP:]))


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file that may still grow; none if there is no file yet."""
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def end(run: "subprocess.Popen[bytes]") -> None:
    """End all processes of a training, by force if it does not leave."""
    if run.poll() is None:
        os.killpg(run.pid, signal.SIGTERM)
    try:
        run.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()


def measured_rows(plan: Plan, speed: float) -> dict[str, str]:
    return {
        "measured": f"{speed:,.1f} images/s on this machine, median of {MEASURED} steps or more",
        "estimated time": f"{duration(plan.images / speed)} for {plan.steps:,} steps, without evaluations",
    }


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
            rows |= measured_rows(found, speed)
        print(as_rows(rows))
    except ValueError as error:  # ConfigError, or ShardError for damaged shards
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
