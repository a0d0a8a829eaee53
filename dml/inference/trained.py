"""The model of a finished run, and images embedded by it.

model = load_trained("runs/icons_mini")
X, readable = embed(model, source, names, unreadable=...)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import UnidentifiedImageError
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from dml.config import Config, Data, Model, load
from dml.data.batches import ImageBatches
from dml.data.loader import loader
from dml.data.preprocessing import Input, eval_image
from dml.data.sources import Matrix, Rows, Source
from dml.data.vectors import Features, features_of
from dml.errors import ConfigError, NotFiniteError, RunError
from dml.models import Embedder, make_model
from dml.models.weights import wrong_types
from dml.run_folder.files import read_json
from dml.run_folder.folder import RESULT
from shards.files import read_bounded
from shards.item import ShardError
from shards.output import Progress
from shards.photo import FORMATS
from shards.vector import decoded

Vectors = NDArray[np.float32]  # n x d
AGAIN = (
    "copy it again, or remove it and result.json and let the same training command write it again"
)


def load_trained(folder: str | Path, tower: str | None = None) -> Embedder:
    """The trained model of a run's folder, for embedding, on a GPU if there is one. tower: of a run with
    two encoders, "x" or "y"; None: x.

    It needs neither the shards nor the weights that training started from. It computes in float32
    where training used bf16.
    """
    folder = Path(folder)
    config, data = read_config(folder), read_model(folder)
    path = folder / "model.safetensors"
    if tower is not None and not config.towers.two_encoders:
        raise RunError(f"--tower {tower}: {folder} has one encoder; leave --tower out")
    try:
        state = load_tensors(data)
        if config.towers.two_encoders:
            state = of_tower(state, tower or "x", path)
        features = features_in(state, path) if config.model.backbone == "none" else None
        settings = replace(config.model, weights=None)
        model = make_model(settings, config.data, config.run.seed, features)
        if config.engine.precision == "fp64":
            model = model.double()
        if wrong := wrong_types(state, model.state_dict()):
            raise unfit(path, wrong[0])
        model.load_state_dict(state)
    except SafetensorError as error:
        raise RunError(f"{path} is damaged ({error}): {AGAIN}") from None
    except RuntimeError as error:  # torch lists every key that does not fit
        raise unfit(path, str(error).splitlines()[1].strip()) from None
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def of_tower(state: Mapping[str, Tensor], tower: str, path: Path) -> dict[str, Tensor]:
    """The weights of one of two encoders, as those of one."""
    prefix = f"{tower}."
    found = {key.removeprefix(prefix): x for key, x in state.items() if key.startswith(prefix)}
    if not found:
        raise unfit(path, f"it has no tower {tower}")
    return found


def features_in(state: Mapping[str, Tensor], path: Path) -> Features:
    """The features that a trained head takes: the columns of its first layer."""
    for key in ("head.weight", "head.layers.0.weight"):
        if key in state and state[key].ndim == 2:
            return Features(state[key].shape[1])
    raise unfit(path, "it has no head")


def load_backbone(
    name: str, weights: str, size: int | None = None, resize: int | None = None
) -> Embedder:
    """A backbone by name that was trained elsewhere, for its features: its head is random. size and
    resize: as in the section data of a config."""
    model = Model(backbone=name, weights=weights)
    data = Data(dataset="folder", shards="none", size=size, resize=resize)
    return make_model(model, data, 0).to("cuda" if torch.cuda.is_available() else "cpu").eval()


def read_config(folder: Path) -> Config:
    path = folder / "config.yaml"
    if not folder.is_dir():
        raise RunError(f"there is no run's folder {folder}: give the folder that dml/train.py made")
    if not path.is_file():
        raise RunError(f"{folder} has no config.yaml: give the folder that dml/train.py made")
    try:
        return load(path)
    except ConfigError as error:
        raise RunError(
            f"{path} is not a config of this version ({error.problems[0]}): embed with the version "
            "of dml that trained the run"
        ) from None


def unfit(path: Path, reason: str) -> RunError:
    return RunError(
        f"{path} does not fit the config.yaml beside it ({reason}): both must come from the same run, "
        "and from this version of dml"
    )


def read_model(folder: Path) -> bytes:
    """The trained weights, compared with the checksum in result.json if there is one."""
    path = folder / "model.safetensors"
    try:
        data = read_bounded(path)
        result = read_json(folder / RESULT) or {}
    except FileNotFoundError:
        raise RunError(
            f"{folder} has no model.safetensors: training has not finished; the same training "
            "command resumes it"
        ) from None
    except OSError as error:
        raise RunError(f"{error.filename} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise RunError(f"{folder / RESULT} is damaged: restore or remove it") from None
    expected = result.get("model_sha256")
    if expected is not None and hashlib.sha256(data).hexdigest() != expected:
        raise RunError(
            f"{path} is damaged (its checksum differs from that in result.json): {AGAIN}"
        )
    return data


def model_sha256(folder: Path) -> str:
    """The checksum that identifies a trained model."""
    read_config(folder)
    return hashlib.sha256(read_model(folder)).hexdigest()


def weights_sha256(model: Embedder) -> str:
    """The checksum that identifies a backbone."""
    return hashlib.sha256(save_tensors(model.backbone.state_dict())).hexdigest()


class NamedBatches(ImageBatches):
    """By number: batches of images, and whether each is readable; an unreadable one is black. Vectors
    of features in the same way."""

    spec: Input | Features

    def __init__(
        self, source: Source, names: Sequence[str], spec: Input | Features, batch: int
    ) -> None:
        self.source, self.names, self.spec, self.most = source, names, spec, batch

    def __len__(self) -> int:
        return math.ceil(len(self.names) / self.most)

    def count(self, n: int) -> int:
        return len(self.names[n * self.most : (n + 1) * self.most])

    def into(self, out: NDArray[Any], n: int, part: range) -> Tensor:
        first, readable = n * self.most, []
        for i, name in enumerate(self.names[first + part.start : first + part.stop]):
            image = image_or_reason(self.source, name, self.spec)
            out[i] = 0 if isinstance(image, str) else image
            readable.append(not isinstance(image, str))
        return torch.tensor(readable)


def image_or_reason(source: Source, name: str, spec: Input | Features) -> NDArray[Any] | str:
    """The image or vector as evaluation shows it to the model, or why there is none."""
    try:
        data = source.read(name)
        return np.asarray(eval_image(data, spec)) if isinstance(spec, Input) else decoded(data)
    except UnidentifiedImageError:
        return f"none of {', '.join(FORMATS)}"
    # decoders raise almost any exception on damaged bytes: OSError, SyntaxError, struct.error, ...
    except Exception as error:  # noqa: BLE001
        text = (error.strerror if isinstance(error, OSError) else None) or str(error)
        return " ".join(text.split()) or type(error).__name__


def refuse_other_kind(source: Source, spec: Input | Features) -> None:
    """ShardError if a model takes images and the source has vectors, or the other way round."""
    found = Features(source.size) if isinstance(source, Matrix) else None
    if isinstance(source, Rows):
        found = features_of([source.reader.index])
    expected = spec if isinstance(spec, Features) else None
    if found != expected:
        has, takes = (
            "images" if each is None else f"vectors of {each.size:,} numbers"
            for each in (found, expected)
        )
        raise ShardError(f"the model takes {takes}, but {source.root} has {has}: give it {takes}")


@torch.no_grad()
def embed(
    model: Embedder,
    source: Source,
    names: Sequence[str],
    *,
    unreadable: Callable[[Path, str], None],
    batch: int = 256,
    workers: int = 0,
    features: bool = False,
) -> tuple[Vectors, NDArray[np.bool_]]:
    """An embedding per name, in order, and which of them are of readable images. `unreadable` is called
    for each of the others, in order, with the reason; it may raise. features: what comes before the
    head instead."""
    refuse_other_kind(source, model.spec)
    run: Callable[[Tensor], Tensor] = model.features if features else model
    size = model.feature_size if features else model.embedding_size
    X = np.empty((len(names), size), np.float32)
    readable = np.empty(len(names), np.bool_)
    batches = NamedBatches(source, names, model.spec, batch)
    with closing(Progress(len(names), "image", leave=False)) as progress:
        for n, (images, fine) in enumerate(loader(batches, range(len(batches)), workers)):
            part = slice(n * batch, n * batch + len(images))
            readable[part] = fine.numpy()
            for name in compress(names[part], ~readable[part]):
                again = image_or_reason(source, name, model.spec)
                reason = again if isinstance(again, str) else "readable at the second try only"
                unreadable(source.root / name, reason)
            images = images.to(model.device, non_blocking=True)
            X[part] = run(images).float().cpu().numpy()
            progress.update(len(images))
    bad = int((~np.isfinite(X[readable]).all(1)).sum())
    if bad:
        what = "features" if features else "embeddings"
        raise NotFiniteError(
            f"{bad} of {int(readable.sum())} {what} hold NaN or infinity: the training of this "
            "model diverged, train it again with a lower optim.lr"
        )
    return X, readable
