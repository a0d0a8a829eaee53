"""Models by name: a backbone, a head and normalisation to unit length.

    model = make_model(config.model, config.data, seed)

The weights depend only on the config and the seed, so they are the same in every process.

- `backbone` (Backbone, BlockNetwork, initialise): what every backbone has in common
- `bn_inception` (bn_inception): the paper's network
- `resnet50` (resnet50, resnet50_v1): ResNet-50, as torchvision has it and as first published
- `keras_resnet50`: a program that converts the weights of Keras
- `efficientnet_lite` (efficientnet_lite0): EfficientNet-Lite0
- `convnet` (convnet): a small network for studies on a CPU
- `timm_backbone` (timm_backbone, checkpoint_timm): any network of timm
- `embedder` (Embedder, MLP): backbone, head and normalisation as one module
- `two_towers` (TwoTowers): two encoders as one module
- `weights` (load_weights, packaged): weights from files
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn

from dml import config
from dml.data.preprocessing import Input
from dml.data.vectors import Features
from dml.errors import ModelError
from dml.models.backbone import Backbone, BlockNetwork
from dml.models.bn_inception import bn_inception
from dml.models.convnet import convnet
from dml.models.efficientnet_lite import efficientnet_lite0
from dml.models.embedder import Embedder
from dml.models.resnet50 import resnet50, resnet50_v1
from dml.models.timm_backbone import checkpoint_timm, timm_backbone
from dml.models.two_towers import TwoTowers
from dml.models.weights import load_weights, packaged

__all__ = ["BACKBONES", "Embedder", "ModelError", "TwoTowers", "make_model", "make_towers"]

BACKBONES: Mapping[str, Callable[[], Backbone]] = {
    "bn_inception": bn_inception,
    "resnet50": resnet50,
    "resnet50_v1": resnet50_v1,
    "efficientnet_lite0": efficientnet_lite0,
    "convnet": convnet,
}


def make_model(
    model: config.Model, data: config.Data, seed: int, features: Features | None = None
) -> Embedder:
    """The Embedder of a config. Random weights come from the seed; torch's generator keeps its state.

    features: what model.backbone = none is given; all others take images.
    """
    kind, _, timm_name = model.backbone.partition(":")
    pretrained = model.weights == "pretrained"
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if kind == "none":
            assert features is not None
            backbone = Backbone(nn.Identity(), features.size, Input())
            spec: Input | Features = features
        else:
            backbone = timm_backbone(timm_name, pretrained) if timm_name else BACKBONES[kind]()
            spec = crop(backbone.spec, data)
        if isinstance(backbone.module, BlockNetwork):
            backbone.module.checkpointing = model.checkpointing
        elif model.checkpointing and timm_name:
            checkpoint_timm(backbone.module, timm_name)
        embedder = Embedder(
            *(backbone.module, backbone.features, model.embedding_size, spec, model.batchnorm),
            hidden=model.hidden,
            dropout=model.dropout,
        )
    if isinstance(spec, Input) and spec.size != backbone.spec.size:
        try_size(embedder, model.backbone, backbone.spec.size)
    if model.weights and not (pretrained and timm_name):
        path = packaged(kind, backbone.published) if pretrained else model.weights
        load_weights(embedder, backbone, model.backbone, path)
    return embedder


def make_towers(
    settings: config.Config, features: Features | None, y_features: Features | None
) -> Embedder | TwoTowers:
    """The model of a config: one encoder, or two that begin with random weights of their own."""
    seed = settings.run.seed
    x = make_model(settings.model, settings.data, seed, features)
    if not settings.towers.two_encoders:
        return x
    other = torch.randint(2**62, (), generator=torch.Generator().manual_seed(seed))
    return TwoTowers(x, make_model(settings.model, settings.data, int(other), y_features))


def crop(spec: Input, data: config.Data) -> Input:
    """The backbone's input with the sizes of the config. If only data.size is given, the crop keeps its
    share of the resized image."""
    size = data.size or spec.size
    resize = data.resize or round(size * spec.resize / spec.size)
    if resize < size:
        raise ModelError(
            f"data.resize = {resize} is smaller than the crop of {size}; set data.resize to at "
            f"least {size} or data.size to at most {resize}"
        )
    return replace(spec, size=size, resize=resize, smallest_crop=data.smallest_crop)


def try_size(embedder: Embedder, name: str, own: int) -> None:
    """Try an image of the config's size, because some networks fail at odd or small sizes."""
    size = embedder.spec.size
    try:
        with torch.no_grad():
            embedder.eval()(torch.zeros(1, size, size, 3, dtype=torch.uint8))
    except (RuntimeError, AssertionError) as error:
        raise ModelError(
            f"data.size = {size} does not work with {name}; leave it out for {own}, or try a "
            "multiple of 32"
        ) from error
    embedder.train()
