"""What every backbone has in common."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dml.data.preprocessing import Input


@dataclass(frozen=True)
class Backbone:
    """A network without its classifier, which turns images as `spec` describes them into N x features.

    Its state dict has the keys of the published file, which also has those of a classifier.
    """

    module: nn.Module
    features: int
    spec: Input
    classifier: tuple[str, ...] = ()  # prefixes of the published classifier's keys
    published: str = "a file"  # the published weights


class BlockNetwork(nn.Module):
    """A network of blocks. checkpointing: keep only the inputs of blocks for the backward pass, and
    compute what is inside again there."""

    checkpointing = False

    def block(self, forward: Callable[..., Tensor], *inputs: object) -> Tensor:
        if not self.checkpointing:
            return forward(*inputs)
        output: Tensor = checkpoint(forward, *inputs, use_reentrant=False)
        return output


def initialise(network: nn.Module) -> None:
    """Initialise convolutions as He et al., by fan-in as in the code of the paper's authors. Fan-in also
    suits depthwise convolutions, whose fan-out torch counts over all channels."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
