"""What every backbone has in common."""

from dataclasses import dataclass

from torch import nn

from dml.data.preprocessing import Input


@dataclass(frozen=True)
class Backbone:
    """A network without its classifier: images as `spec` describes them to N x features.

    The keys of its state dict are those of the published file, which also has keys of a classifier.
    """

    module: nn.Module
    features: int
    spec: Input
    classifier: tuple[str, ...] = ()  # how the keys of the published classifier begin
    published: str = "a file"  # where weights are to be had


def initialise(network: nn.Module) -> None:
    """He et al.'s, by fan-in as in the paper's authors' code; also right for depthwise
    convolutions, whose fan-out is as small but counted over all channels."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
