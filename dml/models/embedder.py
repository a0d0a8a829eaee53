"""The model as one module: uint8 images -> backbone -> head -> unit length; or features -> head."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, relu
from torch.nn.modules.batchnorm import _BatchNorm

from dml.data.preprocessing import Input, Normalise
from dml.data.vectors import Features
from dml.distributed.precision import at_least_float32


class MLP(nn.Module):
    """Linear layers with ReLU between them. dropout: of the inputs of every layer but the first."""

    def __init__(self, sizes: Sequence[int], dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.layers
        x = first(x)
        for layer in others:
            x = layer(self.dropout(relu(x)))
        return x


class Embedder(nn.Module):
    """Embeds images, N x size x size x 3 uint8 RGB, or features, N x size, as N x d unit vectors.

    batchnorm: "frozen" keeps the statistics and trains scale and shift, so that an embedding depends
    only on its own image; "synced" uses the statistics of the global batch (GPUs only); "local" uses
    those of the images in one forward pass of one process. hidden: sizes of the hidden layers of the
    head. dropout: of the inputs of every layer of the head.
    """

    def __init__(
        self,
        backbone: nn.Module,
        features: int,
        embedding_size: int,
        spec: Input | Features,
        batchnorm: Literal["frozen", "synced", "local"] = "frozen",
        hidden: Sequence[int] = (),
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if batchnorm == "synced":
            backbone = nn.SyncBatchNorm.convert_sync_batchnorm(backbone)  # type: ignore[no-untyped-call]
        self.spec, self.batchnorm = spec, batchnorm
        self.normalise = Normalise(spec) if isinstance(spec, Input) else nn.Identity()
        self.backbone, self.dropout = backbone, nn.Dropout(dropout)
        self.feature_size, self.embedding_size = features, embedding_size
        self.head: nn.Module = nn.Linear(features, embedding_size)
        if hidden:
            self.head = MLP([features, *hidden, embedding_size], dropout)
        for layer in self.head.modules():
            if isinstance(layer, nn.Linear):
                # as in the code of the paper's authors
                nn.init.kaiming_normal_(layer.weight, mode="fan_out")
                nn.init.zeros_(layer.bias)
        self.train()

    @property
    def device(self) -> torch.device:
        return next(self.head.parameters()).device

    def features(self, images: Tensor) -> Tensor:
        """What the backbone makes of images, before the head; features themselves."""
        x = self.normalise(images).to(next(self.head.parameters()).dtype)
        found: Tensor = self.backbone(x)
        return found

    def forward(
        self, images: Tensor, y: Tensor | None = None, head: bool = True
    ) -> Tensor | tuple[Tensor, Tensor]:
        """y: the samples of another tower that has the same encoder; the embeddings of both are then
        returned, which are computed together. head: whether the features go through it; without it,
        they are the embedding."""
        if y is not None:
            both = self.embed(torch.cat([images, y]), head)
            return both[: len(images)], both[len(images) :]
        return self.embed(images, head)

    def embed(self, images: Tensor, head: bool = True) -> Tensor:
        x = self.features(images)
        if head:
            x = self.head(self.dropout(x))
        # in float32 even under autocast: a bf16 vector does not have unit length
        return normalize(at_least_float32(x))

    def train(self, mode: bool = True) -> Embedder:
        super().train(mode)
        if self.batchnorm == "frozen":
            for module in self.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self
