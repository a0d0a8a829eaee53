"""Recall@K by counting, without top-k.

A query succeeds at K if one of the K samples nearest to it has its label. Its best positive decides
that for every K at once: with n others at least as near, it succeeds at every K > n.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dml.precision import at_least_float32, full_precision


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
    """Share of queries with a sample of their label among their K nearest, for every K.

    Without a gallery the queries search each other, and none retrieves itself. Nearest means the
    largest dot product. Ties count against the model, and so does a query without any positive.
    Memory is O(chunk x n) for n samples in the gallery.
    """
    ks = list(ks) if isinstance(ks, Iterable) else [ks]
    if not ks or any(not isinstance(k, int) or isinstance(k, bool) or k < 1 for k in ks):
        raise ValueError(f"ks must be positive whole numbers, not {ks}")
    if (gallery is None) != (gallery_labels is None):
        raise ValueError("gallery and gallery_labels go together; give both or neither")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, not {chunk}")
    _check("embeddings", embeddings, labels)
    if gallery is None or gallery_labels is None:
        others, other_labels = embeddings, labels
    else:
        _check("gallery", gallery, gallery_labels)
        if gallery.shape[1] != embeddings.shape[1]:
            raise ValueError(
                f"queries have {embeddings.shape[1]} dimensions but the gallery {gallery.shape[1]}"
            )
        others, other_labels = gallery, gallery_labels
    embeddings = at_least_float32(embeddings)
    others = others.to(embeddings)

    with full_precision(embeddings.device):
        ahead = torch.cat(
            [
                _negatives_ahead(
                    embeddings[i : i + chunk] @ others.T,
                    labels[i : i + chunk, None] == other_labels,
                    first=i if gallery is None else None,
                )
                for i in range(0, len(embeddings), chunk)
            ]
        )
    return {k: (ahead < k).double().mean().item() for k in ks}


def _negatives_ahead(S: Tensor, positive: Tensor, first: int | None) -> Tensor:
    """For every row, how many negatives are at least as near as its best positive.

    `first` is the column of the first row itself; None where queries are not in the gallery.
    """
    if first is not None:
        S.diagonal(first).fill_(-torch.inf)
    best = S.masked_fill(~positive, -torch.inf).amax(1, keepdim=True)
    ahead = ((S >= best) & ~positive).sum(1)
    return ahead.masked_fill(best.squeeze(1) == -torch.inf, torch.iinfo(ahead.dtype).max)


def _check(what: str, embeddings: Tensor, labels: Tensor) -> None:
    if embeddings.ndim != 2 or labels.shape != embeddings.shape[:1] or len(labels) == 0:
        raise ValueError(
            f"{what} must be n x d with n > 0 and a label each, but the shapes are "
            f"{tuple(embeddings.shape)} and {tuple(labels.shape)}"
        )
    if not embeddings.is_floating_point():
        raise ValueError(f"{what} must be floating point, not {embeddings.dtype}")
    bad = int((~embeddings.isfinite().all(dim=1)).sum())
    if bad:
        raise ValueError(f"{bad} of {len(embeddings)} rows of {what} hold NaN or infinity")
