"""Which images a run trains on, chooses by, and is judged by, of one or several datasets."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from dml.config import Config
from dml.config.mixing import Part, Sizes, dataset_names, share_classes
from dml.data.batches import (
    AUGMENT_Y,
    DATASET,
    Batches,
    Grouping,
    Mixture,
    Rows,
    TrainBatches,
    held_out,
)
from dml.data.deck import mix
from dml.data.pair import PairSpec, Spec
from dml.data.reading import first_rows
from dml.data.towers import PairBatches, read_partner
from dml.data.vectors import Features, features_of
from dml.errors import LaunchError
from dml.plan import cache_of
from shards.index import Index, load_index


@dataclass(frozen=True)
class Subset:
    """Images by their row in the index, and their labels. As queries they search the gallery; None:
    they search each other."""

    index: Index
    rows: Rows
    labels: Rows
    gallery: Subset | None = None


@dataclass(frozen=True)
class Dataset:
    """One folder of shards. train: without the classes held out for validation. part: its name, and
    its sizes with them, as the plan counts."""

    index: Index
    train: Subset
    validation: Subset
    test: Subset
    part: Part


@dataclass(frozen=True)
class Splits:
    """features: what the datasets hold, if they do not hold images. y: the other tower of the only
    dataset, if it has shards of its own; its row i belongs with row i of the dataset."""

    datasets: tuple[Dataset, ...]
    features: Features | None
    y: Index | None = None

    @property
    def y_features(self) -> Features | None:
        return None if self.y is None else features_of([self.y])

    @property
    def indexes(self) -> list[Index]:
        """Of all shards that the run reads."""
        return [*(data.index for data in self.datasets), *([] if self.y is None else [self.y])]

    @property
    def sizes(self) -> Sizes:
        parts = [dataset.part for dataset in self.datasets]
        return sum(part.classes for part in parts), sum(part.images for part in parts), parts

    @property
    def train_labels(self) -> Rows:
        """The classes that are trained on, ascending, by their labels in the batches."""
        each = zip(self.datasets, self.first_labels, strict=True)
        return np.concatenate([np.unique(data.train.labels) + first for data, first in each])

    @property
    def first_labels(self) -> list[int]:
        """Labels are kept apart: those of a dataset follow those of the one before."""
        sizes = [len(data.index.class_names) for data in self.datasets]
        return [sum(sizes[:number]) for number in range(len(sizes))]

    @property
    def checksum(self) -> str:
        """The same for the same images."""
        each: list[str] = [index.manifest["index"]["sha256"] for index in self.indexes]
        return each[0] if len(each) == 1 else hashlib.sha256(" ".join(each).encode()).hexdigest()


def read_splits(config: Config) -> Splits:
    folders = config.data.folders
    cache = cache_of(config.data)
    indexes = [load_index(folder, cache) for folder in folders]
    features = features_of(indexes)
    refuse_other_kind(config, indexes[0], features)
    datasets = [
        read_dataset(config, index, name, number)
        for number, (index, name) in enumerate(zip(indexes, dataset_names(folders), strict=True))
    ]
    return Splits(tuple(datasets), features, read_partner(config.towers, indexes[0], cache))


def refuse_other_kind(config: Config, index: Index, features: Features | None) -> None:
    """LaunchError if the model takes images and the shards have features, or the other way round."""
    backbone = config.model.backbone
    if features is None and backbone == "none":
        raise LaunchError(
            f"model.backbone = none trains on features, but {index.root} has images; set another "
            "model.backbone, or make features with dml/embed.py --features"
        )
    if features is not None and backbone != "none":
        raise LaunchError(
            f"model.backbone = {backbone} takes images, but {index.root} has vectors of "
            f"{features.size:,} numbers; set model.backbone=none"
        )


def read_dataset(config: Config, index: Index, name: str, number: int) -> Dataset:
    rows, labels = index.positions("train"), index.labels("train")
    seed = seed_of(config.run.seed, number)
    held = held_out(labels, config.eval.validation_classes, seed)
    return Dataset(
        index,
        train=Subset(index, rows[~held], labels[~held]),
        validation=Subset(index, rows[held], labels[held]),
        test=of_test_split(index),
        part=Part(name, len(np.unique(labels)), len(rows)),
    )


def seed_of(seed: int, number: int) -> int:
    """The seed of a dataset: the first one has that of the run."""
    return mix(seed, DATASET, number) if number else seed


def of_test_split(index: Index) -> Subset:
    """The test classes; in In-Shop, queries search a gallery."""
    if "query" not in index.splits:
        return Subset(index, index.positions("test"), index.labels("test"))
    gallery = Subset(index, index.positions("gallery"), index.labels("gallery"))
    return Subset(index, index.positions("query"), index.labels("query"), gallery)


def train_batches(splits: Splits, config: Config, spec: Spec, rank: int, size: int) -> TrainBatches:
    """This process's slices of the batches of P classes x M images; of two towers, pairs of them."""
    batch, datasets = config.batch, splits.datasets
    present = [len(np.unique(data.train.labels)) for data in datasets]
    shares = share_classes(batch.classes, config.data.weights or present)
    parts = []
    for number, (data, P, first) in enumerate(
        zip(datasets, shares, splits.first_labels, strict=True)
    ):
        rows, labels = data.train.rows, data.train.labels
        grouping = None
        if batch.group is not None:
            groups = data.index.super_classes("train")
            grouping = Grouping(
                groups[np.searchsorted(data.index.positions("train"), rows)], batch.mixed
            )
        seed = seed_of(config.run.seed, number)
        parts.append(Batches(rows, labels + first, P, batch.per_class, seed, grouping))
    indexes = [data.index for data in datasets]
    dealt = parts[0] if len(parts) == 1 else Mixture(parts, first_rows(indexes), config.run.seed)
    towers = config.towers
    if towers.y is None:
        assert not isinstance(spec, PairSpec)
        return TrainBatches(indexes, dealt, spec, rank, size)
    of_x, of_y = (spec.x, spec.y) if isinstance(spec, PairSpec) else (spec, spec)
    x = TrainBatches(indexes, dealt, of_x, rank, size)
    others = indexes if splits.y is None else [splits.y]
    y = TrainBatches(others, dealt, of_y, rank, size, AUGMENT_Y)
    return PairBatches(x, y, towers.labels == "sample")
