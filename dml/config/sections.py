"""The sections of a config: frozen dataclasses with the default, rule and meaning of every key.

`python -m dml.config` prints them; docs/config.md is that text.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_type_hints

from dml.catalogue import DATASETS, Parameter
from dml.config.keys import BACKBONE, PART, SIZES, TRACKER_NAMES, WEIGHTS, key
from dml.config.remembering import Memory
from dml.config.towers import Towers
from dml.rules import (
    FOLDER_NAME,
    INCREASING,
    KS,
    MOST_STEPS,
    PATH,
    PATHS,
    POSITIVE,
    SEED,
    SHARE,
    STEPS,
    Rule,
    at_least,
    between,
    one_of,
)

MOST_PIXELS, MOST_WORKERS = 10_000, 8  # workers: where data.workers is null


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the run is called, where it is kept, and its seed."""

    name: str = key("name of the run's folder inside `run.dir`", rule=FOLDER_NAME, example="my_run")
    dir: str = key("the folder that holds the runs", default="runs", rule=PATH, execution=True)
    seed: int = key("seed of the random weights, the batches and the crops", default=0, rule=SEED)
    log_steps: int = key("steps between two lines of metrics.jsonl", default=10, rule=STEPS)
    trackers: str | None = key(
        "loggers beside TensorBoard, through accelerate, as in `wandb` or `wandb, mlflow`; null: none",
        default=None,
        rule=TRACKER_NAMES,
        execution=True,
    )


@dataclass(frozen=True, kw_only=True)
class Data:
    """The images or feature vectors, and how they are loaded."""

    dataset: str = key(
        "the dataset in the shards; `folder` for your own images",
        rule=one_of(DATASETS),
        example="sop",
    )
    shards: str | tuple[str, ...] = key(
        "the folder that `shards/build.py` wrote, or its address (https://, s3:// or file://), or a list "
        "of such folders, whose labels are kept apart",
        rule=PATHS,
        example="data/sop",
        execution=True,
    )
    cache: str | None = key(
        "a folder of this machine for shards that come from a server; its processes share it",
        default=None,
        rule=PATH,
        example="/scratch/shards",
        execution=True,
    )
    cache_gib: float | None = key(
        "GiB that `data.cache` may hold; what is needed last leaves first; null: no limit",
        default=None,
        rule=POSITIVE,
        example=100,
        execution=True,
    )
    remote: Literal["cache", "range"] = key(
        "shards on a server: `cache` downloads them ahead of their use; `range` reads image by image, "
        "for a disk that is too small",
        default="cache",
        execution=True,
    )
    verify: bool = key(
        "compare every shard with its checksum before training", default=False, execution=True
    )
    weights: tuple[float, ...] | None = key(
        "of several folders: how many of the classes of every batch come from each, in proportion; "
        "null: in proportion to their training classes",
        default=None,
        rule=WEIGHTS,
        example=[2, 1],
        later=True,
    )
    workers: int | None = key(
        "loader processes per training process; null: one less than it has cores, at least 1 and at "
        f"most {MOST_WORKERS}",
        default=None,
        rule=between(0, 1000),
        example=4,
        execution=True,
    )
    prefetch: int = key(
        "batches that the loader processes of a training process keep ready together, as far as 512 MiB "
        "of shared memory allow; each of them keeps as many parts of 64 images or fewer",
        default=2,
        rule=between(1, 1000),
        execution=True,
    )
    size: int | None = key(
        "side of the crop in pixels; null: the size the backbone expects",
        default=None,
        rule=between(1, MOST_PIXELS),
        example=64,
    )
    resize: int | None = key(
        "short side of a test image before its centre crop; null: in proportion to `data.size`",
        default=None,
        rule=between(1, MOST_PIXELS),
        example=72,
    )
    smallest_crop: float = key(
        "smallest share of an image that a training crop shows", default=0.16, rule=PART, later=True
    )

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of shards, one or several."""
        return (self.shards,) if isinstance(self.shards, str) else self.shards


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The global batch: P classes x M images, divided among the processes."""

    classes: int = key(
        "P, the number of classes in a global batch", rule=between(2, 10**7), example=16
    )
    per_class: int = key(
        "M, the number of images of each class; 1 needs `towers.y`",
        default=5,
        rule=between(1, 10**6),
    )
    group: Literal["super_class"] | None = key(
        "deal a batch within a group: classes of one super-class, and of the next where it ends; "
        "null: from all classes",
        default=None,
        example="super_class",
        later=True,
    )
    mixed: float = key(
        "share of the batches that are dealt from all classes nevertheless; needs `batch.group`",
        default=0.0,
        rule=SHARE,
        later=True,
    )


@dataclass(frozen=True, kw_only=True)
class Model:
    """The network that turns an image, or a vector of features, into an embedding."""

    backbone: str = key(
        "the network before the head; `none`: the shards hold features, and only the head is trained",
        default="bn_inception",
        rule=BACKBONE,
    )
    weights: str | None = key(
        "a file; `pretrained`: the weights that an installed package carries; null: random",
        default=None,
        rule=PATH,
        example="weights/x.pth",
    )
    embedding_size: int = key(
        "d, the number of dimensions of an embedding", default=512, rule=between(1, 100_000)
    )
    batchnorm: Literal["frozen", "synced", "local"] = key(
        "`frozen` keeps the statistics and trains scale and shift; `synced` uses the statistics of "
        "the global batch (GPUs only); `local` uses those of the process (one process only)",
        default="frozen",
    )
    checkpointing: bool = key(
        "compute the activations of each block again in the backward pass instead of keeping them: less "
        "memory, about a third more time, the same gradient; needs `model.batchnorm: frozen`",
        default=False,
        execution=True,
    )
    head: Literal["linear", "mlp"] = key(
        "what turns features into an embedding: one linear layer, or several with ReLU between them",
        default="linear",
        later=True,
    )
    hidden: tuple[int, ...] = key(
        "sizes of the hidden layers of the head `mlp`",
        default=(),
        rule=SIZES,
        example=[1024],
        later=True,
    )
    dropout: float = key(
        "share of the inputs of each layer of the head that is set to zero in training",
        default=0.0,
        rule=SHARE,
        later=True,
    )


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The pair loss. Its parameters stand beside its name, and defaults depend on the name."""

    name: str = "multi_similarity"
    pairs: tuple[tuple[str, Parameter], ...]

    @property
    def parameters(self) -> dict[str, Parameter]:
        return dict(self.pairs)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How the loss and the model are computed."""

    kind: Literal["auto", "streaming", "triton"] = key(
        "what computes the loss; `auto`: `triton` for multi-similarity on a CUDA GPU, otherwise "
        "`streaming`",
        default="auto",
        execution=True,
    )
    tile: int = key(
        "rows and columns of the similarity matrix in one tile",
        default=1024,
        rule=between(1, 10**6),
        execution=True,
    )
    micro_batch: int | None = key(
        "images per micro-batch and process (gradient caching); null: all images at once",
        default=None,
        rule=between(1, 10**9),
        example=32,
        execution=True,
    )
    precision: Literal["fp32", "bf16", "fp64"] = key(
        "precision of the model; the loss is computed in fp32 or better", default="fp32"
    )
    tf32: bool = key(
        "compute fp32 convolutions and products of the model in TF32 on GPUs that have it: several times "
        "faster, with 10 bits of mantissa; never in the loss or in retrieval",
        default=True,
        execution=True,
    )
    compile: bool = key(
        "compile the model with torch.compile, which takes minutes at the start; the last bits of the "
        "results change",
        default=False,
        execution=True,
    )
    deterministic: bool = key(
        "use deterministic algorithms only, so that a resumed run on the same GPUs is the same to the "
        "bit; slower (a CPU needs no setting for that)",
        default=False,
        execution=True,
    )


@dataclass(frozen=True, kw_only=True)
class Optim:
    """The optimizer. Adam is the paper's choice; lr 1e-5 is from its supplement, weight_decay from its
    authors' code."""

    name: Literal["adam", "adamw", "sgd"] = key("the optimizer", default="adam")
    lr: float = key("learning rate of the backbone", default=1e-5, rule=POSITIVE)
    head_lr_factor: float = key(
        "learning rate of the embedding layer, as a multiple of `optim.lr`",
        default=1.0,
        rule=POSITIVE,
    )
    proxy_lr_factor: float = key(
        "learning rate of what the loss learns (proxies), as a multiple of `optim.lr`; without decay",
        default=100.0,
        rule=POSITIVE,
        later=True,
    )
    momentum: float = key("momentum of sgd", default=0.9, rule=SHARE)
    weight_decay: float = key("weight decay of the whole model", default=5e-4, rule=at_least(0))
    schedule: Literal["constant", "step", "cosine"] = key(
        "`step` multiplies lr by gamma at every milestone; `cosine` lowers it to zero by the end",
        default="constant",
    )
    milestones: tuple[int, ...] = key(
        "steps at which the schedule `step` lowers the learning rate",
        default=(),
        rule=INCREASING,
        example=[1200, 2400],
    )
    gamma: float = key("factor of the learning rate at a milestone", default=0.1, rule=POSITIVE)
    warmup_steps: int = key(
        "steps of linear warm-up at the start", default=0, rule=between(0, MOST_STEPS)
    )


@dataclass(frozen=True, kw_only=True)
class Length:
    """How long to train: give exactly one of the three."""

    steps: int | None = key("updates of the model", default=None, rule=STEPS, example=3000)
    epochs: float | None = key(
        "passes over the training images",
        default=None,
        rule=Rule("above 0, at most 1e6", lambda x: 0 < x <= 1e6),
        example=50,
    )
    images: int | None = key(
        "images seen in total, rounded up to whole steps",
        default=None,
        rule=between(1, 10**15),
        example=240_000,
    )


@dataclass(frozen=True, kw_only=True)
class Eval:
    """When and how to evaluate. Without held-out classes, as in the paper, the last step is reported:
    evaluations during training then use the test classes, and nothing is chosen by them."""

    ks: tuple[int, ...] = key(
        "the K of Recall@K; the default depends on the dataset", rule=KS, example=[1, 10]
    )
    every_steps: int | None = key(
        "steps between evaluations; null: at the end only", default=None, rule=STEPS, example=500
    )
    validation_classes: float = key(
        "fraction of the training classes held out to choose the best step; needs `eval.every_steps`",
        default=0.0,
        rule=SHARE,
    )
    patience: int | None = key(
        "stop after this many evaluations of the held-out classes without a better one; null: never; "
        "needs `eval.validation_classes`",
        default=None,
        rule=STEPS,
        example=5,
    )
    untrained: bool = key("also evaluate the test classes before the first step", default=False)
    frozen: bool = key(
        "also evaluate the features before the head, at the start", default=False, execution=True
    )
    test: bool = key(
        "evaluate the test classes at the end; false: never, for runs that settings are chosen by, which "
        "have the score of the held-out classes instead; needs `eval.validation_classes`",
        default=True,
        execution=True,
    )


@dataclass(frozen=True, kw_only=True)
class Save:
    """When to write checkpoints, besides at the end and after a signal."""

    every_minutes: float = key(
        "minutes between checkpoints", default=10.0, rule=POSITIVE, execution=True
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """A complete config; never changed after loading."""

    run: Run
    data: Data
    batch: Batch
    model: Model
    loss: Loss
    memory: Memory
    towers: Towers
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
"""The keys that say how a run is carried out, not what it learns."""
LATER: Mapping[str, Any] = {
    f"{name}.{f.name}": list(f.default) if isinstance(f.default, tuple) else f.default
    for name, section in SECTIONS.items()
    for f in fields(section)
    if f.metadata.get("later")
} | {"loss.learn": False}
"""The keys that came after runs without them, with their defaults."""
