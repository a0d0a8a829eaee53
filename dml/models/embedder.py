"""The model as one module: uint8 images -> backbone -> one linear layer -> unit length."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.modules.batchnorm import _BatchNorm

from dml.data.preprocessing import Input, Normalise
from dml.distributed.precision import at_least_float32


class Embedder(nn.Module):
    """Embeds images, N x size x size x 3 uint8 RGB, as N x d unit vectors.

    batchnorm: "frozen" keeps the statistics and trains scale and shift, so that an embedding depends
    only on its own image; "synced" uses the statistics of the global batch (GPUs only); "local" uses
    those of the images in one forward pass of one process.
    """

    def __init__(
        self,
        backbone: nn.Module,
        features: int,
        embedding_size: int,
        spec: Input,
        batchnorm: Literal["frozen", "synced", "local"] = "frozen",
    ) -> None:
        super().__init__()
        if batchnorm == "synced":
            backbone = nn.SyncBatchNorm.convert_sync_batchnorm(backbone)  # type: ignore[no-untyped-call]
        self.spec, self.batchnorm = spec, batchnorm
        self.normalise, self.backbone = Normalise(spec), backbone
        self.head = nn.Linear(features, embedding_size)
        # as in the code of the paper's authors
        nn.init.kaiming_normal_(self.head.weight, mode="fan_out")
        nn.init.zeros_(self.head.bias)
        self.train()

    def forward(self, images: Tensor) -> Tensor:
        x = self.normalise(images).to(self.head.weight.dtype)
        # in float32 even under autocast: a bf16 vector does not have unit length
        return normalize(at_least_float32(self.head(self.backbone(x))))

    def train(self, mode: bool = True) -> Embedder:
        super().train(mode)
        if self.batchnorm == "frozen":
            for module in self.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self
