"""What each of several datasets brings to a run: classes per batch, and how often an image is seen."""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from dml.config.sections import Config
from dml.rules import Problem


@dataclass(frozen=True)
class Part:
    """One of the datasets of a run, with the sizes of its training split."""

    name: str
    classes: int
    images: int

    def held_out(self, share: float) -> int:
        """How many of its classes are held out for validation."""
        return round(share * self.classes)


# training classes, training images, and the datasets they are in
Sizes = tuple[int | None, int | None, Sequence[Part]]


@dataclass(frozen=True)
class Mixed:
    """What a dataset brings to a run of several. times_seen: how often one of its training images is
    seen, on average."""

    name: str
    classes_per_batch: int
    times_seen: float


def share_classes(P: int, weights: Sequence[float]) -> list[int]:
    """How many of the P classes of a batch each dataset brings: in proportion to its weight, rounded by
    largest remainder, so that they add up to P."""
    exact = [P * Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    shares = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: P - sum(shares)]:
        shares[i] += 1
    return shares


def dataset_names(folders: Sequence[str]) -> list[str]:
    """A name for each folder: its last part, or as many as it takes to tell them apart."""
    parts = [os.path.normpath(folder).split(os.sep) for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return list(folders)


def trained(config: Config, part: Part) -> tuple[int, float]:
    """The classes of a dataset that are trained on, and their images, if all classes are alike."""
    classes = part.classes - part.held_out(config.eval.validation_classes)
    return classes, part.images * classes / part.classes


def shares(config: Config, parts: Sequence[Part]) -> list[int]:
    weights = config.data.weights or [trained(config, part)[0] for part in parts]
    return share_classes(config.batch.classes, weights) if parts else []


def mixed(config: Config, steps: int, parts: Sequence[Part]) -> Iterator[Mixed]:
    for part, P in zip(parts, shares(config, parts), strict=True):
        seen = steps * P * config.batch.per_class
        yield Mixed(part.name, P, seen / trained(config, part)[1])


def problems_of_parts(config: Config, parts: Sequence[Part]) -> Iterator[Problem]:
    batch, weights = config.batch, config.data.weights
    for part, P in zip(parts, shares(config, parts), strict=True):
        classes, share = trained(config, part)[0], config.eval.validation_classes
        key, value, fix = "batch.classes", str(batch.classes), "set data.weights"
        if weights is not None:
            key, value, fix = "data.weights", str(list(weights)), "change data.weights"
        if share and not 2 <= classes <= part.classes - 2:
            text = f"leaves {classes} of {part.classes} classes of {part.name} to train on; both parts "
            yield Problem(
                "eval.validation_classes", share, f"{text}need at least 2", "choose another share"
            )
        elif P > classes:
            text = f"{part.name} would bring {P} classes to a batch, but has {classes} to train on"
            yield Problem(key, value, text, f"{fix}, or lower batch.classes")
        elif P == 0:
            text = f"{part.name} would bring none of the {batch.classes} classes of a batch"
            yield Problem(key, value, text, f"{fix}, or raise batch.classes")
