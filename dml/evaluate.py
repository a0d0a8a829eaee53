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
from dml.data.batches import EvalBatches, Rows, own_share
from dml.data.deck import mix, shuffled
from dml.data.loader import loader
from dml.data.pair import PairSpec, Spec
from dml.data.preprocessing import Input
from dml.data.splits import Splits, Subset
from dml.distributed.collectives import Wire
from dml.distributed.team import Team
from dml.distributed.workers import loader_workers
from dml.errors import NotFiniteError
from dml.inference.picture import Found, retrieval_picture, stacked
from dml.plan import Plan
from dml.recall import Retrieval, retrieval
from dml.run_folder import events
from dml.run_folder.journal import Journal
from dml.run_folder.result import write_picture
from shards.index import ImageReader, Index
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
    """scores: recall@1 and so on, as fractions; of several datasets their mean, and NAME/recall@1 of
    each; of two towers alike, x_to_y/recall@1 and y_to_x/recall@1. embeddings: of the queries of each
    dataset, in their order (of tower x). picture: on the first process only, and only of images."""

    scores: dict[str, float]
    embeddings: list[Tensor]
    picture: Image.Image | None

    def __str__(self) -> str:
        return "  ".join(f"{name} {score:.2%}" for name, score in self.scores.items())


class Evaluator:
    """How a run evaluates; the same on every process. All of them call it at the same time."""

    def __init__(
        self,
        team: Team,
        splits: Splits,
        spec: Spec,
        config: Config,
        plan: Plan,
        journal: Journal,
    ) -> None:
        self.team, self.journal, self.y = team, journal, splits.y
        self.two_encoders = isinstance(spec, PairSpec)
        self.spec, self.spec_of_y = (spec.x, spec.y) if isinstance(spec, PairSpec) else (spec, spec)
        self.by_sample = splits.y is not None and config.towers.labels == "sample"
        self.names = [dataset.part.name for dataset in splits.datasets]
        self.subsets = {
            "validation": [dataset.validation for dataset in splits.datasets],
            "test": [dataset.test for dataset in splits.datasets],
        }
        self.ks = sorted({1, *config.eval.ks})  # Recall@1 chooses the best step
        self.batch = config.engine.micro_batch or min(LARGEST_BATCH, plan.images_per_process)
        self.loading = loader_workers(config), config.data.prefetch

    def __call__(self, model: nn.Module, split: str, step: int) -> Evaluation:
        """Evaluate a split with the weights of a step, and log the scores, which are the same on
        every process."""
        found = mean([self.search(model, subset) for subset in self.subsets[split]], self.names)
        self.team.say(f"step {step:,}  {split}: {found}")
        self.journal.log(events.Evaluation(step, split, found.scores, found.picture))
        return found

    def frozen(self, model: nn.Module, split: str) -> dict[str, float]:
        """The scores of a split by the features that the backbone computes, without the head: what a
        training must beat."""
        parts = [self.search(model, subset, head=False) for subset in self.subsets[split]]
        found = mean(parts, self.names)
        self.team.say(f"features without a head  {split}: {found}")
        return found.scores

    def search(self, model: nn.Module, subset: Subset, head: bool = True) -> Evaluation:
        if self.y is not None:
            return self.between_towers(model, subset, of_tower(subset, self.y))
        X, others = self.embed(model, subset, head), subset.gallery or subset
        G = X if others is subset else self.embed(model, others, head)
        return self.compare(X, subset, G, others, drawn=head)

    def between_towers(self, model: nn.Module, x: Subset, y: Subset) -> Evaluation:
        """From x to y and from y to x, and their means. The partner of a query may be found: it is a right
        answer."""
        X, Y = self.embed(model, x), self.embed(model, y)
        of_x = X if x.gallery is None else self.embed(model, x.gallery)
        of_y = Y if y.gallery is None else self.embed(model, y.gallery)
        there = self.compare(X, x, of_y, y.gallery or y)
        back = self.compare(Y, y, of_x, x.gallery or x)
        return replace(mean([there, back], ["x_to_y", "y_to_x"]), embeddings=[X])

    def compare(
        self, X: Tensor, subset: Subset, G: Tensor, others: Subset, drawn: bool = True
    ) -> Evaluation:
        """Search the queries X in the gallery G; without themselves, if both are the same images."""
        y, g = (torch.from_numpy(self.labels(each)).to(X.device) for each in (subset, others))
        own = own_share(len(y), self.team.rank, self.team.size)
        mine, first = slice(own.start, own.stop), own.start if others is subset else None
        found = retrieval(X[mine], y[mine], G, g, first=first)
        every = Retrieval(
            gather_shares(found.ahead, len(y)),
            gather_shares(found.precision, len(y)),
            gather_shares(found.average_precision, len(y)),
        )
        with self.team.together():
            drawn = drawn and self.team.first and isinstance(self.spec, Input)
            picture = self.picture(X, subset, G, others) if drawn else None
        return Evaluation(every.summary(self.ks), [X], picture)

    def labels(self, subset: Subset) -> Rows:
        """By which an answer is right."""
        return subset.rows if self.by_sample else subset.labels

    @torch.no_grad()
    def embed(self, model: nn.Module, subset: Subset, head: bool = True) -> Tensor:
        """The embeddings of all images, in order, on every process."""
        rank, size, of_y = self.team.rank, self.team.size, subset.index is self.y
        spec = self.spec_of_y if of_y else self.spec
        batches = EvalBatches(
            subset.index, subset.rows, subset.labels, spec, self.batch, rank, size
        )
        # Under ZeRO-3 every process must take part in every forward: a process whose share needs one
        # batch less than the largest repeats batch 0 and discards the output.
        largest = max(len(own_share(len(subset.rows), r, size)) for r in range(size))
        count = -(-largest // self.batch)
        order = [n if n < len(batches) else 0 for n in range(count)]
        model.eval()
        parts = []
        coming = loader(batches, order, *self.loading)
        with closing(Ahead(batches, order, subset.index.cache)) as ahead:
            for n in range(count):
                images, _ = self.team.fetch(coming)
                ahead.at(n)
                self.team.meet()
                images = images.to(self.team.device, non_blocking=True)
                if self.two_encoders:
                    x = model(None, images) if of_y else model(images)
                else:
                    x = model(images, head=head)
                parts.append(x if n < len(batches) else x[:0])
        model.train()
        X = gather_shares(torch.cat(parts), len(subset.rows))
        bad = int((~X.isfinite().all(dim=1)).sum())
        if bad:
            raise NotFiniteError(f"{bad} of {len(X)} embeddings hold NaN or infinity")
        return X

    def picture(self, X: Tensor, subset: Subset, G: Tensor, others: Subset) -> Image.Image:
        """Some queries, the same ones throughout a run, and their nearest neighbours."""
        reader, of_others = ImageReader(subset.index), ImageReader(others.index)

        def image(reader: ImageReader, row: Any) -> Image.Image:
            return open_photo(reader.read(int(row))).whole()

        rows = []
        for q in some(len(X), QUERIES):
            S = G @ X[q]
            if others is subset:
                S[q] = -torch.inf
            top = S.topk(min(NEIGHBOURS, len(S) - (others is subset))).indices.tolist()
            right = self.labels(others)[top] == self.labels(subset)[q]
            found = [
                Found(image(of_others, others.rows[j]), bool(r))
                for j, r in zip(top, right, strict=True)
            ]
            rows.append((image(reader, subset.rows[q]), found))
        return retrieval_picture(rows)

    def decorate(self, folder: Path, config: Config, found: Evaluation) -> None:
        """What is pleasant to have beside the result, written after it: the picture, and TensorBoard's
        table of runs and projector. A failure is only a warning."""
        try:
            if found.picture:
                write_picture(folder, found.picture)
            some = self.projected(found.embeddings)
            # these differ between runs and are no hyper-parameters
            hidden = EXECUTION | {"run.name"}
            settings = {key: v for key, v in flatten(config).items() if key not in hidden}
            self.journal.log(events.End(settings, *some))
            if self.team.problem:
                raise self.team.problem
        except Exception as error:  # noqa: BLE001  the training must not be lost for it
            self.team.say(f"warning: no picture, or no projector in TensorBoard: {error!r}")

    def projected(self, embeddings: list[Tensor]) -> tuple[Tensor, list[str], Tensor | None]:
        """Embeddings and class names of some test images, and their thumbnails, of all datasets."""
        vectors, names, pictures = [], [], []
        for X, subset, name in zip(embeddings, self.subsets["test"], self.names, strict=True):
            chosen = some(len(X), PROJECTED // len(embeddings))
            prefix = f"{name}/" if len(embeddings) > 1 else ""
            labels = subset.labels[chosen]
            vectors.append(X[chosen].cpu())
            names += [prefix + subset.index.class_names[label] for label in labels.tolist()]
            if isinstance(self.spec, Input):
                spec = replace(self.spec, size=THUMBNAIL, resize=THUMBNAIL)
                batches = EvalBatches(subset.index, subset.rows[chosen], labels, spec, len(chosen))
                pictures.append(batches[0][0])
        return torch.cat(vectors), names, torch.cat(pictures) if pictures else None


def of_tower(subset: Subset, y: Index) -> Subset:
    """The same rows in the shards of y."""
    gallery = subset.gallery and replace(subset.gallery, index=y)
    return replace(subset, index=y, gallery=gallery)


def mean(found: list[Evaluation], names: list[str]) -> Evaluation:
    """One evaluation of several datasets, or directions: the mean of each score over them, then those of
    each; the pictures below each other."""
    if len(found) == 1:
        return found[0]
    scores = {key: sum(each.scores[key] for each in found) / len(found) for key in found[0].scores}
    for name, each in zip(names, found, strict=True):
        scores |= {f"{name}/{key}": score for key, score in each.scores.items()}
    pictures = [each.picture for each in found if each.picture]
    embeddings = [X for each in found for X in each.embeddings]
    return Evaluation(scores, embeddings, stacked(pictures) if pictures else None)


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
