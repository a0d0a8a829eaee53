"""The paper's tables (configs/paper/), found by the settings of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dml.config import CONFIGS, parse
from launch.records import Study

FOLDER = CONFIGS / "paper"


@dataclass(frozen=True)
class Row:
    """where: the settings of this row. recall: recall@K -> percent, as printed."""

    where: Mapping[str, Any]
    recall: Mapping[str, float]


@dataclass(frozen=True)
class Other:
    """A system that a table compares MS with. recall: a score that is not printed is None."""

    method: str
    dimensions: int
    backbone: str
    recall: Mapping[str, float | None]


@dataclass(frozen=True)
class Table:
    """by: the setting in which its rows differ. where: the settings that they share. note: a remark
    that is printed with it. others: the systems it compares with."""

    table: str
    dataset: str
    by: str
    where: Mapping[str, Any]
    rows: tuple[Row, ...]
    note: str | None
    others: tuple[Other, ...]

    @property
    def digits(self) -> int:
        printed = [str(score) for row in self.rows for score in row.recall.values()]
        return max(len(score.partition(".")[2]) for score in printed)

    def row_for(self, settings: Mapping[str, Any]) -> Row | None:
        """The row for a run of ours.

        On another dataset only the settings of the row have to agree: then it is a trend to compare
        with, not a score.
        """
        shared = self.where if settings["data.dataset"] == self.dataset else {}
        for row in self.rows:
            if all(settings.get(key) == value for key, value in {**shared, **row.where}.items()):
                return row
        return None


@dataclass(frozen=True)
class Score:
    """recall: Recall@1 in percent."""

    recall: float
    table: Table


@cache
def read_tables(folder: Path = FOLDER) -> tuple[Table, ...]:
    return tuple(_read(path) for path in sorted(folder.glob("*.yaml")))


def _read(path: Path) -> Table:
    tree = parse(path.read_text(encoding="utf-8"))
    keys = [f"recall@{k}" for k in tree["ks"]]
    rows = tuple(
        Row(row["where"], dict(zip(keys, row["recall"], strict=True))) for row in tree["rows"]
    )
    others = tuple(
        Other(
            row["method"],
            row["dimensions"],
            row["backbone"],
            dict(zip(keys, row["recall"], strict=True)),
        )
        for row in tree.get("others", ())
    )
    title, note = tree["table"], tree.get("note")
    return Table(title, tree["dataset"], tree["by"], tree["where"], rows, note, others)


def tables_for(study: Study, tables: Sequence[Table]) -> tuple[Table, ...]:
    """The tables to show with a study: those that vary the same setting, or else its dataset's. Scores
    of held-out classes do not stand beside the paper's."""
    if study.score != "recall@1":
        return ()
    varied = any(table.by in study.varying for table in tables)

    def belongs(table: Table) -> bool:
        same = table.by in study.varying if varied else table.dataset in study.datasets
        return same and any(table.row_for(group.settings) for group in study.groups)

    found = [table for table in tables if belongs(table)]
    ours = [table for table in found if table.dataset in study.datasets]
    return tuple(ours or found)


def paper_score(settings: Mapping[str, Any], tables: Sequence[Table]) -> Score | None:
    """The score of the first table that has one for this dataset and these settings."""
    for table in tables:
        if table.dataset == settings.get("data.dataset") and (row := table.row_for(settings)):
            return Score(row.recall["recall@1"], table)
    return None
