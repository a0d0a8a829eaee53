"""Cross-batch memory: the batch is also compared with the embeddings of the last steps.

Wang et al., Cross-Batch Memory for Embedding Learning (XBM), CVPR 2020:

    L = L_batch + weight L_memory,    L_memory: the mean over the anchors of the batch against the memory

The memory is a queue of the last `size` embeddings, without gradient. The m embeddings of a batch enter it
after the loss of their step, in the order of their positions in the global batch, and the oldest leave.
All processes hold the same memory, and it is the same for any number of them; a batch is gathered anyway,
so the memory sends nothing. As published, it is neither filled nor used before `from_step`.

The published code fills the memory first, so that the batch is part of it, and leaves out pairs by their
similarity. Here the batch is compared with itself by L_batch alone, and an earlier embedding of the
anchor's own image is left out by the identity of the image.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dml.distributed.collectives import Wire
from dml.gpw.columns import Matches
from dml.gpw.engine.rectangle import RectangleSweeps, of_rows, one_sweep_suffices
from dml.gpw.engine.workspace import Workspace
from dml.gpw.statistics import Scope, constant
from dml.gpw.weighting import PairLoss


class Memory:
    """The queue, as a ring: `place` is where the next embedding goes.

    steps: how many batches were seen. used: how many embeddings are there, at X[:used]. labels,
    identities: theirs, on the CPU. found: the share of the own anchors of the last batch that have a
    positive in the memory; None: the memory was not used.
    """

    def __init__(self, size: int, weight: float = 1.0, from_step: int = 0) -> None:
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"the size of a memory must be a whole number, at least 1, not {size}")
        if not weight > 0:
            raise ValueError(f"the weight of a memory must be above 0, not {weight}")
        self.size, self.weight, self.from_step = size, weight, from_step
        self.steps = self.used = self.place = self.unnamed = 0
        self.X: Tensor | None = None
        self.labels, self.identities = torch.zeros(2, size, dtype=torch.int64)
        self.found: Tensor | None = None

    def __repr__(self) -> str:
        return f"Memory(size={self.size}, weight={self.weight}, from_step={self.from_step})"

    def named(self, identities: Tensor | None, count: int) -> Tensor:
        """The identities of a batch. Without any, all embeddings are different images."""
        if identities is not None:
            return identities
        self.unnamed += count
        return torch.arange(-self.unnamed, count - self.unnamed)

    def enqueue(self, X: Tensor, labels: Tensor, identities: Tensor) -> None:
        """The embeddings of a global batch, in the order of its positions."""
        self.steps += 1
        if self.steps <= self.from_step:
            return
        if self.X is None:
            self.X = X.new_zeros(self.size, X.shape[1])
        count = min(len(X), self.size)
        first = min(
            count, self.size - self.place
        )  # up to the end of the ring, the rest from its start
        for place, n, offset in ((self.place, first, 0), (0, count - first, first)):
            into, some = (
                slice(place, place + n),
                slice(len(X) - count + offset, len(X) - count + offset + n),
            )
            self.X[into] = X[some]
            self.labels[into], self.identities[into] = labels[some], identities[some]
        self.place = (self.place + count) % self.size
        self.used = min(self.size, self.used + count)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds."""
        X = torch.zeros(0, 0) if self.X is None else self.X[: self.used]
        place = torch.tensor([self.steps, self.place, self.unnamed])
        labels, identities = self.labels[: self.used], self.identities[: self.used]
        return {"embeddings": X, "labels": labels, "identities": identities, "place": place}

    def load(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        X = state["embeddings"].to(device)
        self.steps, self.place, self.unnamed = state["place"].tolist()
        self.used, self.X = len(X), None
        if self.used:
            self.X = X.new_zeros(self.size, X.shape[1])
            self.X[: self.used] = X
        self.labels[: self.used] = state["labels"]
        self.identities[: self.used] = state["identities"]


@dataclass(frozen=True)
class MemoryTerm:
    """The memory's part of the loss, with its weight.

    own_sum: over the own anchors, to be divided by m; with slopes, if something is learned. value: of a
    loss that is one number of the whole batch, the same on all processes; None: of any other. gradient: of
    the own rows, in the order of this process's embeddings; None: not asked for.
    """

    own_sum: Tensor
    value: Tensor | None
    gradient: Tensor | None


def compare(
    loss: PairLoss,
    memory: Memory,
    X: Tensor,
    labels: Tensor,
    identities: Tensor,
    m: int,
    scale: float | None,
    tile: int,
    workspace: Workspace,
    wire: Wire,
) -> MemoryTerm | None:
    """The own rows X as anchors against the memory; None while it is empty. labels, identities: of the
    own rows, on the CPU. m: the size of the global batch. scale: of the gradient; None: no gradient."""
    memory.found = None
    if memory.X is None or not memory.used:
        return None
    ids = identities, memory.identities[: memory.used]
    matches = Matches.of(labels, memory.labels[: memory.used], ids, X.device)
    memory.found = matches.slots.valid.any(1).double().mean()
    sweeps = RectangleSweeps(loss, X, memory.X[: memory.used], matches, tile, workspace)
    dX = None if scale is None else torch.zeros_like(X)
    factor = 0.0 if scale is None else memory.weight * scale / loss.divisor(m)
    if one_sweep_suffices(loss):
        t = sweeps.one_sweep(factor, dX)
    else:
        t = sweeps.statistics()
        names = [name for name in loss.shared_statistics if loss.scopes[name] is Scope.BATCH]
        sums = wire.gather(*(t[name] for name in names))
        t |= {name: x.sum(0) for name, x in zip(names, sums, strict=True)}
        if dX is not None:
            sweeps.gradient(of_rows(loss, t), None, factor, dX)
    if loss.has_anchors:
        return MemoryTerm(loss.totals_of_anchors(t).mul(memory.weight), None, dX)
    nothing = constant(0, torch.float64, X.device)
    return MemoryTerm(nothing, loss.totals_of_batch(t).mul(memory.weight), dX)
