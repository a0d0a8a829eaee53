"""A model taken away: the same embeddings in a process that has no dml, photos prepared there.

Oracle: dml's own eval_image and model, in this process.
"""

import io
import json
import os
import runpy
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from pictures import put
from PIL import ExifTags, Image
from safetensors.torch import load_file
from test_search import make_run, spoil

from dml.data.preprocessing import eval_image
from dml.export import program
from dml.inference.trained import load_trained

pytestmark = pytest.mark.slow


def odd_photos(count=100):
    """Photos of all kinds: sizes, formats, modes, orientations, large JPEGs, transparency."""
    rng = np.random.default_rng(0)
    for i in range(count):
        w, h = rng.integers(9, 700 if i % 5 == 0 else 120, 2)
        small = rng.integers(0, 255, (h // 8 + 1, w // 8 + 1, 3), dtype=np.uint8)
        image = Image.fromarray(small).resize((int(w), int(h)), Image.Resampling.BICUBIC)
        kind, mode = [
            ("JPEG", "RGB"),
            ("PNG", "RGBA"),
            ("WEBP", "RGB"),
            ("PNG", "P"),
            ("JPEG", "L"),
        ][i % 5]
        image = image.convert(mode)
        if mode == "RGBA":
            image.putalpha(image.getchannel(0))
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = 1 + i % 8
        file = io.BytesIO()
        image.save(file, kind, exif=exif)
        yield file.getvalue()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    make_run(folder, sets=["data.size=48", "data.resize=56", "loss.beta=40"])
    result = json.loads((folder / "result.json").read_text())
    scores = {"recall@1": 0.5, "recall@10": 0.75, "map@r": 0.25, "step": 30, "images": 7200}
    put(folder / "result.json", json.dumps({**result, **scores, "untrained": {"recall@1": 0.125}}))
    return folder


@pytest.fixture(scope="module")
def taken(run, tmp_path_factory):
    """All three exports, 100 photos, and their embeddings by dml."""
    folder = tmp_path_factory.mktemp("away")
    files = [
        "--onnx",
        folder / "model.onnx",
        "--torch",
        folder / "model.pt2",
        "--hf",
        folder / "hf",
    ]
    assert program.main([str(word) for word in (run, *files)]) == 0
    model, images = load_trained(run), []
    for i, data in enumerate(odd_photos()):
        put(folder / "photos" / f"{i:03d}", data)
        images.append(np.asarray(eval_image(data, model.spec)))
    with torch.no_grad():
        np.save(folder / "expected.npy", model(torch.from_numpy(np.stack(images))).numpy())
    return folder


READ = """
import sys, types, numpy as np
from pathlib import Path

class Refuse:  # dml and shards cannot be imported here
    def find_spec(self, name, *rest):
        if name.split(".")[0] in ("dml", "shards", "launch"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())

def prepared(code):
    module = types.ModuleType("preprocess")
    sys.modules["preprocess"] = module
    exec(compile(code, "preprocess.py", "exec"), module.__dict__)
    return np.stack([module.load_image(p.read_bytes()) for p in sorted(Path("photos").iterdir())])

def compare(X):
    expected = np.load("expected.npy")
    assert X.shape == expected.shape == (100, 16)
    difference = np.abs(X - expected).max()
    print("largest difference", difference)
    assert difference <= 1e-5
    assert "dml" not in sys.modules
"""
PROGRAMS = {
    "onnx": """
import onnxruntime
session = onnxruntime.InferenceSession("model.onnx")
metadata = session.get_modelmeta().custom_metadata_map
images = prepared(metadata["preprocess.py"])
compare(session.run(["embeddings"], {"images": images})[0])
compare(np.concatenate([session.run(None, {"images": one[None]})[0] for one in images]))
""",
    "torch": """
import torch
extra = {"preprocess.py": "", "preprocessing.json": ""}
model = torch.export.load("model.pt2", extra_files=extra).module()
images = torch.from_numpy(prepared(extra["preprocess.py"]))
with torch.no_grad():
    compare(model(images).numpy())
    compare(torch.cat([model(one[None]) for one in images]).numpy())
""",
    "hf": """
sys.path.insert(0, "hf")
import torch
from model import Model
from preprocess import load_image
images = prepared(Path("hf/preprocess.py").read_text())
model = Model()
compare(model(torch.from_numpy(images)).numpy())
compare(torch.cat([model(torch.from_numpy(one[None])) for one in images]).numpy())
""",
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_fresh_process_without_dml_gets_the_same_embeddings(taken, kind):
    path = [each for each in sys.path if "site-packages" in each or "extra" in each]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", READ + PROGRAMS[kind]],
        cwd=taken,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_metadata_describes_the_preprocessing(taken, run):
    import onnx

    model = onnx.load(taken / "model.onnx")
    onnx.checker.check_model(model)
    metadata = {each.key: each.value for each in model.metadata_props}
    said, spec = json.loads(metadata["preprocessing"]), load_trained(run).spec
    assert (said["size"], said["resize"], said["channels"]) == (48, 56, "rgb")
    assert said["mean"] == list(spec.mean)
    (given,) = model.graph.input
    dims = given.type.tensor_type.shape.dim
    assert [d.dim_value for d in dims[1:]] == [48, 48, 3]
    assert dims[0].dim_param


def test_the_card_tells_data_recipe_and_scores(taken, run):
    card = (taken / "hf" / "README.md").read_text()
    _, head, text = card.split("---\n", 2)
    (index,) = yaml.safe_load(head)["model-index"]
    metrics = index["results"][0]["metrics"]
    assert {"type": "recall@10", "value": 0.75} in metrics
    assert "| recall@1 | 50.0% | 12.5% |" in text
    assert "| loss.beta | 40.0 |" in text
    assert "icons" in text
    assert "30 steps, 7,200 images" in text
    weights, ours = load_file(taken / "hf" / "model.safetensors"), load_trained(run).state_dict()
    assert weights.keys() == ours.keys()
    assert all(torch.equal(weights[name], ours[name].cpu()) for name in ours)


def test_mistakes_are_explained_and_nothing_is_written(run, tmp_path, capsys, monkeypatch):
    def refused(*arguments):
        try:
            code = program.main([str(word) for word in arguments])
        except SystemExit as error:
            code = error.code
        assert code == 2
        return capsys.readouterr().err.strip().splitlines()[-1]

    assert "nothing to write" in refused(run)
    assert "there is no folder" in refused(run, "--onnx", tmp_path / "no" / "a.onnx")
    assert "is a folder" in refused(run, "--torch", tmp_path)
    put(tmp_path / "old.onnx", "old")
    assert "--overwrite replaces it" in refused(run, "--onnx", tmp_path / "old.onnx")
    put(tmp_path / "mine" / "README.md", "mine")
    words = (run, "--overwrite", "--hf", tmp_path / "mine")
    assert "not what dml export wrote: give another --hf" in refused(*words)
    assert "no run's folder" in refused(tmp_path / "gone", "--hf", tmp_path / "new")
    monkeypatch.setattr(program, "find_spec", lambda name: None)
    assert "pip install 'dml[onnx]'" in refused(run, "--onnx", tmp_path / "new.onnx")
    assert sorted(os.listdir(tmp_path)) == ["mine", "old.onnx"]
    assert (tmp_path / "old.onnx").read_text() == "old"


@pytest.mark.parametrize("backbone", ["efficientnet_lite0", "bn_inception", "resnet50_v1"])
def test_every_backbone_can_be_traced(backbone, tmp_path):
    """Caffe's networks take BGR of other scales; the Python file computes the same."""
    run = make_run(tmp_path / "run", sets=[f"model.backbone={backbone}", "data.size=64"])
    assert program.main([str(run), "--hf", str(tmp_path / "hf")]) == 0
    scope = runpy.run_path(str(tmp_path / "hf" / "model.py"))
    images = torch.randint(0, 255, (3, 64, 64, 3), dtype=torch.uint8)
    with torch.no_grad():
        expected = load_trained(run)(images)
    torch.testing.assert_close(scope["Model"]()(images), expected, atol=1e-5, rtol=0)


def test_a_damaged_run_writes_nothing(run, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "run")
    spoil(copy / "model.safetensors", lambda data: data[:-4])
    assert program.main([str(copy), "--hf", str(tmp_path / "hf")]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["run"]
