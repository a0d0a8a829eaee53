"""A faiss index beside a folder of embeddings: an approximate search that is fast in large sets.

flat      every vector is compared: exact
hnsw      a graph of neighbours; as large as the vectors and half as much again
ivfpq     vectors in lists, two dimensions to a byte: an eighth of the vectors

What an index finds is compared again with the stored embeddings, so that similarities are exact and only
a neighbour can be missed. How many are missed is measured when the index is made, and a search makes more
effort where too many would be. The index belongs to one set of embeddings, which it names by their checksum.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dml.errors import EmbeddedError
from dml.inference.embedded import FAISS, FAISS_INFO
from dml.inference.neighbours import CHUNK, Nearest, Vectors, nearest
from dml.run_folder.files import DamagedError, read_json, write_json, write_whole
from shards.files import read_bounded

Kind = Literal["flat", "hnsw", "ivfpq"]
FORMAT, VERSION = "dml-faiss-index", 1
AGAIN = "make it again with dml index, or search with --exact"
MEASURED, NEIGHBOURS = 1000, 10  # queries, and neighbours of each, by which recall is measured
COMPARED = 10  # candidates per neighbour that is asked for
GOAL = 0.99  # recall
# what faiss calls the effort of a search, and what is tried: nodes of the graph, lists
EFFORT: Mapping[Kind, tuple[str, Sequence[int]]] = {
    "hnsw": ("efSearch", (128, 256, 512, 1024)),
    "ivfpq": ("nprobe", (8, 16, 32, 64, 128, 256)),
}


@dataclass(frozen=True)
class IndexInfo:
    """recall: the share of the exact neighbours that the index finds."""

    kind: Kind
    embeddings_sha256: str
    index_sha256: str
    recall: float


def name_of(X: Vectors) -> str:
    """A checksum of the shape and of every number: a third of a second for a million of 128 dimensions."""
    found = hashlib.sha256(f"{X.shape}".encode())
    found.update(np.ascontiguousarray(X).data)
    return found.hexdigest()


def faiss_module() -> Any:
    try:
        import faiss
    except ImportError:
        raise EmbeddedError("an index needs faiss: pip install 'dml[search]'") from None
    return faiss


def build(X: Vectors, kind: Kind) -> tuple[Any, float]:
    """An index that is ready to search, and its recall."""
    faiss = faiss_module()
    n, d = X.shape
    if kind == "flat":
        index = faiss.IndexFlatIP(d)
        index.add(X)
        return index, 1.0
    if kind == "hnsw":
        index = faiss.IndexHNSWFlat(d, 32, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = 80
    else:
        if n < 39 * 256:
            raise EmbeddedError(
                f"ivfpq learns from the embeddings and needs at least {39 * 256:,}; these are {n:,}: "
                "take hnsw or flat"
            )
        lists = min(round(4 * math.sqrt(n)), n // 39)
        per_byte = next(p for p in (2, 1) if d % p == 0)
        quantizer = faiss.IndexFlatIP(d)
        index = faiss.IndexIVFPQ(quantizer, d, lists, d // per_byte, 8, faiss.METRIC_INNER_PRODUCT)
        index.cp.max_points_per_centroid = 64  # a quarter of faiss's, in a quarter of the time
        index.train(X)
    index.add(X)
    return index, tuned(index, X, *EFFORT[kind])


def tuned(index: Any, X: Vectors, name: str, efforts: Sequence[int]) -> float:
    """Let the index search with the least effort that finds GOAL of the neighbours of some rows, or with
    the largest; return the share that it finds. The rows themselves do not count."""
    rows = np.linspace(0, len(X) - 1, min(MEASURED, len(X))).round().astype(int)
    _, exact = nearest(X[rows], X, NEIGHBOURS + 1)
    others = exact != rows[:, None]
    recall = 0.0
    for effort in efforts:
        faiss_module().ParameterSpace().set_index_parameter(index, name, effort)
        _, found = nearest_by_index(index, X[rows], X, NEIGHBOURS + 1)
        recall = float((exact[:, :, None] == found[:, None, :]).any(2)[others].mean())
        if recall >= GOAL:
            break
    return recall


def nearest_by_index(index: Any, queries: Vectors, X: Vectors, k: int) -> Nearest:
    """The k nearest that the index finds, compared exactly; place -1 where it finds fewer."""
    parts = [compared(index, queries[i : i + CHUNK], X, k) for i in range(0, len(queries), CHUNK)]
    S, places = (np.concatenate(part) for part in zip(*parts, strict=True))
    return S, places


def compared(index: Any, queries: Vectors, X: Vectors, k: int) -> Nearest:
    k = min(k, len(X))
    _, found = index.search(queries, min(COMPARED * k, len(X)))
    S = np.einsum("qd,qcd->qc", queries, X[found])
    S[found < 0] = -np.inf
    order = np.argsort(-S, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(S, order, 1), np.take_along_axis(found, order, 1)


def write_index(folder: Path, X: Vectors, kind: Kind) -> IndexInfo:
    """Build the index and write it beside the embeddings. Its description is removed first and written
    last, so that an interrupted program leaves no index that would be used."""
    faiss = faiss_module()
    index, recall = build(X, kind)
    data = faiss.serialize_index(index).tobytes()
    info = IndexInfo(kind, name_of(X), hashlib.sha256(data).hexdigest(), recall)
    try:
        (folder / FAISS_INFO).unlink(missing_ok=True)
        write_whole(folder / FAISS, data)
        write_json(folder / FAISS_INFO, {"format": FORMAT, "version": VERSION, **asdict(info)})
    except OSError as error:
        raise EmbeddedError(
            f"the index {folder / FAISS} cannot be written: {error.strerror}"
        ) from None
    return info


def read_index(folder: Path, X: Vectors) -> Any | None:
    """The index of a folder of embeddings; None if it has none. EmbeddedError if it is damaged, or that
    of other embeddings."""
    path = folder / FAISS
    try:
        head = read_json(folder / FAISS_INFO)
        if head is None:
            return None
        if (head.get("format"), head.get("version")) != (FORMAT, VERSION):
            raise EmbeddedError(f"{folder / FAISS_INFO} is of another version: {AGAIN}")
        if head.get("embeddings_sha256") != name_of(X):
            raise EmbeddedError(f"{path} is the index of other embeddings than {folder}'s: {AGAIN}")
        data = read_bounded(path)
    except DamagedError as error:
        raise EmbeddedError(f"{error}; {AGAIN}") from None
    except OSError as error:
        raise EmbeddedError(f"{path} cannot be read: {error.strerror}; {AGAIN}") from None
    if hashlib.sha256(data).hexdigest() != head.get("index_sha256"):
        raise EmbeddedError(f"{path} is damaged (its checksum differs): {AGAIN}")
    return faiss_module().deserialize_index(np.frombuffer(data, np.uint8))
