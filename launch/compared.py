"""Our results among those of other systems: what the paper compares MS with (configs/paper/), and what
others measured of MS (configs/paper/by_others/)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dml.config import parse
from launch.paper import FOLDER, Table
from launch.records import Study

BACKBONES = {
    "bn_inception": "BN-Inception",
    "resnet50": "ResNet-50",
}  # others are named as in a config


@dataclass(frozen=True)
class Comparison:
    """A table of the report under its title."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def comparisons(study: Study, tables: Sequence[Table]) -> Iterator[Comparison]:
    """Those of the study's datasets. Scores of held-out classes are not compared with others."""
    if study.score != "recall@1":
        return
    for table in tables:
        if table.others and table.dataset in study.datasets:
            yield _with_other_systems(study, table)
    for dataset in sorted(study.datasets):
        path = FOLDER / "by_others" / f"{dataset}.yaml"
        if path.exists():
            yield _by_others(parse(path.read_text(encoding="utf-8")))


def _with_other_systems(study: Study, table: Table) -> Comparison:
    keys = list(table.others[0].recall)
    rows = []
    for group in study.groups:
        if group.settings["data.dataset"] == table.dataset and group.finished:
            backbone = str(group.settings["model.backbone"])
            means = {key: spread.mean for key in keys if (spread := group.spread(key))}
            rows.append(
                (
                    *(f"ours: {group.label}", str(group.settings["model.embedding_size"])),
                    *(BACKBONES.get(backbone, backbone), *_percent(keys, means, 100)),
                )
            )
    for row in table.rows:
        size = str(row.where["model.embedding_size"])
        rows.append(("MS, the paper", size, "BN-Inception", *_percent(keys, row.recall)))
    for other in table.others:
        scores = _percent(keys, other.recall)
        rows.append((other.method, str(other.dimensions), other.backbone, *scores))
    titles = [key.replace("recall", "Recall") for key in keys]
    title = f"The systems of {table.table}, as published"
    return Comparison(title, ("system", "dimensions", "backbone", *titles), tuple(rows))


def _percent(
    keys: Sequence[str], scores: Mapping[str, float | None], scale: float = 1
) -> tuple[str, ...]:
    found = (scores.get(key) for key in keys)
    return tuple("" if score is None else f"{scale * score:.1f}" for score in found)


def _by_others(tree: Mapping[str, Any]) -> Comparison:
    keys = tree["scores"]
    rows = tuple(
        (
            *(row["system"], str(row["dimensions"]), row["backbone"]),
            *_percent(keys, dict(zip(keys, row["scores"], strict=True))),
            row["source"],
        )
        for row in tree["rows"]
    )
    title = f"MS on {tree['dataset']} as measured by others, neither its authors nor us"
    return Comparison(title, ("system", "dimensions", "backbone", *keys, "source"), rows)
