"""What a run has to tell its loggers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from PIL import Image
from torch import Tensor

from dml.gpw.monitor import PairReport


@dataclass(frozen=True)
class Training:
    """metrics: what was learned, a function of the config. timing: what it took."""

    step: int
    metrics: Mapping[str, float | None]
    timing: Mapping[str, float]


@dataclass(frozen=True)
class Pairs:
    step: int
    report: PairReport


@dataclass(frozen=True)
class Evaluation:
    step: int
    split: str
    scores: Mapping[str, float]
    picture: Image.Image | None  # of images only


@dataclass(frozen=True, eq=False)
class End:
    """settings: section.key -> value. embeddings, names, thumbnails: of some test images, with their
    class names, n x h x w x 3 uint8; features have no thumbnails."""

    settings: Mapping[str, object]
    embeddings: Tensor
    names: Sequence[str]
    thumbnails: Tensor | None


Event = Training | Pairs | Evaluation | End
