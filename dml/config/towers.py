"""The section of two towers, and what a plan refuses of it."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from dml.catalogue import PROXY_LOSSES
from dml.config.keys import key
from dml.rules import PATH, Problem

VIEWS = "views"


@dataclass(frozen=True, kw_only=True)
class Towers:
    """A second tower, y: every sample x is compared with the y of all samples, instead of with other x."""

    y: str | None = key(
        "`views`: another crop of the same image, for the same encoder; or a folder of shards, or its "
        "address, whose row i belongs with row i of `data.shards`; null: there is one tower",
        default=None,
        rule=PATH,
        example="data/texts",
        later=True,
    )
    labels: Literal["class", "sample"] = key(
        "which x and y are a positive pair: those of the same class, or only those of the same sample",
        default="class",
        later=True,
    )
    shared: bool = key(
        "whether x and the y of a folder have the same encoder; false: one each, of the same kind",
        default=False,
        later=True,
    )

    @property
    def folder(self) -> str | None:
        """The shards of y; None if it has none of its own."""
        return None if self.y == VIEWS else self.y

    @property
    def two_encoders(self) -> bool:
        return self.folder is not None and not self.shared


def contradictions_of_towers(
    towers: Towers, per_class: int | None, backbone: str | None, folders: int | None
) -> Iterator[Problem]:
    """Problems of several keys together. folders: how many data.shards has. The others are None if their
    sections have problems."""
    for each in fields(towers):
        value = getattr(towers, each.name)
        if towers.y is None and value != each.default:
            fix = f"set towers.y, or towers.{each.name}={str(each.default).lower()}"
            yield Problem(f"towers.{each.name}", value, "has no effect without towers.y", fix)
    if towers.y == VIEWS and towers.shared:
        text, fix = "two views always have the same encoder", "set towers.shared=false"
        yield Problem("towers.shared", True, text, fix)
    if towers.y == VIEWS and backbone == "none":
        text = "are crops of images, but model.backbone=none takes features"
        fix = "set towers.y to shards of other features, or another model.backbone"
        yield Problem("towers.y", VIEWS, text, fix)
    if towers.folder and folders is not None and folders > 1:
        text = f"its rows belong with those of one folder, but data.shards has {folders}"
        yield Problem("towers.y", towers.y, text, "name one folder in data.shards")
    if towers.y is None and per_class == 1:
        text = "must be at least 2: without two towers a single image of a class has no positive"
        yield Problem("batch.per_class", 1, text, "set batch.per_class=2, or towers.y")


def problems_of_towers(
    towers: Towers, loss: str, memory: int | None, kind: str, frozen: bool
) -> Iterator[Problem]:
    """What cannot be together with two towers. loss: its name. memory: its size. kind: of the engine.
    frozen: whether features before the head are evaluated."""
    if towers.y is None:
        return
    if loss in PROXY_LOSSES:
        text = f"{loss} compares samples with proxies, not with another tower"
        yield Problem("towers.y", towers.y, text, "set towers.y=null, or another loss")
    if memory is not None:
        text = "a memory is for one set of embeddings, not for two towers"
        yield Problem("memory.size", memory, text, "set memory.size=null or towers.y=null")
    if kind == "triton":
        text = "these kernels compare a batch with itself, not two towers"
        yield Problem("engine.kind", kind, text, "set engine.kind=auto")
    if towers.folder and frozen:
        text = "features of two encoders, before their heads, cannot be compared with each other"
        yield Problem("eval.frozen", True, text, "set eval.frozen=false")
