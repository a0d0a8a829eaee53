"""The sections of a config: frozen dataclasses with the default, rule and meaning of every key.

`python -m dml.config` prints them; docs/config.md is that text.
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, get_type_hints

from dml.catalogue import BACKBONES, DATASETS, Parameter
from dml.rules import (
    ANY,
    FOLDER_NAME,
    INCREASING,
    KS,
    NOT_EMPTY,
    POSITIVE,
    SEED,
    SHARE,
    Rule,
    at_least,
    one_of,
)

BACKBONE = Rule(
    f"one of {', '.join(BACKBONES)}, or timm:NAME",
    lambda name: name in BACKBONES or re.fullmatch(r"timm:.+", name) is not None,
    BACKBONES,
)


def key(
    meaning: str,
    *,
    default: Any = MISSING,
    rule: Rule = ANY,
    example: object = None,
    execution: bool = False,
) -> Any:
    """A key of a section.

    example: shown in errors where there is no default to show. execution: the key says how a run is
    carried out, not what it learns; it may change when the run is resumed, and a report ignores it.
    """
    metadata = {"meaning": meaning, "rule": rule, "example": example, "execution": execution}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Run:
    name: str = key("the run's folder below run.dir", rule=FOLDER_NAME, example="my_run")
    dir: str = key("where runs are kept", default="runs", rule=NOT_EMPTY, execution=True)
    seed: int = key("of weights, batches and crops", default=0, rule=SEED)
    log_steps: int = key("steps between two lines of metrics", default=10, rule=at_least(1))


@dataclass(frozen=True, kw_only=True)
class Data:
    dataset: str = key(
        "which dataset the shards hold; `folder` for your own images",
        rule=one_of(DATASETS),
        example="sop",
    )
    shards: str = key(
        "the folder that shards/build.py wrote", rule=NOT_EMPTY, example="data/sop", execution=True
    )
    workers: int = key(
        "loader processes per training process", default=4, rule=at_least(0), execution=True
    )
    prefetch: int = key(
        "batches each worker keeps ready", default=2, rule=at_least(1), execution=True
    )
    size: int | None = key(
        "side of the crop in pixels; null: the backbone's own",
        default=None,
        rule=at_least(1),
        example=64,
    )
    resize: int | None = key(
        "short side of a test image before its centre crop; null: as the backbone has it",
        default=None,
        rule=at_least(1),
        example=72,
    )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """P classes x M images per global batch."""

    classes: int = key("P, the classes per global batch", rule=at_least(2), example=16)
    # with one image per class no anchor would have a positive
    per_class: int = key("M, the images per class", default=5, rule=at_least(2))


@dataclass(frozen=True, kw_only=True)
class Model:
    backbone: str = key("the network", default="bn_inception", rule=BACKBONE)
    weights: str | None = key(
        "a file; `pretrained` for the weights that a package carries; null: random",
        default=None,
        rule=NOT_EMPTY,
        example="weights/x.pth",
    )
    embedding_size: int = key("d, the dimensions of an embedding", default=512, rule=at_least(1))
    batchnorm: Literal["frozen", "synced", "local"] = key(
        "`frozen` keeps the statistics and trains scale and shift, `synced` takes the statistics of "
        "the global batch (GPUs only), `local` those of the process",
        default="frozen",
    )


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Parameters are those of the catalogue, complete; in YAML they stand beside the name."""

    name: str = "multi_similarity"
    pairs: tuple[tuple[str, Parameter], ...]

    @property
    def parameters(self) -> dict[str, Parameter]:
        return dict(self.pairs)


@dataclass(frozen=True, kw_only=True)
class Engine:
    kind: Literal["auto", "streaming", "triton"] = key(
        "what computes the loss; `auto` is `triton` for multi-similarity on a CUDA GPU, else "
        "`streaming`",
        default="auto",
        execution=True,
    )
    tile: int = key(
        "rows and columns of S computed at a time", default=1024, rule=at_least(1), execution=True
    )
    micro_batch: int | None = key(
        "images per micro-batch and process (gradient caching); null: all at once",
        default=None,
        rule=at_least(1),
        example=32,
        execution=True,
    )
    precision: Literal["fp32", "bf16", "fp64"] = key(
        "of the model; the loss is computed in fp32 at least", default="fp32"
    )


@dataclass(frozen=True, kw_only=True)
class Optim:
    """Adam is the paper's, lr 1e-5 its supplement's, weight_decay its authors' code's."""

    name: Literal["adam", "adamw", "sgd"] = key("the optimizer", default="adam")
    lr: float = key("learning rate of the backbone", default=1e-5, rule=POSITIVE)
    head_lr_factor: float = key(
        "learning rate of the new last layer, as a multiple of lr", default=1.0, rule=POSITIVE
    )
    momentum: float = key("of sgd", default=0.9, rule=SHARE)
    weight_decay: float = key("", default=5e-4, rule=at_least(0))
    schedule: Literal["constant", "step", "cosine"] = key(
        "`step` multiplies lr by gamma at every milestone, `cosine` lowers it to zero at the end",
        default="constant",
    )
    milestones: tuple[int, ...] = key(
        "steps, for `step`", default=(), rule=INCREASING, example=[1200, 2400]
    )
    gamma: float = key("factor per milestone, for `step`", default=0.1, rule=POSITIVE)
    warmup_steps: int = key("steps of linear warm-up", default=0, rule=at_least(0))


@dataclass(frozen=True, kw_only=True)
class Length:
    """Exactly one is given; dml.plan derives the others."""

    steps: int | None = key("updates", default=None, rule=POSITIVE, example=3000)
    epochs: float | None = key(
        "passes over the training images",
        default=None,
        rule=Rule("above 0, at most 1e6", lambda x: 0 < x <= 1e6),
        example=50,
    )
    images: int | None = key(
        "images seen, rounded up to whole steps", default=None, rule=POSITIVE, example=240_000
    )


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Without held-out classes, as in the paper, the last step is reported: evaluations during
    training then show the test classes, and nothing is chosen by them."""

    ks: tuple[int, ...] = key(
        "the K of Recall@K; left out: those of the dataset", rule=KS, example=[1, 10]
    )
    every_steps: int | None = key(
        "steps between evaluations; null: only at the end",
        default=None,
        rule=at_least(1),
        example=500,
    )
    validation_classes: float = key(
        "share of the training classes held out to choose the best step", default=0.0, rule=SHARE
    )
    patience: int | None = key(
        "stop after so many evaluations of the held-out classes without a better one",
        default=None,
        rule=at_least(1),
        example=5,
    )
    untrained: bool = key("evaluate the test classes before the first step, too", default=False)


@dataclass(frozen=True, kw_only=True)
class Save:
    every_minutes: float = key(
        "minutes between checkpoints", default=10.0, rule=POSITIVE, execution=True
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    run: Run
    data: Data
    batch: Batch
    model: Model
    loss: Loss
    engine: Engine
    optim: Optim
    length: Length
    eval: Eval
    save: Save


SECTIONS: Mapping[str, Any] = get_type_hints(Config)
KEYS = [f"{name}.{f.name}" for name in SECTIONS if name != "loss" for f in fields(SECTIONS[name])]
EXECUTION = frozenset(
    f"{name}.{f.name}"
    for name, section in SECTIONS.items()
    for f in fields(section)
    if f.metadata.get("execution")
)
"""The keys that say how a run is carried out and not what it learns."""
