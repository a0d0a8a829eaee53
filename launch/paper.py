"""The numbers of the paper (configs/paper/), found by the settings they were measured with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dml.config import parse
from launch.records import Study

FOLDER = Path(__file__).parents[1] / "configs" / "paper"


@dataclass(frozen=True)
class Row:
    method: str
    where: Mapping[str, Any]
    recall: Mapping[str, float]  # recall@K -> percent, as printed


@dataclass(frozen=True)
class Table:
    """by: the setting in which its rows differ. where: what they share. note: said beside it."""

    table: str
    dataset: str
    by: str
    where: Mapping[str, Any]
    rows: tuple[Row, ...]
    note: str | None

    @property
    def digits(self) -> int:
        printed = [str(score) for row in self.rows for score in row.recall.values()]
        return max(len(score.partition(".")[2]) for score in printed)

    def of(self, settings: Mapping[str, Any]) -> Row | None:
        """Its row for a run of ours. On another dataset only what the rows differ in has to agree:
        a shape to compare with, not a score."""
        shared = self.where if settings["data.dataset"] == self.dataset else {}
        for row in self.rows:
            if all(settings.get(key) == value for key, value in {**shared, **row.where}.items()):
                return row
        return None


def read_tables(folder: Path = FOLDER) -> tuple[Table, ...]:
    return tuple(_read(path) for path in sorted(folder.glob("*.yaml")))


def _read(path: Path) -> Table:
    tree = parse(path.read_text(encoding="utf-8"))
    keys = [f"recall@{k}" for k in tree["ks"]]
    rows = tuple(
        Row(
            row["method"],
            row["where"],
            dict(zip(keys, row["recall"], strict=True)),
        )
        for row in tree["rows"]
    )
    return Table(tree["table"], tree["dataset"], tree["by"], tree["where"], rows, tree.get("note"))


def beside(study: Study, tables: Sequence[Table]) -> tuple[Table, ...]:
    """The tables that belong next to a study: those of what it varies, or else of its dataset."""
    varied = any(table.by in study.varying for table in tables)

    def belongs(table: Table) -> bool:
        same = table.by in study.varying if varied else table.dataset in study.datasets
        return same and any(table.of(group.settings) for group in study.groups)

    found = [table for table in tables if belongs(table)]
    ours = [table for table in found if table.dataset in study.datasets]
    return tuple(ours or found)
