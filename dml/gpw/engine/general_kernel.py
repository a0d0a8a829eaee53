"""A tile of negatives of any loss, through its statistics and weights.

    statistics:    every statistic of the stage, of some rows of the tile at a time
    weights:       w_ij from the statistics of row i, w_ji from those of column j if the columns are
                   anchors; their sum into S

Every operation makes a new tensor, so a tile is worked on in parts of a few rows that, with a few
results of the same size, stay in the cache.

Shapes: R x C tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from dml.gpw.engine.tiles import row_parts
from dml.gpw.engine.views import AnchorSet, against_negatives, of_columns, select
from dml.gpw.engine.workspace import Workspace
from dml.gpw.statistics import Partial, Scope, Statistic, Statistics, masked
from dml.gpw.weighting import PairLoss


class GeneralKernel:
    def __init__(self, loss: PairLoss, part_pairs: int | None = None) -> None:
        self.loss, self.part_pairs = loss, part_pairs

    @staticmethod
    def of(loss: PairLoss, workspace: Workspace, part_pairs: int | None) -> GeneralKernel:
        """In the form in which sweeps ask for a kernel."""
        return GeneralKernel(loss, part_pairs)

    def prepare_statistics(
        self, stage: Mapping[str, Statistic], t: Statistics
    ) -> GeneralStatistics:
        return GeneralStatistics(self.loss, stage, t, self.part_pairs)

    def prepare_weights(self, rows: AnchorSet, columns: AnchorSet | None) -> GeneralWeights:
        return GeneralWeights(self.loss, rows, columns, self.part_pairs)


@dataclass(frozen=True)
class GeneralStatistics:
    """stage: what is computed. t: the statistics of earlier stages of the anchors in the rows."""

    loss: PairLoss
    stage: Mapping[str, Statistic]
    t: Statistics
    part_pairs: int | None

    @property
    def symmetric(self) -> bool:
        return all(s.symmetric for s in self.stage.values())

    def select(self, rows: slice) -> GeneralStatistics:
        return replace(self, t=select(self.loss, self.t, rows))

    def reduce(self, S: Tensor, keep: Tensor | None) -> dict[str, Partial]:
        parts = []
        for rows in row_parts(S, self.part_pairs):
            t = against_negatives(self.loss, select(self.loss, self.t, rows))
            some, kept = S[rows], None if keep is None else keep[rows]
            parts.append({name: s.reduce(some, kept, t) for name, s in self.stage.items()})
        return {
            name: of_all_rows(s, [part[name] for part in parts]) for name, s in self.stage.items()
        }

    def merge(self, a: Mapping[str, Partial], b: Mapping[str, Partial]) -> dict[str, Partial]:
        return {name: s.merge(a[name], b[name]) for name, s in self.stage.items()}

    def finish(self, partials: Mapping[str, Partial]) -> dict[str, Tensor]:
        return {name: s.finish(partials[name]) for name, s in self.stage.items()}


def of_all_rows(statistic: Statistic, parts: list[Partial]) -> Partial:
    """The partial result of all rows of a tile from those of its parts."""
    if len(parts) == 1:
        return parts[0]
    if statistic.scope is Scope.BATCH:
        return reduce(statistic.merge, parts)
    return tuple(torch.cat(x) for x in zip(*parts, strict=True))


@dataclass(frozen=True)
class GeneralWeights:
    """of_rows, of_columns: the anchors; None: the columns are none."""

    loss: PairLoss
    of_rows: AnchorSet
    of_columns: AnchorSet | None
    part_pairs: int | None

    def weigh(self, S: Tensor, keep: Tensor | None, rows: slice | Tensor, columns: slice) -> None:
        loss, anchors = self.loss, self.of_columns
        t_rows, row_is = select(loss, self.of_rows.t, rows), self.is_anchor_of(rows)
        t_columns: Statistics = {}
        column_is = None
        if anchors is not None:
            t_columns = of_columns(loss, anchors.t, columns)
            column_is = None if anchors.is_anchor is None else anchors.is_anchor[columns][None]
        for part in row_parts(S, self.part_pairs):
            some, kept = S[part], None if keep is None else keep[part]
            part_is = None if row_is is None else row_is[part]
            if anchors is self.of_rows and loss.same_from_both:
                w = self.weights(some, kept, t_columns, None)
                torch.add(masked(w, part_is, 0), masked(w, column_is, 0), out=some)
                continue
            t_part = against_negatives(loss, select(loss, t_rows, part))
            w = self.weights(some, kept, t_part, part_is)
            if anchors is None:
                some.copy_(w)
            else:
                w_back = self.weights(some, kept, t_columns, column_is)
                torch.add(w, w_back, alpha=anchors.share, out=some)

    def weigh_rows(self, S: Tensor, keep: Tensor | None, rows: slice | Tensor) -> Tensor:
        """w_ij, of the anchors in the rows alone."""
        t = against_negatives(self.loss, select(self.loss, self.of_rows.t, rows))
        return self.weights(S, keep, t, self.is_anchor_of(rows))

    def is_anchor_of(self, rows: slice | Tensor) -> Tensor | None:
        """Which of these rows are anchors, against a tile; None: all."""
        is_anchor = self.of_rows.is_anchor
        return None if is_anchor is None else is_anchor[rows][:, None]

    def weights(
        self, S: Tensor, keep: Tensor | None, t: Statistics, is_anchor: Tensor | None
    ) -> Tensor:
        """w; zero for what is not a negative pair, or has no anchor."""
        return masked(masked(self.loss.negative_weight(S, t), keep, 0), is_anchor, 0)
