"""One evaluation: every process embeds its share of the images, all of them receive all embeddings,
and each counts the ranks of its own queries."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor, nn

from dml.config import EXECUTION, Config, Eval, flatten
from dml.data.ahead import Ahead
from dml.data.batches import EvalBatches, own_share
from dml.data.deck import mix, shuffled
from dml.data.loader import loader
from dml.data.preprocessing import Input
from dml.data.splits import Splits, Subset
from dml.distributed.collectives import Wire
from dml.distributed.team import Team
from dml.distributed.workers import loader_workers
from dml.errors import NotFiniteError
from dml.inference.picture import Found, retrieval_picture
from dml.plan import Plan
from dml.recall import Retrieval, retrieval
from dml.run_folder import events
from dml.run_folder.journal import Journal
from dml.run_folder.result import write_picture
from shards.index import ImageReader
from shards.photo import open_photo

LARGEST_BATCH = 256  # images embedded at a time
QUERIES, NEIGHBOURS = 8, 6  # in the picture
THUMBNAIL = 32  # pixels
PROJECTED = 1000  # images in TensorBoard's projector


def evaluation_due(eval: Eval, step: int, steps: int) -> Literal["validation", "test"] | None:
    """Which classes to evaluate after `step` updates of a run of `steps`. The test classes are
    evaluated at the end, whatever this says."""
    if step == 0:
        return "test" if eval.untrained else None
    during_training = eval.every_steps is not None and step % eval.every_steps == 0
    if eval.validation_classes:
        return "validation" if during_training or step == steps else None
    return "test" if during_training and step < steps else None


@dataclass(frozen=True)
class Evaluation:
    """scores: recall@1 and so on, as fractions. embeddings: of the queries, in their order. picture:
    on the first process only."""

    scores: dict[str, float]
    embeddings: Tensor
    picture: Image.Image | None

    def __str__(self) -> str:
        return "  ".join(f"{name} {score:.2%}" for name, score in self.scores.items())


class Evaluator:
    """How a run evaluates; the same on every process. All of them call it at the same time."""

    def __init__(
        self, team: Team, splits: Splits, spec: Input, config: Config, plan: Plan, journal: Journal
    ) -> None:
        self.team, self.index, self.spec, self.journal = team, splits.index, spec, journal
        self.subsets = {"validation": splits.validation, "test": splits.test}
        self.ks = sorted({1, *config.eval.ks})  # Recall@1 chooses the best step
        self.batch = config.engine.micro_batch or min(LARGEST_BATCH, plan.images_per_process)
        self.loading = loader_workers(config.data), config.data.prefetch

    def __call__(self, model: nn.Module, split: str, step: int) -> Evaluation:
        """Evaluate a split with the weights of a step, and log the scores, which are the same on
        every process."""
        found = self.search(model, self.subsets[split])
        self.team.say(f"step {step:,}  {split}: {found}")
        if found.picture:
            self.journal.log(events.Evaluation(step, split, found.scores, found.picture))
        return found

    def search(self, model: nn.Module, subset: Subset) -> Evaluation:
        X = self.embed(model, subset)
        y = torch.from_numpy(subset.labels).to(X.device)
        own = own_share(len(y), self.team.rank, self.team.size)
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
        with self.team.together():
            picture = self.picture(X, subset, G, others) if self.team.first else None
        return Evaluation(every.summary(self.ks), X, picture)

    @torch.no_grad()
    def embed(self, model: nn.Module, subset: Subset) -> Tensor:
        """The embeddings of all images, in order, on every process."""
        rank, size = self.team.rank, self.team.size
        batches = EvalBatches(
            self.index, subset.rows, subset.labels, self.spec, self.batch, rank, size
        )
        # Under ZeRO-3 every process must take part in every forward: a process whose share needs one
        # batch less than the largest repeats batch 0 and discards the output.
        largest = max(len(own_share(len(subset.rows), r, size)) for r in range(size))
        count = -(-largest // self.batch)
        order = [n if n < len(batches) else 0 for n in range(count)]
        model.eval()
        parts = []
        coming = loader(batches, order, *self.loading)
        with closing(Ahead(batches, order, self.index.cache)) as ahead:
            for n in range(count):
                images, _ = self.team.fetch(coming)
                ahead.at(n)
                self.team.meet()
                x = model(images.to(self.team.device, non_blocking=True))
                parts.append(x if n < len(batches) else x[:0])
        model.train()
        X = gather_shares(torch.cat(parts), len(subset.rows))
        bad = int((~X.isfinite().all(dim=1)).sum())
        if bad:
            raise NotFiniteError(f"{bad} of {len(X)} embeddings hold NaN or infinity")
        return X

    def picture(self, X: Tensor, subset: Subset, G: Tensor, others: Subset) -> Image.Image:
        """Some queries, the same ones throughout a run, and their nearest neighbours."""
        reader = ImageReader(self.index)

        def image(row: Any) -> Image.Image:
            return open_photo(reader.read(int(row))).whole()

        rows = []
        for q in some(len(X), QUERIES):
            S = G @ X[q]
            if others is subset:
                S[q] = -torch.inf
            top = S.topk(min(NEIGHBOURS, len(S) - (others is subset))).indices.tolist()
            right = others.labels[top] == subset.labels[q]
            found = [Found(image(others.rows[j]), bool(r)) for j, r in zip(top, right, strict=True)]
            rows.append((image(subset.rows[q]), found))
        return retrieval_picture(rows)

    def decorate(self, folder: Path, config: Config, found: Evaluation) -> None:
        """What is pleasant to have beside the result, written after it: the picture, and TensorBoard's
        table of runs and projector. A failure is only a warning."""
        try:
            if found.picture:
                write_picture(folder, found.picture)
            some = self.thumbnails(self.subsets["test"], found.embeddings)
            # these differ between runs and are no hyper-parameters
            hidden = EXECUTION | {"run.name"}
            settings = {key: v for key, v in flatten(config).items() if key not in hidden}
            self.journal.log(events.End(settings, *some))
            if self.team.problem:
                raise self.team.problem
        except Exception as error:  # noqa: BLE001  the training must not be lost for it
            self.team.say(f"warning: no picture, or no projector in TensorBoard: {error!r}")

    def thumbnails(self, subset: Subset, X: Tensor) -> tuple[Tensor, list[str], Tensor]:
        """Embeddings, class names and thumbnails of some images."""
        spec = replace(self.spec, size=THUMBNAIL, resize=THUMBNAIL)
        chosen = some(len(X), PROJECTED)
        images, labels = EvalBatches(
            self.index, subset.rows[chosen], subset.labels[chosen], spec, PROJECTED
        )[0]
        names = self.index.class_names
        return X[chosen].cpu(), [names[label] for label in labels.tolist()], images


def some(n: int, count: int) -> list[int]:
    """`count` of n, always the same."""
    chosen: list[int] = shuffled(n, mix(n))[:count].tolist()
    return chosen


def gather_shares(mine: Tensor, n: int) -> Tensor:
    """The rows of all processes, n in all; each process brings its own_share of them."""
    wire = Wire()
    if wire.size == 1:
        return mine
    shares = [len(own_share(n, r, wire.size)) for r in range(wire.size)]
    padded = mine.new_zeros(max(shares), *mine.shape[1:])
    padded[: len(mine)] = mine
    (everyone,) = wire.gather(padded)
    return torch.cat([rows[:share] for rows, share in zip(everyone, shares, strict=True)])
