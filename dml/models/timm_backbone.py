"""Any network of timm by name."""

from typing import Any

import torch

from dml.data.preprocessing import Input
from dml.errors import ModelError
from dml.models.backbone import Backbone


def checkpoint_timm(module: Any, name: str) -> None:
    """Let a network of timm compute activations again in the backward pass."""
    try:
        module.set_grad_checkpointing(True)
    except (AttributeError, AssertionError) as error:  # timm asserts where it has no such thing
        raise ModelError(
            f"model.checkpointing = true: timm:{name} has no checkpointing of its own; set "
            "model.checkpointing=false"
        ) from error


def timm_backbone(name: str, pretrained: bool) -> Backbone:
    """The network without its classifier, with timm's weights if pretrained."""
    try:
        import timm
        import timm.data
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision does not match torch
        raise ModelError(
            f"model.backbone = timm:{name} needs timm, which cannot be imported here ({error}); "
            "pip install 'dml[timm]' with a torchvision that matches this torch"
        ) from error
    try:
        module = timm.create_model(name, pretrained=pretrained, num_classes=0)
    except (RuntimeError, ValueError, OSError) as error:  # unknown name, no weights, no network
        raise ModelError(
            f"model.backbone = timm:{name} cannot be made by timm ({error}); choose one of "
            f"timm.list_models(pretrained={pretrained})"
        ) from error
    given = timm.data.resolve_model_data_config(module)
    size = given["input_size"][-1]
    spec = Input(size, int(size / given["crop_pct"]), tuple(given["mean"]), tuple(given["std"]))
    with torch.no_grad():
        features = module.eval()(torch.zeros(1, 3, size, size)).shape[-1]
    heads = module.pretrained_cfg["classifier"] or ()
    heads = (heads,) if isinstance(heads, str) else heads
    return Backbone(module, features, spec, tuple(f"{head}." for head in heads), f"{name} of timm")
