"""Set-ups that run, but hardly as intended: each gets one line of warning."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from dml.catalogue import DATASETS
from dml.config import Config
from dml.data.batches import Rows
from dml.data.splits import Dataset, Splits
from shards.index import ImageReader, Index

COMPARED = 1000  # images at most; a copied split would otherwise be read in full


def suspicious(splits: Splits, config: Config) -> list[str]:
    """A line for each thing that is probably a mistake. Reads images only if they look identical."""
    several = len(splits.datasets) > 1
    found = [
        (data.part.name, line)
        for data in splits.datasets
        for line in (
            few_images(data, config),
            None if several else another_dataset(data, config),
            twins(data),
        )
    ]
    return [f"warning: {f'{name}: ' * several}{line}" for name, line in found if line]


def few_images(data: Dataset, config: Config) -> str | None:
    """per_class above the number of images of most classes."""
    M, (_, sizes) = config.batch.per_class, np.unique(data.train.labels, return_counts=True)
    fewer = int((sizes < M).sum())
    if 2 * fewer <= len(sizes):
        return None
    return (
        f"batch.per_class is {M}, but {fewer:,} of {len(sizes):,} classes have fewer images (the "
        f"median is {int(np.median(sizes))}): a batch holds the same images of a class several times; "
        "lower batch.per_class"
    )


def another_dataset(data: Dataset, config: Config) -> str | None:
    """data.dataset other than what the shards were built from."""
    dataset, source = config.data.dataset, data.index.manifest["source"].removesuffix("_mini")
    if source == dataset or source not in DATASETS:
        return None
    return (
        f"data.dataset is {dataset}, but {data.index.root} was built from {source}: Recall@K and "
        f"reports would be those of {dataset}; set data.dataset={source}, or other data.shards"
    )


def twins(data: Dataset) -> str | None:
    """Test images that are also trained on."""
    index, test = data.index, data.test
    if not index.has_checksums:
        return None
    tested = test.rows if test.gallery is None else np.append(test.rows, test.gallery.rows)
    found = list(islice(identical(index, tested, index.positions("train")), COMPARED))
    if not found:
        return None
    (a, b), names = found[0], index.class_names
    count = f"{'at least ' * (len(found) == COMPARED)}{len(found):,}"
    return (
        f"{count} of {len(tested):,} test images are in the training split as well (image {a:08d} of "
        f"class {names[index.rows['label'][a]]!r} is image {b:08d} of "
        f"{names[index.rows['label'][b]]!r}): the scores will be too good; remove the copies and "
        "build the shards again"
    )


def identical(index: Index, some: Rows, others: Rows) -> Iterator[tuple[int, int]]:
    """Pairs of rows with the same bytes, one for each of `some` that has any."""
    reader, keys = ImageReader(index), fingerprints(index)
    candidates = others[np.isin(keys[others], keys[some])]
    order = np.argsort(keys[candidates], kind="stable")
    candidates, sorted_keys = candidates[order], keys[candidates][order]
    for row in some[np.isin(keys[some], sorted_keys)].tolist():
        first, last = (np.searchsorted(sorted_keys, keys[row], side) for side in ("left", "right"))
        data = reader.read(row)
        same = (other for other in candidates[first:last].tolist() if reader.read(other) == data)
        if (other := next(same, None)) is not None:
            yield row, other


def fingerprints(index: Index) -> NDArray[np.uint64]:
    """Checksum and size of every image as one number."""
    size, checksum = (index.rows[column].astype(np.uint64) for column in ("size", "crc32"))
    return (checksum << np.uint64(32)) | size
