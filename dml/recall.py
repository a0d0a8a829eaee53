"""Recall@K, R-precision and MAP@R, computed chunk by chunk from counts of negatives.

Similarities S are dot products. A query has R positives in the gallery, with similarities
p_1 >= p_2 >= ... >= p_R. There are n_j = #{negatives with S >= p_j} negatives ahead of the j-th
positive, so its rank is j + n_j, and (Musgrave et al., A Metric Learning Reality Check)

    Recall@K    = [n_1 < K]
    R-precision = 1/R #{j : j + n_j <= R}
    MAP@R       = 1/R sum_{j : j + n_j <= R} j / (j + n_j)

Ties count against the model: a negative with the same similarity as a positive is ahead of it. A tie
between positives changes nothing. For a query without positives all measures are 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from dml.distributed.precision import at_least_float32, full_precision

NO_POSITIVE = torch.iinfo(torch.int64).max

# Equal vectors must tie, but in products with few rows or columns BLAS may round equal columns
# differently. Measured with MKL on an Intel Xeon: in two of three products with one row, in one of 600
# with 4 to 15 rows, in none of 20,000 with more; on an AMD EPYC: in two of three with 5 to 11 columns,
# in none with 12 or more. Smaller products are padded.
SMALLEST_PRODUCT = 32


@dataclass(frozen=True)
class Retrieval:
    """One entry per query, so that processes can measure their own queries."""

    ahead: Tensor  # n_1, negatives ahead of the best positive; NO_POSITIVE without positives
    precision: Tensor  # R-precision, float64
    average_precision: Tensor  # MAP@R before the mean over queries, float64

    def summary(self, ks: Iterable[int] | int) -> dict[str, float]:
        """Means over the queries: recall@K for every K, r_precision and map@r."""
        return {
            **{f"recall@{k}": recall for k, recall in _recall(self.ahead, _checked(ks)).items()},
            "r_precision": self.precision.mean().item(),
            "map@r": self.average_precision.mean().item(),
        }


@torch.no_grad()
def retrieval(
    queries: Tensor,
    labels: Tensor,
    gallery: Tensor,
    gallery_labels: Tensor,
    *,
    first: int | None,
    chunk: int = 1024,
) -> Retrieval:
    """All measures of every query, in O(chunk x n) memory for n samples in the gallery.

    If the queries are consecutive rows of the gallery, `first` is the row of the first query, and no
    query retrieves itself. It is None if queries and gallery are different sets. The queries may be
    empty, as the share of a process can be.
    """
    if len(queries) or len(labels):
        _check("queries", queries, labels)
    _check("gallery", gallery, gallery_labels)
    if first is not None and not (
        0 <= first <= len(gallery) - len(labels)
        and torch.equal(labels, gallery_labels[first : first + len(labels)])
    ):
        raise ValueError(
            f"{len(labels)} queries from row {first} of a gallery of {len(gallery)}, but these rows "
            "do not exist or have other labels; set first=None if the gallery does not contain the "
            "queries"
        )
    ahead = labels.new_empty(len(labels), dtype=torch.int64)
    precision = labels.new_empty(len(labels), dtype=torch.float64)
    average_precision = torch.empty_like(precision)
    for rows, S, p in _chunks(queries, labels, gallery, gallery_labels, first, chunk):
        precision[rows], average_precision[rows] = _precisions(S, p)
        ahead[rows] = _ahead(S, p)
    return Retrieval(ahead, precision, average_precision)


@torch.no_grad()
def recall_at_k(
    embeddings: Tensor,
    labels: Tensor,
    ks: Iterable[int] | int,
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    *,
    chunk: int = 1024,
) -> dict[int, float]:
    """Share of queries with a sample of their label among their K nearest neighbours, for every K.

    Without a gallery the queries are the gallery, and no query retrieves itself. Ties count against
    the model, and so does a query without positives. Memory is O(chunk x n) for n samples in the
    gallery.
    """
    ks = _checked(ks)
    if (gallery is None) != (gallery_labels is None):
        raise ValueError("gallery and gallery_labels go together; give both or neither")
    _check("embeddings", embeddings, labels)
    if gallery is None or gallery_labels is None:
        chunks = _chunks(embeddings, labels, embeddings, labels, 0, chunk)
    else:
        _check("gallery", gallery, gallery_labels)
        chunks = _chunks(embeddings, labels, gallery, gallery_labels, None, chunk)
    return _recall(torch.cat([_ahead(S, p) for _, S, p in chunks]), ks)


def _chunks(
    queries: Tensor,
    labels: Tensor,
    gallery: Tensor,
    gallery_labels: Tensor,
    first: int | None,
    chunk: int,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield (rows, S, p) for one chunk of queries at a time.

    S (queries x n) holds the similarities of negatives and -inf everywhere else; the next chunk
    overwrites it. p (queries x size of the largest class) holds the similarities of positives in any
    order, padded with -inf.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, not {chunk}")
    if queries.shape[1] != gallery.shape[1]:
        raise ValueError(
            f"queries have {queries.shape[1]} dimensions but the gallery {gallery.shape[1]}"
        )
    n, device = len(gallery), queries.device
    queries = at_least_float32(queries)
    gallery = gallery.to(queries)
    # Sorted by class, the positives of a query are an interval of the gallery.
    both = torch.cat([gallery_labels, labels])
    names, classes = torch.unique(both, return_inverse=True)
    sizes = classes[:n].bincount(minlength=len(names))
    starts = sizes.cumsum(0) - sizes
    by_class = classes[:n].argsort()
    slots = torch.arange(int(sizes.max()), device=device)

    G = _padded(gallery)
    S = queries.new_empty(max(min(chunk, len(queries)), SMALLEST_PRODUCT), len(G))
    for i in range(0, len(queries), chunk):
        rows = slice(i, min(i + chunk, len(queries)))
        Q = _padded(queries[rows])
        with full_precision(device):
            s = torch.mm(Q, G.T, out=S[: len(Q)])[: rows.stop - i, :n]
        own = classes[n:][rows, None]
        positive = slots < sizes[own]
        # Slots beyond the size of a class repeat its last sample. For a class that is not in the
        # gallery they erase some other sample, which does not matter without positives.
        interval = starts[own] + slots.minimum(sizes[own] - 1)
        columns = by_class[interval.clamp(0, n - 1)]
        if first is not None:
            itself = first + torch.arange(i, rows.stop, device=device)
            positive &= columns != itself[:, None]
        p = s.gather(1, columns).masked_fill_(~positive, -torch.inf)
        yield rows, s.scatter_(1, columns, -torch.inf), p


def _padded(X: Tensor) -> Tensor:
    """X with at least SMALLEST_PRODUCT rows."""
    return pad(X, (0, 0, 0, SMALLEST_PRODUCT - len(X))) if len(X) < SMALLEST_PRODUCT else X


def _ahead(S: Tensor, p: Tensor) -> Tensor:
    """n_1 = #{negatives with S >= p_1} of every row, for any K. Overwrites S with zeros and ones."""
    best = p.amax(1, keepdim=True)
    # Measured: comparing in place and summing floats, which is exact to 2^24, takes 0.05 of the time
    # of the product that computed S; a boolean matrix and its sum take 0.8.
    ahead = S.ge_(best).sum(1).long()
    return ahead.masked_fill_(best.squeeze(1) == -torch.inf, NO_POSITIVE)


def _precisions(S: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """R-precision and MAP@R of every row. Ranks beyond R do not count, so R negatives are enough."""
    R = (p > -torch.inf).sum(1, keepdim=True)
    nearest = S.topk(max(1, int(R.max()))).values
    j = torch.arange(1, p.shape[1] + 1, device=p.device)
    n_j = torch.searchsorted(-nearest, -p.sort(descending=True).values, right=True)
    rank = j + n_j
    hit = rank <= R  # never for the padding of p: there j > R
    precision = hit / R.clamp(min=1).double()
    return precision.sum(1), (precision * j / rank).sum(1)


def _recall(ahead: Tensor, ks: Sequence[int]) -> dict[int, float]:
    return {k: (ahead < k).double().mean().item() for k in ks}


def _checked(ks: Iterable[int] | int) -> list[int]:
    ks = list(ks) if isinstance(ks, Iterable) else [ks]
    if not ks or any(not isinstance(k, int) or isinstance(k, bool) or k < 1 for k in ks):
        raise ValueError(f"ks must be positive whole numbers, not {ks}")
    return ks


def _check(what: str, embeddings: Tensor, labels: Tensor) -> None:
    if embeddings.ndim != 2 or labels.shape != embeddings.shape[:1] or len(labels) == 0:
        raise ValueError(
            f"{what} must be n x d with n > 0 and have n labels, but the shapes are "
            f"{tuple(embeddings.shape)} and {tuple(labels.shape)}"
        )
    if not embeddings.is_floating_point():
        raise ValueError(f"{what} must be floating point, not {embeddings.dtype}")
    bad = int((~embeddings.isfinite().all(dim=1)).sum())
    if bad:
        raise ValueError(f"{bad} of {len(embeddings)} rows of {what} hold NaN or infinity")
