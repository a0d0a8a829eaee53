"""Two encoders as one module, so that it is wrapped once: DDP and ZeRO reduce its gradient once."""

from __future__ import annotations

from torch import Tensor, nn

from dml.data.pair import PairSpec
from dml.models.embedder import Embedder


class TwoTowers(nn.Module):
    """x, y: the encoders, whose weights are saved as x.* and y.*. (Two views share an Embedder, which
    takes both.)"""

    def __init__(self, x: Embedder, y: Embedder) -> None:
        super().__init__()
        self.x, self.y, self.spec = x, y, PairSpec(x.spec, y.spec)

    def forward(self, x: Tensor | None, y: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The embeddings of both towers, or of the one that is given."""
        found = [encoder(z) for encoder, z in ((self.x, x), (self.y, y)) if z is not None]
        return found[0] if len(found) == 1 else (found[0], found[1])
