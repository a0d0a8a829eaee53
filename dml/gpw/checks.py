"""What a batch must be before a loss is computed of it; no mathematics, shared by all engines."""

from __future__ import annotations

import torch
from torch import Tensor

from dml.errors import NotFiniteError


def input_problem(embeddings: Tensor, labels: Tensor, known: bool = False) -> str | None:
    """Why these are not a batch, in a sentence; None if they are. known: whether the labels of all
    processes are known on the CPU, so that these may be there too."""
    if not (isinstance(embeddings, Tensor) and isinstance(labels, Tensor)):
        what = f"{type(embeddings).__name__} and {type(labels).__name__}"
        return f"embeddings and labels must be tensors, not {what}"
    if embeddings.ndim != 2 or labels.ndim != 1 or len(embeddings) != len(labels):
        return (
            "embeddings must be m x d and labels of length m, but their shapes are "
            f"{tuple(embeddings.shape)} and {tuple(labels.shape)}"
        )
    if len(labels) == 0:
        return "the batch is empty (m = 0); a loss needs at least one sample"
    if not embeddings.is_floating_point():
        return f"embeddings must be floating point, not {embeddings.dtype}"
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        return f"labels must be integers (such as torch.int64), not {labels.dtype}"
    if labels.device != embeddings.device and not (known and labels.is_cpu):
        return (
            f"embeddings are on {embeddings.device} but labels on {labels.device}; "
            "move them to the same device"
        )
    return None


def problem_of_identities(identities: Tensor, m: int) -> str | None:
    """Why these are not the identities of all images, in a sentence; None if they are."""
    if identities.is_cpu and identities.shape == (m,) and identities.dtype == torch.int64:
        return None
    return (
        f"identities must be those of the images of all processes, on the CPU: {m} numbers of torch.int64, "
        f"not {tuple(identities.shape)} of {identities.dtype} on {identities.device}"
    )


def row_norms(embeddings: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(embeddings.detach(), dim=1)
    return norms


def largest_similarity(norms: Tensor, processes: int = 1) -> float:
    """The largest S_ii, which no S_ij exceeds, from the lengths of all embeddings. Raises
    NotFiniteError if a row of the global batch holds NaN or infinity, or is so long that S would
    overflow. It waits for a GPU."""
    norm = float(norms.max())
    largest = norm * norm  # norm**2 would raise Python's OverflowError
    if not largest <= torch.finfo(norms.dtype).max:
        finite = norms.square().isfinite()
        bad = (~finite).nonzero().flatten().tolist()
        process, row = divmod(bad[0], len(finite) // processes)
        of = f" of process {process}" if processes > 1 else ""
        raise NotFiniteError(
            f"{len(bad)} of {len(finite)} embeddings hold NaN or infinity, or are too large (first in "
            f"row {row}{of}); the model has diverged or its input is damaged"
        )
    return largest


def check_batch(embeddings: Tensor, labels: Tensor) -> None:
    problem = input_problem(embeddings, labels)
    if problem is not None:
        raise ValueError(problem)
    largest_similarity(row_norms(embeddings))
