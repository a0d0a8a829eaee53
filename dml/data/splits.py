"""Which images a run trains on, chooses by, and is judged by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dml.config import Config
from dml.data.batches import Batches, Rows, TrainBatches, held_out
from dml.data.preprocessing import Input
from dml.plan import cache_of
from shards.index import Index, load_index


@dataclass(frozen=True)
class Subset:
    """Images by their row in the index, and their labels. As queries they search the gallery; None:
    they search each other."""

    rows: Rows
    labels: Rows
    gallery: Subset | None = None


@dataclass(frozen=True)
class Splits:
    """train: without the classes held out for validation. train_classes and train_images: with them,
    as the plan counts."""

    index: Index
    train: Subset
    validation: Subset
    test: Subset
    train_classes: int
    train_images: int

    @property
    def sizes(self) -> tuple[int, int]:
        return self.train_classes, self.train_images

    @property
    def checksum(self) -> str:
        """The same for the same images."""
        sha256: str = self.index.manifest["index"]["sha256"]
        return sha256


def read_splits(config: Config) -> Splits:
    index = load_index(config.data.shards, cache_of(config.data))
    rows, labels = index.positions("train"), index.labels("train")
    held = held_out(labels, config.eval.validation_classes, config.run.seed)
    return Splits(
        index,
        train=Subset(rows[~held], labels[~held]),
        validation=Subset(rows[held], labels[held]),
        test=of_test_split(index),
        train_classes=len(np.unique(labels)),
        train_images=len(rows),
    )


def of_test_split(index: Index) -> Subset:
    """The test classes; in In-Shop, queries search a gallery."""
    if "query" not in index.splits:
        return Subset(index.positions("test"), index.labels("test"))
    gallery = Subset(index.positions("gallery"), index.labels("gallery"))
    return Subset(index.positions("query"), index.labels("query"), gallery)


def train_batches(
    splits: Splits, config: Config, spec: Input, rank: int, size: int
) -> TrainBatches:
    """This process's slices of the batches of P classes x M images."""
    train, P, M = splits.train, config.batch.classes, config.batch.per_class
    batches = Batches(train.rows, train.labels, P, M, config.run.seed)
    return TrainBatches(splits.index, batches, spec, rank, size)
