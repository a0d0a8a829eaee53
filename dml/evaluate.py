"""One evaluation: every process embeds its share of the images, all get all embeddings, and each
counts for its own queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from accelerate import Accelerator
from PIL import Image
from torch import Tensor, nn

from dml.config import Eval
from dml.data.batches import EvalBatches, Rows, own_share
from dml.data.deck import mix, shuffled
from dml.data.loader import attempts, loader
from dml.data.preprocessing import Input, opened
from dml.distributed.collectives import Wire
from dml.errors import NotFiniteError
from dml.inference.picture import Found, retrieval_picture
from dml.recall import Retrieval, retrieval
from shards.index import ImageReader, Index
from shards.item import ShardError

PICTURE = 8, 6  # queries, and how many of their nearest
THUMBNAIL = 32


@dataclass(frozen=True)
class Subset:
    """Images to search with, and those to search in (None: each other)."""

    rows: Rows
    labels: Rows
    gallery: Subset | None = None


def of_test_split(index: Index) -> Subset:
    """The test classes; In-Shop searches a gallery with queries."""
    if "query" not in index.splits:
        return Subset(index.positions("test"), index.labels("test"))
    gallery = Subset(index.positions("gallery"), index.labels("gallery"))
    return Subset(index.positions("query"), index.labels("query"), gallery)


@dataclass(frozen=True)
class Evaluation:
    """scores: recall@1 and so on, as fractions. embeddings: of the queries, in their order. The
    first process alone has a picture."""

    scores: dict[str, float]
    embeddings: Tensor
    picture: Image.Image | None


@dataclass(frozen=True)
class Evaluator:
    """How a run evaluates; the same on every process. `pause` is called before every batch, on all
    processes at the same time, with what is wrong with this one's, and may raise."""

    accelerator: Accelerator
    index: Index
    spec: Input
    ks: tuple[int, ...]
    batch: int
    workers: int
    prefetch: int
    pause: Callable[[ShardError | None], object]

    def __call__(self, model: nn.Module, subset: Subset) -> Evaluation:
        """All processes must call it. They get the same scores."""
        X = self.embed(model, subset)
        y = torch.from_numpy(subset.labels).to(X.device)
        rank, size = self.accelerator.process_index, self.accelerator.num_processes
        own = own_share(len(y), rank, size)
        mine = slice(own.start, own.stop)
        others, first = subset, own.start if subset.gallery is None else None
        G, g = X, y
        if subset.gallery is not None:
            others, G = subset.gallery, self.embed(model, subset.gallery)
            g = torch.from_numpy(subset.gallery.labels).to(X.device)
        found = retrieval(X[mine], y[mine], G, g, first=first)
        every = Retrieval(
            gather_shares(found.ahead, len(y)),
            gather_shares(found.precision, len(y)),
            gather_shares(found.average_precision, len(y)),
        )
        picture = self.picture(X, subset, G, others) if rank == 0 else None
        return Evaluation(every.summary(self.ks), X, picture)

    @torch.no_grad()
    def embed(self, model: nn.Module, subset: Subset) -> Tensor:
        """The embeddings of all images, in order, on every process."""
        accelerator = self.accelerator
        rank, size = accelerator.process_index, accelerator.num_processes
        shares = [own_share(len(subset.rows), r, size) for r in range(size)]
        batches = EvalBatches(
            self.index, subset.rows, subset.labels, self.spec, self.batch, rank, size
        )
        # Under ZeRO-3 every process must take part in every forward: a share that needs one batch
        # less than the largest goes through its first again, in vain.
        count = -(-max(map(len, shares)) // self.batch)
        order = [n if n < len(batches) else 0 for n in range(count)]
        model.eval()
        parts = []
        coming = loader(batches, order, self.workers, self.prefetch)
        for n, ((images, _), problem) in enumerate(attempts(coming)):
            self.pause(problem)
            x = model(images.to(accelerator.device, non_blocking=True))
            parts.append(x if n < len(batches) else x[:0])
        model.train()
        X = gather_shares(torch.cat(parts), len(subset.rows))
        bad = int((~X.isfinite().all(dim=1)).sum())
        if bad:
            raise NotFiniteError(f"{bad} of {len(X)} embeddings hold NaN or infinity")
        return X

    def picture(self, X: Tensor, subset: Subset, G: Tensor, others: Subset) -> Image.Image:
        """Some queries, the same ones throughout a run, and their nearest."""
        queries, nearest = PICTURE
        reader = ImageReader(self.index)

        def image(row: Any) -> Image.Image:
            return opened(reader.read(int(row))).convert("RGB")

        rows = []
        for q in some(len(X), queries):
            S = G @ X[q]
            if others is subset:
                S[q] = -torch.inf
            top = S.topk(min(nearest, len(S) - (others is subset))).indices.tolist()
            right = others.labels[top] == subset.labels[q]
            found = [Found(image(others.rows[j]), bool(r)) for j, r in zip(top, right, strict=True)]
            rows.append((image(subset.rows[q]), found))
        return retrieval_picture(rows)

    def thumbnails(self, subset: Subset, X: Tensor, count: int) -> tuple[Tensor, list[str], Tensor]:
        """Embeddings, class names and small pictures of some images."""
        spec = replace(self.spec, size=THUMBNAIL, resize=THUMBNAIL)
        chosen = some(len(X), count)
        images, labels = EvalBatches(
            self.index, subset.rows[chosen], subset.labels[chosen], spec, count
        )[0]
        names = self.index.class_names
        return X[chosen].cpu(), [names[label] for label in labels.tolist()], images


def some(n: int, count: int) -> list[int]:
    """`count` of n, always the same."""
    chosen: list[int] = shuffled(n, mix(n))[:count].tolist()
    return chosen


def gather_shares(mine: Tensor, n: int) -> Tensor:
    """The rows of all processes, n in all, each of which brings its own_share of them."""
    wire = Wire()
    if wire.size == 1:
        return mine
    shares = [len(own_share(n, r, wire.size)) for r in range(wire.size)]
    padded = mine.new_zeros(max(shares), *mine.shape[1:])
    padded[: len(mine)] = mine
    (everyone,) = wire.gather(padded)
    return torch.cat([rows[:share] for rows, share in zip(everyone, shares, strict=True)])


def evaluation_due(eval: Eval, step: int, steps: int) -> Literal["validation", "test"] | None:
    """Which classes to look at after `step` updates of a run of `steps`. The test classes are looked
    at in the end, whatever this says."""
    if step == 0:
        return "test" if eval.untrained else None
    on_the_way = eval.every_steps is not None and step % eval.every_steps == 0
    if eval.validation_classes:
        return "validation" if on_the_way or step == steps else None
    return "test" if on_the_way and step < steps else None
