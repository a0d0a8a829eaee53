"""Features as data: vectors packed, copied, trained on, embedded and searched.

Oracles: the matrix itself, webdataset, the layers written out, recall_at_k.
"""

import gc
import json
import pickle
import shutil
import zlib
from contextlib import closing
from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
import torch
import webdataset
from fleet import ROOT
from pictures import make_folder, put, put_index
from runs import ICONS, lines, result, train_several
from servers import http
from torch.nn.functional import normalize, relu

from dml import embed, search
from dml.config import ConfigError, load
from dml.data.ahead import Ahead
from dml.data.batches import EvalBatches
from dml.data.loader import loader
from dml.data.splits import read_splits, train_batches
from dml.data.vectors import Features, VectorReader
from dml.errors import LaunchError
from dml.export import program as export
from dml.inference.trained import load_backbone, load_trained
from dml.look import program as look
from dml.models import make_model
from dml.recall import recall_at_k
from dml.train import main as train_main
from shards.build import main as build
from shards.index import ImageReader, load_index
from shards.item import ShardError
from shards.vector import decoded, encoded, form_of
from shards.verify import main as verify

CLASSES, EACH, SIZE = 24, 6, 20
CONFIG = ROOT / "configs" / "icons_mini.yaml"
FEATURES = ["data.dataset=folder", "model.backbone=none", "batch.classes=6", "batch.per_class=4"]


def matrix(seed=0, dtype=np.float32, size=SIZE):
    rng = np.random.default_rng(seed)
    centres = np.repeat(rng.standard_normal((CLASSES, size)), EACH, axis=0)
    return (centres + 0.7 * rng.standard_normal(centres.shape)).astype(dtype)


def table(head="label,split,super_class"):
    rows = [
        f"class{c:02d},{'train' if c < 16 else 'test'},group{c % 3}"
        for c in range(CLASSES)
        for _ in range(EACH)
    ]
    return "\n".join([head, *rows]) + "\n"


def pack(root, X, text=None, *options):
    root.mkdir(parents=True)
    np.save(root / "X.npy", X)
    put(root / "labels.csv", table() if text is None else text)
    out = root.with_name(f"{root.name}-shards")
    arguments = ["features", "--root", str(root), "--out", str(out), "--workers", "1", *options]
    assert build(arguments) == 0
    return out


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Small tars, so that there are several."""
    return pack(tmp_path_factory.mktemp("features") / "x", matrix(), None, "--max-bytes", "64K")


# ---- shards ----------------------------------------------------------------------------------------


def test_vectors_are_packed_with_their_labels_splits_and_super_classes(shards, capsys):
    index, X, reader = load_index(shards), matrix(), ImageReader(load_index(shards))
    assert len(index.shards) > 2
    assert verify([str(shards)]) == 0
    for row in range(len(X)):
        assert np.array_equal(decoded(reader.read(row)), X[row])
    names, c = index.class_names, np.arange(len(X)) // EACH
    assert [names[label] for label in index.rows["label"]] == [f"class{n:02d}" for n in c]
    assert index.positions("train").tolist() == np.flatnonzero(c < 16).tolist()
    groups = index.manifest["super_classes"]
    assert [groups[g] for g in index.super_classes("train")] == [f"group{n % 3}" for n in c[c < 16]]


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # webdataset leaves its tars open
def test_webdataset_reads_the_vectors(shards):
    tars = [str(path) for path in load_index(shards).shards]
    dataset = webdataset.WebDataset(tars, shardshuffle=False).decode()
    found = list(dataset.to_tuple("npy", "cls"))
    del dataset
    gc.collect()
    assert np.array_equal([vector for vector, _ in found], matrix())
    assert [label for _, label in found] == [row // EACH for row in range(CLASSES * EACH)]


def test_vectors_without_splits_hold_classes_out(tmp_path):
    text = "label\n" + "".join(f"c{n // EACH}\n" for n in range(CLASSES * EACH))
    half = load_index(pack(tmp_path / "half", matrix(), text))
    assert half.manifest["splits"]["test"]["classes"] == CLASSES // 2
    third = load_index(pack(tmp_path / "third", matrix(), text, "--test-classes", "0.25"))
    assert third.manifest["splits"]["test"]["classes"] == CLASSES // 4


FILES = {"X.npy": encoded(matrix()[0]), "labels.csv": "label\na\n"}


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"X.npy": None}, "has 0 files *.npy, but it needs one: a matrix n x d"),
        ({"Y.npy": b""}, "has 2 files *.npy (X.npy, Y.npy), but it needs one"),
        ({"labels.csv": None}, "has 0 files *.csv, but it needs one: a .csv with a column label"),
        ({}, "X.npy holds float32 of the shape (20,), but it must be n x d in float16 or float32"),
        ({"X.npy": b"\x93NUMPY"}, "X.npy is a damaged .npy file"),
        ({"X.npy": matrix(dtype=np.float64)}, "X.npy holds float64 of the shape (144, 20)"),
        ({"X.npy": matrix()}, "labels.csv has 1 rows, but"),
        ({"labels.csv": "name\na\n"}, "labels.csv has no column 'label', only 'name'"),
        ({"X.npy": matrix(), "labels.csv": "label,name\n,a\n"}, "labels.csv:2 has no label"),
        ({"index.jsonl": '{"class": "a"}\n[]\n'}, "index.jsonl:2 is not a line of JSON with image"),
        ({"index.jsonl": '{"class": 1}\n'}, "index.jsonl:1: the label is 1, not text"),
        (
            {"X.npy": matrix(), "labels.csv": table().replace("test", "val")},
            "the splits 'train', 'val'",
        ),
        (
            {"X.npy": matrix(), "labels.csv": table().replace("group0", "group1", 1)},
            "the class 'class00' has the super-classes 'group1' and 'group0': a class belongs to one",
        ),
        (
            {"X.npy": matrix(), "labels.csv": table().replace("group2", "")},
            "the class 'class02' has no super-class, but others have: add it",
        ),
        (
            {
                "X.npy": np.where(np.arange(SIZE) == 3, np.inf, matrix()).astype(np.float32),
                "labels.csv": table(),
            },
            "X.npy row 0 is a vector with NaN or infinity: repair the file, or pass --bad skip",
        ),
    ],
)
def test_mistakes_in_a_folder_of_vectors(tmp_path, capsys, files, sentence):
    for name, data in (FILES | files).items():
        if isinstance(data, np.ndarray):
            np.save(tmp_path / name, data)
        elif data is not None:
            put(tmp_path / name, data)
    out = tmp_path / "shards"
    assert build(["features", "--root", str(tmp_path), "--out", str(out), "--workers", "1"]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x93NUMPY\1\0\xff", "a damaged .npy file"),
        (encoded(matrix()[0])[:-1], "a .npy file of 207 bytes instead of 208"),
        (encoded(matrix()[:2]), r"the shape \(2, 20\), not one vector"),
        (encoded(np.arange(3)), "of int64"),
    ],
)
def test_a_damaged_vector_is_described(data, words):
    with pytest.raises(ShardError, match=words):
        form_of(data)


def test_an_image_that_is_a_vector_is_not_packed_with_images(tmp_path, capsys):
    make_folder(tmp_path / "images", classes=2)
    put(tmp_path / "images" / "train" / "train1" / "z.png", encoded(matrix()[0]))
    arguments = [
        "--root",
        str(tmp_path / "images"),
        "--out",
        str(tmp_path / "out"),
        "--workers",
        "1",
    ]
    assert build(["folder", *arguments]) == 2
    assert "is an image but train/train1/z.png is a vector of 20 numbers" in capsys.readouterr().err


# ---- reading ---------------------------------------------------------------------------------------


def test_vectors_are_copied_from_all_shards_of_all_datasets(shards, tmp_path):
    other = pack(tmp_path / "y", matrix(1))
    reader = VectorReader([load_index(shards), load_index(other)])
    X = np.concatenate([matrix(), matrix(1)])
    rows = np.random.default_rng(0).integers(0, len(X), 500)
    for each in (reader, pickle.loads(pickle.dumps(reader))):
        out = np.empty((len(rows), SIZE), np.float32)
        each.into(out, rows)
        assert np.array_equal(out, X[rows])


def test_half_precision_becomes_float32(tmp_path):
    reader = VectorReader([load_index(pack(tmp_path / "h", matrix(dtype=np.float16)))])
    out = np.empty((10, SIZE), np.float32)
    reader.into(out, np.arange(10))
    assert np.array_equal(out, matrix(dtype=np.float16)[:10].astype(np.float32))


def changed(shards, folder, row, change):
    """A copy of the shards with other bytes of a vector."""
    shutil.copytree(shards, folder)
    index = load_index(folder)
    path, (offset, size) = index.shards[index.rows[row]["shard"]], index.rows[row].item()[3:5]
    data = bytearray(path.read_bytes())
    data[offset : offset + size] = change(bytes(data[offset : offset + size]))
    path.write_bytes(data)
    return index, zlib.crc32(data[offset : offset + size])


def test_a_flipped_byte_is_found_when_a_vector_is_first_read(shards, tmp_path):
    index, _ = changed(shards, tmp_path / "flipped", 5, lambda data: data[:-1] + b"\x11")
    reader, out = VectorReader([index]), np.empty((1, SIZE), np.float32)
    reader.into(out, np.array([4]))
    with pytest.raises(ShardError, match=r"image 00000005 .* is damaged, its checksum differs"):
        reader.into(out, np.array([5]))


def test_a_vector_of_another_form_is_found(shards, tmp_path):
    other = encoded(matrix()[0].view(np.int32).view("<i4"))[: form_of(encoded(matrix()[0])).bytes]
    index, checksum = changed(shards, tmp_path / "other", 5, lambda data: other)
    rows = index.rows.copy()
    rows["crc32"][5] = checksum
    put_index(index.root, rows)
    with pytest.raises(ShardError, match=r"vector 00000005 .* is not like the first one"):
        VectorReader([load_index(index.root)]).into(np.empty((1, SIZE), np.float32), np.array([5]))


def test_a_shard_that_is_cut_short_later_is_a_sentence(shards, tmp_path):
    """Reading beyond the end of a mapped file would kill the process."""
    shutil.copytree(shards, tmp_path / "cut")
    index = load_index(tmp_path / "cut")
    reader, out = VectorReader([index]), np.empty((1, SIZE), np.float32)
    reader.into(out, np.array([0]))
    with index.shards[0].open("r+b") as file:
        file.truncate(100)
    with pytest.raises(ShardError, match="was cut short"):
        reader.into(out, np.array([0]))


def config_of(shards, *sets):
    return load(CONFIG, [f"data.shards={shards}", *FEATURES, *sets])


def test_batches_of_vectors_are_the_same_for_any_number_of_processes_and_workers(shards):
    config = config_of(shards, "batch.group=super_class", "batch.mixed=0.5")
    splits = read_splits(config)
    assert splits.features == Features(SIZE)
    whole = list(loader(train_batches(splits, config, splits.features, 0, 1), range(4)))
    for rank_count, workers in ((2, 0), (3, 1)):
        parts = [
            list(
                loader(
                    train_batches(splits, config, splits.features, rank, rank_count),
                    range(4),
                    workers,
                )
            )
            for rank in range(rank_count)
        ]
        for step, (vectors, labels) in enumerate(whole):
            assert torch.equal(torch.cat([part[step][0] for part in parts]), vectors)
            assert torch.equal(torch.cat([part[step][1] for part in parts]), labels)
    batches = train_batches(splits, config, splits.features, 0, 1)
    X = np.stack([matrix()[row] for row in batches.batches(2)[0]])
    assert np.array_equal(whole[2][0].numpy(), X)


@pytest.mark.parametrize("how", ["cache", "limit", "range"])
def test_vectors_of_a_server_mixed_with_local_ones(shards, tmp_path, how, monkeypatch):
    """The same batches as from two local folders, whether the shards stay, leave or never come."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    other = pack(tmp_path / "y", matrix(1))
    size = max(shard["bytes"] for shard in load_index(shards).manifest["shards"])
    sets = {"cache": [], "limit": [f"data.cache_gib={4.5 * size / 2**30}"]}
    sets["range"] = ["data.remote=range"]
    cached = [f"data.cache={tmp_path}/cache", *sets[how]]
    with http(shards.parent) as server:
        address = f"{server.url}/{shards.name}"
        found = {}
        for name, config in {
            "local": config_of(f"[{other}, {shards}]"),
            "mixed": config_of(f"[{other}, {address}]", *cached),
        }.items():
            splits = read_splits(config)
            batches = train_batches(splits, config, splits.features, 0, 1)
            with closing(Ahead(batches, range(6), splits.datasets[0].index.cache)) as ahead:
                found[name] = list(loader(batches, range(6)))
                assert (ahead.fetcher is not None) == (name == "mixed" and how != "range")
            test = splits.datasets[1].test
            found[name] += list(
                loader(EvalBatches(test.index, test.rows, test.labels, splits.features, 7), [0, 4])
            )
        for ours, expected in zip(found["mixed"], found["local"], strict=True):
            assert all(map(torch.equal, ours, expected))
        assert [path.name for path in (tmp_path / "cache").rglob("*.tar")] or how == "range"
        whole = [path for path, start in server.asked if path.endswith(".tar") and start == 0]
        if how == "cache":  # the form of the first vector takes a range of a shard, not a shard
            assert len(whole) == len(set(whole))


# ---- the model -------------------------------------------------------------------------------------


def test_a_linear_head_is_one_product():
    config = config_of(ICONS, "model.embedding_size=8")
    model, x = make_model(config.model, config.data, 0, Features(SIZE)), torch.randn(5, SIZE)
    assert set(model.state_dict()) == {"head.weight", "head.bias"}
    assert torch.equal(model(x), normalize(x @ model.head.weight.T + model.head.bias))
    again = make_model(config.model, config.data, 0, Features(SIZE))
    assert torch.equal(again.head.weight, model.head.weight)


def test_an_mlp_is_its_layers_with_relu_and_dropout_between_them():
    sets = [
        "model.head=mlp",
        "model.hidden=[16, 12]",
        "model.dropout=0.5",
        "model.embedding_size=8",
    ]
    config = config_of(ICONS, *sets)
    model, x = make_model(config.model, config.data, 0, Features(SIZE)), torch.randn(5, SIZE)
    first, second, third = model.head.layers
    assert [layer.weight.shape for layer in (first, second, third)] == [
        (16, SIZE),
        (12, 16),
        (8, 12),
    ]
    assert not torch.equal(model(x), model(x)), "dropout is random in training"
    expected = normalize(third(relu(second(relu(first(x))))))
    assert torch.equal(model.eval()(x), expected)


def test_images_may_have_an_mlp_as_well():
    config = load(CONFIG, ["model.head=mlp", "model.hidden=[16]", f"data.shards={ICONS}"])
    model = make_model(config.model, config.data, 0).eval()
    images = torch.randint(0, 255, (2, 32, 32, 3), dtype=torch.uint8)
    assert torch.equal(model(images), normalize(model.head(model.features(images))))


@pytest.mark.parametrize(
    ("sets", "sentence"),
    [
        (["model.head=mlp"], "model.head = 'mlp' (--set): needs model.hidden; for example"),
        (["model.hidden=[3]"], "model.hidden = [3] (--set): has no effect with head linear"),
        (["model.head=mlp", "model.hidden=[0]"], "each at least 1"),
        (["model.dropout=1"], "at least 0 and below 1"),
        (["model.weights=pretrained"], "there is no backbone to have weights"),
        (["data.size=32"], "is for images, but model.backbone=none takes features"),
    ],
)
def test_mistakes_in_the_config(sets, sentence):
    with pytest.raises(ConfigError) as refused:
        config_of(ICONS, *sets)
    assert sentence in str(refused.value)


def test_images_for_a_head_and_vectors_for_a_network_are_refused(shards, tmp_path):
    with pytest.raises(
        LaunchError, match=r"none trains on features, but .* has images; set another"
    ):
        read_splits(config_of(ICONS))
    with pytest.raises(
        LaunchError, match=r"convnet takes images, but .* has vectors of 20 numbers; set"
    ):
        read_splits(config_of(shards, "model.backbone=convnet"))
    other = pack(tmp_path / "y", matrix(1, size=8))
    with pytest.raises(
        ShardError, match=r"8 numbers .* has vectors of 20 numbers .* must be alike"
    ):
        read_splits(config_of(f"[{other}, {shards}]"))


# ---- training, embedding, searching ----------------------------------------------------------------

CONSTANT = [
    *FEATURES,
    "data.size=null",
    "optim.schedule=constant",
    "model.dropout=0.1",
    "eval.ks=[1, 2]",
]
LONG = ["length.steps=12", "eval.validation_classes=0.25", "eval.every_steps=4"]


@pytest.fixture(scope="module")
def runs(shards, tmp_path_factory):
    """Two processes: a run, the same run in two halves, and one of two datasets with an MLP."""
    folder = tmp_path_factory.mktemp("runs")
    other = pack(folder / "other", matrix(1))
    alone, both = f"data.shards={shards}", f"data.shards=[{shards}, {other}]"
    mlp = ["model.head=mlp", "model.hidden=[16]", "data.weights=[2, 1]", "batch.group=super_class"]
    wanted = {
        "whole": [alone, *CONSTANT, "length.steps=12"],
        "half": [alone, *CONSTANT, "length.steps=6"],
        "rest": [alone, *CONSTANT, "length.steps=12", "run.name=half"],
        "mixed": [both, *CONSTANT, *LONG, *mlp],
    }
    for name, ended in train_several(2, folder, wanted).items():
        assert [code for code, _ in ended] == [0, 0], (name, ended)
    return folder


@pytest.mark.training
def test_a_head_that_was_resumed_has_the_same_bits(runs):
    first, second = ((runs / name / "model.safetensors").read_bytes() for name in ("whole", "half"))
    assert first == second
    assert (runs / "whole" / "result.json").exists()
    assert not (runs / "whole" / "nearest.png").exists()


@pytest.mark.training
def test_several_datasets_are_scored_one_by_one_and_on_average(runs, shards):
    """Oracle: recall_at_k of the written model's embeddings."""
    run, recalls = runs / "mixed", []
    model = load_trained(run)
    for name, folder in (("x-shards", shards), ("other-shards", runs / "other-shards")):
        index = load_index(folder)
        rows, labels = index.positions("test"), index.labels("test")
        vectors, _ = EvalBatches(index, rows, labels, model.spec, len(rows))[0]
        with torch.no_grad():
            found = recall_at_k(model(vectors), torch.from_numpy(labels), [1, 2])
        assert result(run)[f"{name}/recall@1"] == found[1]
        recalls.append(found[1])
    assert result(run)["recall@1"] == sum(recalls) / 2
    told = [line for line in lines(run) if line.get("split") == "validation"]
    assert [line["step"] for line in told] == [4, 8, 12]
    best = max(told, key=lambda line: line["recall@1"])
    assert result(run)["validation_recall@1"] == best["recall@1"]


@pytest.mark.training
def test_vectors_are_embedded_and_searched(runs, shards, tmp_path, capsys):
    run, out = runs / "whole", tmp_path / "embedded"
    assert (
        embed.main([str(run), str(shards), "--out", str(out), "--split", "test", "--workers", "0"])
        == 0
    )
    model, X = load_trained(run), matrix()[load_index(shards).positions("test")]
    with torch.no_grad():
        expected = model(torch.from_numpy(X)).numpy()
    np.testing.assert_allclose(np.load(out / "embeddings.npy"), expected, rtol=1e-5, atol=1e-6)
    np.save(tmp_path / "query.npy", X[:3])
    capsys.readouterr()
    query = [str(run), str(out), str(tmp_path / "query.npy"), "--k", "1", "--json"]
    assert search.main(query) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    nearest = (expected[:3] @ expected.T).argmax(1)
    rows = load_index(shards).positions("test")
    assert [each["found"][0]["image"] for each in found] == [f"{rows[i]:08d}" for i in nearest]
    assert found[1]["query"].endswith("query.npy[1]")
    # the same vectors as shards find others, not themselves
    assert search.main([str(run), str(out), str(shards), "--k", "1", "--json"]) == 0
    for line in capsys.readouterr().out.splitlines():
        each = json.loads(line)
        assert each["found"][0]["image"] != each["query"].rpartition("/")[2]
    for arguments, sentence in (
        ([*query, "--picture", str(tmp_path / "p.png")], "was trained on features, not images"),
        ([*query[:2], str(ICONS)], "the model takes vectors of 20 numbers, but"),
    ):
        assert search.main(arguments) == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.training
def test_a_head_is_exported_but_has_no_images_to_look_at(runs, tmp_path, capsys):
    run, onnx, pt2 = str(runs / "mixed"), tmp_path / "head.onnx", tmp_path / "head.pt2"
    assert export.main([run, "--onnx", str(onnx), "--torch", str(pt2)]) == 0
    X = torch.from_numpy(matrix()[:7])
    with torch.no_grad():
        expected = load_trained(runs / "mixed")(X)
    session = onnxruntime.InferenceSession(str(onnx))
    (found,) = session.run(None, {"features": X.numpy()})
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-5)
    extra = {"preprocessing.json": ""}
    program = torch.export.load(pt2, extra_files=extra)
    torch.testing.assert_close(program.module()(X), expected, atol=1e-6, rtol=0)
    assert json.loads(extra["preprocessing.json"])["input"].startswith("N x 20, float32")
    for main, words, sentence in (
        (export.main, [run, "--hf", str(tmp_path / "hf")], "--onnx and --torch export it"),
        (
            look.main,
            [run, "--out", str(tmp_path / "look")],
            "trained on features: there are no images",
        ),
    ):
        assert main(words) == 2
        assert sentence in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"head.onnx", "head.pt2"}


@pytest.mark.training
@pytest.mark.usefixtures("fresh_accelerate")
def test_a_run_on_other_vectors_or_weights_is_refused(runs, shards, tmp_path, capsys):
    shutil.copytree(runs / "mixed", tmp_path / "mixed")
    (tmp_path / "mixed" / "result.json").unlink()
    sets = [f"run.dir={tmp_path}", "run.name=mixed", *FEATURES, "data.weights=[1, 1]", *LONG]
    both = f"data.shards=[{shards}, {runs / 'other-shards'}]"
    assert train_main(["--config", str(CONFIG), "--set", both, *sets]) == 2
    assert "data.weights was [2.0, 1.0] and is [1.0, 1.0]" in capsys.readouterr().err


def test_features_of_a_backbone_become_shards(tmp_path, capsys):
    """Icons through the small network: the features are those before the head, with their splits."""
    torch.manual_seed(0)
    weights = tmp_path / "convnet.pth"
    torch.save(make_model(load(CONFIG).model, load(CONFIG).data, 3).backbone.state_dict(), weights)
    out = tmp_path / "features"
    made = ["convnet", str(ICONS), "--features", "--out", str(out), "--workers", "0"]
    assert embed.main([*made, "--weights", str(weights)]) == 0
    index, model = load_index(ICONS), load_backbone("convnet", str(weights))
    rows = np.arange(40)
    images, _ = EvalBatches(index, rows, rows, model.spec, 40)[0]
    with torch.no_grad():
        expected = model.features(images).numpy()
    X = np.load(out / "embeddings.npy")
    assert X.shape == (len(index.rows), 256)
    np.testing.assert_allclose(X[:40], expected, rtol=1e-4, atol=1e-5)
    shards = tmp_path / "shards"
    assert build(["features", "--root", str(out), "--out", str(shards), "--workers", "1"]) == 0
    packed = load_index(shards)
    assert packed.manifest["splits"] == index.manifest["splits"]
    for split in ("train", "test"):
        names, own = ([i.class_names[n] for n in i.labels(split)] for i in (packed, index))
        assert names == own
    capsys.readouterr()
    assert search.main([str(tmp_path), str(out), "x.npy"]) == 2
    assert (
        "holds features, before the head: embed the images without --features"
        in capsys.readouterr().err
    )
    for arguments, sentence in (
        ([*made[:2], "--out", str(tmp_path / "y")], "there is no run's folder convnet"),
        ([*made, "--overwrite"], "model.weights = pretrained: no package has weights of convnet"),
        (
            ["convnet", str(shards), *made[2:], "--overwrite", "--weights", str(weights)],
            "takes images",
        ),
        (
            ["conv", *made[1:], "--overwrite", "--weights", "x"],
            "is for --features of a backbone by name",
        ),
        (
            ["conv", *made[1:], "--overwrite", "--size", "24"],
            "--size 24 is for --features of a backbone by name",
        ),
        (
            [*made, "--overwrite", "--weights", str(weights), "--size", "32", "--resize", "24"],
            "data.resize = 24 is smaller than the crop of 32",
        ),
    ):
        assert embed.main(arguments) == 2
        assert sentence in capsys.readouterr().err


def test_features_of_a_chosen_size(tmp_path):
    """Oracle: the network with the crop of a config of that size."""
    weights, out = tmp_path / "convnet.pth", tmp_path / "features"
    given = load(CONFIG, ["data.size=24", "data.resize=28", f"model.weights={weights}"])
    plain = replace(given.model, weights=None)
    torch.save(make_model(plain, given.data, 3).backbone.state_dict(), weights)
    made = ["convnet", str(ICONS), "--features", "--out", str(out), "--workers", "0"]
    sizes = ["--size", "24", "--resize", "28", "--weights", str(weights)]
    assert embed.main([*made, *sizes, "--split", "test"]) == 0
    index, model = load_index(ICONS), make_model(given.model, given.data, 0).eval()
    rows = index.positions("test")[:20]
    images, _ = EvalBatches(index, rows, rows, model.spec, 20)[0]
    assert images.shape == (20, 24, 24, 3)
    with torch.no_grad():
        expected = model.features(images).numpy()
    X = np.load(out / "embeddings.npy")
    np.testing.assert_allclose(X[:20], expected, rtol=1e-4, atol=1e-5)
