"""What people do with a trained model: load it, embed images, search them.

Oracles: the model itself, the evaluation of training, and a loop over all pairs.
"""

import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from damage import DAMAGE
from fleet import ROOT, environment
from pictures import encode, put
from PIL import Image
from safetensors.torch import load_file, save_file

from dml import embed, search
from dml.config import load, to_yaml
from dml.data.splits import read_splits
from dml.distributed.signals import Interrupt
from dml.distributed.team import Team
from dml.errors import EmbeddedError, RunError
from dml.evaluate import Evaluator
from dml.inference import embedded, neighbours, trained, whole_folder
from dml.inference.picture import CELL, FRAME, GAP, LINE, PLAIN, RIGHT, WRONG, retrieval_picture
from dml.inference.trained import load_trained
from dml.models import make_model
from dml.plan import plan
from dml.run_folder.journal import Journal
from dml.run_folder.result import write_result
from shards.index import ImageReader, load_index

ICONS = ROOT / "shards" / "bundled" / "icons-mini"
DIMENSIONS = 16


def make_run(folder, seed=7, sets=()):
    """A finished run, untrained. Neither its shards nor its first weights exist any more, and its
    weights are not those that its config's seed would draw."""
    sets = [f"model.embedding_size={DIMENSIONS}", "data.shards=/gone", *sets]
    config = load(ROOT / "configs" / "icons_mini.yaml", [*sets, "model.weights=/gone.pth"])
    model = make_model(replace(config.model, weights=None), config.data, seed)
    if config.engine.precision == "fp64":
        model = model.double()
    put(folder / "config.yaml", to_yaml(config))
    write_result(folder, model.state_dict(), {})
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Three classes of four images, one image without a class, and files that are no images."""
    root = tmp_path_factory.mktemp("photos")
    for c, name in enumerate(("cup", "mug", "pot")):
        for i in range(4):
            kind, suffix = ("PNG", "png") if i % 2 else ("JPEG", "JPG" if i else "jpeg")
            put(root / name / f"{i}.{suffix}", encode(10 * c + i, kind, size=(40, 30)))
    put(root / "loose.png", encode(99, "PNG"))
    put(root / "cup" / "notes.txt", "no image")
    put(root / ".hidden" / "1.png", encode(98, "PNG"))
    return root


@pytest.fixture(scope="module")
def photo_set(run, photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("sets") / "photos"
    assert main(embed, run, photos, "--out", out) == 0
    return out


@pytest.fixture(scope="module")
def icon_set(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("sets") / "icons"
    assert main(embed, run, ICONS, "--out", out, "--split", "test") == 0
    return out


def main(program, *arguments):
    workers = () if program is search or "--workers" in arguments else ("--workers", "0")
    return program.main([str(a) for a in (*arguments, *workers)])


def refused(capsys, program, *arguments):
    """The one sentence on stderr of a program that ends with 2."""
    capsys.readouterr()
    try:
        code = main(program, *arguments)
    except SystemExit as error:  # argparse's
        code = error.code
    said = capsys.readouterr()
    assert code == 2
    assert said.out == ""
    assert "Traceback" not in said.err
    *usage, sentence = said.err.strip().splitlines()
    assert all(line.startswith(("usage:", " ")) for line in usage), said.err
    assert sentence.startswith(f"{program.__name__.replace('.', '/')}.py: ")
    return sentence


def lines(folder):
    return [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]


def vectors(folder):
    return np.load(folder / "embeddings.npy")


def answers(capsys, *arguments):
    capsys.readouterr()
    assert main(search, *arguments, "--json") == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


# ---- load_trained ---------------------------------------------------------------------------------


def test_the_trained_weights_are_loaded(run):
    model = load_trained(str(run))
    weights = load_file(run / "model.safetensors")
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(x.cpu(), weights[name]) for name, x in model.state_dict().items())
    assert not any(module.training for module in model.modules())


def test_a_run_in_double_precision_stays_so(tmp_path):
    model = load_trained(make_run(tmp_path / "run", sets=["engine.precision=fp64"]))
    assert model.head.weight.dtype == torch.float64


def spoil(path, change):
    path.write_bytes(change(path.read_bytes()))


def pipe(path):
    """Opening it would wait for a writer."""
    path.unlink()
    os.mkfifo(path)


def with_integers(run):
    weights = load_file(run / "model.safetensors")
    save_file(weights | {"head.bias": weights["head.bias"].int()}, run / "model.safetensors")
    put(run / "result.json", "{}")


def test_the_checksum_of_the_model_is_that_of_the_result(tmp_path):
    """Without one, as in older runs or in a copy without result.json, there is nothing to compare."""
    run = make_run(tmp_path / "run")
    data = (run / "model.safetensors").read_bytes()
    put(run / "result.json", json.dumps({"model_sha256": sha256(data).hexdigest()}))
    load_trained(run)
    assert trained.model_sha256(run) == sha256(data).hexdigest()
    flipped = bytearray(data)
    flipped[-1] ^= 1
    put(run / "model.safetensors", bytes(flipped))
    with pytest.raises(RunError, match="its checksum differs"):
        load_trained(run)
    (run / "result.json").unlink()
    load_trained(run)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda run: run.rename(run.parent / "moved"), "there is no run's folder"),
        (lambda run: (run / "config.yaml").unlink(), "no config.yaml"),
        (lambda run: put(run / "config.yaml", "model: {depth: 3}"), "not a config of this version"),
        (lambda run: (run / "model.safetensors").unlink(), "not finished; the same training comm"),
        (lambda run: spoil(run / "model.safetensors", lambda b: b[:-9]), "is damaged"),
        (lambda run: spoil(run / "model.safetensors", lambda b: b""), "is damaged"),
        (lambda run: os.truncate(run / "model.safetensors", 2**42), "more than the"),
        (lambda run: pipe(run / "model.safetensors"), "not a regular file"),
        (
            lambda run: put(run / "result.json", json.dumps({"model_sha256": "0" * 64})),
            "is damaged (its checksum differs from that in result.json): copy it again",
        ),
        (lambda run: put(run / "result.json", "[]"), "result.json is damaged: restore or remove"),
        (lambda run: put(run / "result.json", "[" * 10**6), "result.json is damaged: restore or"),
        (with_integers, "head.bias torch.int32 instead of torch.float32"),
        (
            lambda run: spoil(
                run / "config.yaml",
                lambda b: b.replace(b"embedding_size: 16", b"embedding_size: 8"),
            ),
            "does not fit the config.yaml",
        ),
    ],
)
def test_a_run_that_cannot_be_used_is_explained(tmp_path, photos, capsys, damage, words):
    run = make_run(tmp_path / "run")
    damage(run)
    with pytest.raises(RunError, match=re.escape(words)):
        load_trained(run)
    sentence = refused(capsys, embed, run, photos, "--out", tmp_path / "out")
    assert words in sentence
    assert str(run) in sentence
    assert not (tmp_path / "out").exists()


# ---- embed ----------------------------------------------------------------------------------------


def test_shards_are_embedded_as_in_evaluation(run, icon_set):
    index, model = load_index(ICONS), load_trained(run)
    config = load(run / "config.yaml", [f"data.shards={ICONS}"])
    splits = read_splits(config)
    numbers = plan(config, 1, *splits.sizes)
    here = SimpleNamespace(
        process_index=0, num_processes=1, is_main_process=True, device=model.head.weight.device
    )
    team = Team(here, Interrupt())
    evaluator = Evaluator(team, splits, model.spec, config, numbers, Journal(run, team.note))
    expected = evaluator.embed(model, splits.datasets[0].test).cpu().numpy()
    X = vectors(icon_set)
    assert X.dtype == np.float32
    assert np.array_equal(X, expected)
    np.testing.assert_allclose(np.linalg.norm(X, axis=1), 1, rtol=1e-5)
    rows, names = index.positions("test"), index.class_names
    assert lines(icon_set) == [
        {"image": f"{row:08d}", "class": names[label]}
        for row, label in zip(rows, index.labels("test"), strict=True)
    ]
    info = json.loads((icon_set / "info.json").read_text())
    assert (info["count"], info["dimensions"]) == X.shape
    assert (info["source"], info["split"], info["run"]) == (str(ICONS), "test", str(run))


def test_a_folder_is_embedded_in_the_order_of_its_paths(run, photos, photo_set):
    paths = [path for path in photos.rglob("*.*[gG]") if ".hidden" not in path.parts]
    paths = sorted(str(path.relative_to(photos)) for path in paths)
    assert len(paths) == 13
    assert lines(photo_set) == [
        {"image": path, "class": str(Path(path).parent) if "/" in path else None} for path in paths
    ]
    model = load_trained(run)
    images = [trained.eval_image((photos / path).read_bytes(), model.spec) for path in paths]
    with torch.no_grad():
        batch = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
        expected = model(batch.to(model.head.weight.device)).cpu().numpy()
    assert np.array_equal(vectors(photo_set), expected)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(run, photos, photo_set, tmp_path, workers):
    for out, w in (("alone", 0), ("helped", workers)):
        arguments = (run, photos, "--out", tmp_path / out, "--batch", 2, "--workers", w)
        assert main(embed, *arguments) == 0
    for name in ("embeddings.npy", "index.jsonl", "info.json"):
        assert (tmp_path / "alone" / name).read_bytes() == (tmp_path / "helped" / name).read_bytes()
    np.testing.assert_allclose(vectors(tmp_path / "alone"), vectors(photo_set), atol=1e-6)


def test_all_splits_are_the_default(run, tmp_path):
    assert main(embed, run, ICONS, "--out", tmp_path / "out", "--batch", 512) == 0
    assert [line["image"] for line in lines(tmp_path / "out")] == [f"{n:08d}" for n in range(2500)]


def test_the_summary_counts(run, photos, tmp_path, capsys):
    assert main(embed, run, photos, "--out", tmp_path / "deep" / "out") == 0
    said = capsys.readouterr()
    assert f"{tmp_path / 'deep' / 'out'}: 13 images of 3 classes in " in said.out
    assert "images/s" in said.out
    assert said.err == ""  # no bar where there is no terminal


@pytest.fixture
def spoiled(tmp_path):
    """Five images, of which the second and the fourth are none."""
    root = tmp_path / "spoiled"
    for i, name in enumerate("abcde"):
        put(root / f"{name}.jpg", encode(i))
    put(root / "b.jpg", "text")
    spoil(root / "d.jpg", lambda data: data[: len(data) // 2])
    return root


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_ends_it(run, spoiled, tmp_path, capsys, workers):
    arguments = (run, spoiled, "--out", tmp_path / "out", "--batch", 3, "--workers", workers)
    sentence = refused(capsys, embed, *arguments)
    assert (
        f"{spoiled / 'b.jpg'} cannot be read as an image (none of JPEG, PNG, WEBP, GIF, "
        in sentence
    )
    assert "--skip-unreadable" in sentence
    assert os.listdir(tmp_path) == ["spoiled"]


def test_unreadable_images_are_left_out_and_named(run, spoiled, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(embed, run, spoiled, "--out", out, "--skip-unreadable", "--batch", 2) == 0
    said = capsys.readouterr()
    assert "3 images in " in said.out
    assert "left out 2 that cannot be read" in said.out
    b, d = said.err.splitlines()
    assert str(spoiled / "b.jpg") in b
    assert str(spoiled / "d.jpg") in d
    assert "(Truncated File Read)" in d  # Pillow's words
    assert [line["image"] for line in lines(out)] == ["a.jpg", "c.jpg", "e.jpg"]
    (spoiled / "b.jpg").unlink()
    (spoiled / "d.jpg").unlink()
    assert main(embed, run, spoiled, "--out", tmp_path / "whole") == 0
    np.testing.assert_allclose(vectors(out), vectors(tmp_path / "whole"), atol=1e-6)


def test_nothing_readable_is_an_error(run, tmp_path, capsys):
    put(tmp_path / "photos" / "a.png", "text")
    arguments = (run, tmp_path / "photos", "--out", tmp_path / "out", "--skip-unreadable")
    capsys.readouterr()
    assert main(embed, *arguments) == 2
    assert "none of the 1 images" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_mistakes_are_explained(run, photos, tmp_path, capsys):
    def sentence(*arguments):
        said = refused(capsys, embed, run, *arguments)
        assert sorted(os.listdir(tmp_path)) == ["empty", "file"]
        return said

    empty, file, out = tmp_path / "empty", tmp_path / "file", tmp_path / "out"
    empty.mkdir()
    file.touch()
    assert f"{tmp_path / 'no'} is not there" in sentence(tmp_path / "no", "--out", out)
    assert f"{file} is a file" in sentence(file, "--out", out)
    assert f"{empty} has no images" in sentence(empty, "--out", out)
    assert "no folder of shards" in sentence(photos, "--out", out, "--split", "test")
    assert "has no split 'query'" in sentence(ICONS, "--out", out, "--split", "query")
    assert "invalid choice: 'val'" in sentence(ICONS, "--out", out, "--split", "val")
    assert "--batch must be at least 1" in sentence(photos, "--out", out, "--batch", 0)
    assert "--workers must be at least 0" in sentence(photos, "--out", out, "--workers", -1)
    assert f"{file} is a file: give another --out" in sentence(photos, "--out", file)
    assert f"{file} cannot be written" in sentence(photos, "--out", file / "out")


def test_only_its_own_folder_is_overwritten(run, photos, tmp_path, capsys):
    out, other = tmp_path / "out", tmp_path / "other"
    out.mkdir()  # an empty one is as good as none
    assert main(embed, run, ICONS, "--out", out, "--split", "test") == 0
    assert "--overwrite" in refused(capsys, embed, run, photos, "--out", out)
    assert len(lines(out)) == 1000
    assert main(embed, run, photos, "--out", out, "--overwrite") == 0
    assert len(lines(out)) == len(vectors(out)) == 13
    put(out / "mine.txt", "mine")
    put(other / "mine.txt", "mine")
    for folder in (out, other, photos):
        sentence = refused(capsys, embed, run, photos, "--out", folder, "--overwrite")
        assert f"{folder} is not empty, and not what dml embed wrote" in sentence
    assert (out / "mine.txt").read_text() == (other / "mine.txt").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["other", "out"]


def test_parquet_holds_the_same(run, photos, tmp_path, capsys, monkeypatch):
    """Oracle: pyarrow's reader."""
    from pyarrow import parquet

    out = tmp_path / "out"
    assert main(embed, run, photos, "--out", out, "--parquet") == 0
    table = parquet.read_table(out / "embeddings.parquet")
    assert table.column_names == ["image", "class", "embedding"]
    assert table["image"].to_pylist() == [line["image"] for line in lines(out)]
    assert table["class"].to_pylist() == [line["class"] for line in lines(out)]
    assert np.array_equal(np.array(table["embedding"].to_pylist(), np.float32), vectors(out))
    assert main(embed, run, photos, "--out", out, "--overwrite") == 0
    assert sorted(os.listdir(out)) == ["embeddings.npy", "index.jsonl", "info.json"]
    monkeypatch.setattr(embed, "find_spec", lambda name: None)
    sentence = refused(capsys, embed, run, photos, "--out", tmp_path / "b", "--parquet")
    assert "pip install 'dml[parquet]'" in sentence
    assert os.listdir(tmp_path) == ["out"]


def failing(monkeypatch, owner, name, error, after=0):
    """One call of a function raises, after so many that work; so do those that follow."""
    true, calls = getattr(owner, name), []

    def call(*arguments, **options):
        calls.append(None)
        if len(calls) == after + 1:
            raise error
        return true(*arguments, **options)

    monkeypatch.setattr(owner, name, call)


STAGES = [
    (trained.Embedder, "forward", 2),
    (whole_folder, "write_synced", 1),
    (whole_folder, "sync_folder", 0),
]


@pytest.mark.parametrize(
    ("before", "owner", "name", "after"),
    [
        *((before, *stage) for before in (False, True) for stage in STAGES),
        (False, Path, "rename", 0),
        (True, Path, "rename", 0),  # the old folder aside
        (True, Path, "rename", 1),  # the new one in its place
    ],
)
@pytest.mark.parametrize(
    ("error", "code"), [(OSError(28, "No space left on device"), 2), (KeyboardInterrupt(), 130)]
)
def test_an_end_in_the_middle_leaves_what_was(
    run, photos, tmp_path, monkeypatch, capsys, before, owner, name, after, error, code
):
    out = tmp_path / "out"
    if before:
        assert main(embed, run, photos / "cup", "--out", out) == 0
    was = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        failing(patch, owner, name, error, after)
        arguments = (run, photos, "--out", out, "--batch", 2, "--overwrite")
        assert main(embed, *arguments) == code
    assert capsys.readouterr().err.count("\n") == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == was
    assert sorted(os.listdir(tmp_path)) == (["out"] if before else [])


def test_a_full_disk_leaves_what_was(run, photos, small_disk, capsys):
    """Room for the embeddings of one class (three pages and three folders), not for another set."""
    out = small_disk("16k") / "out"
    assert main(embed, run, photos / "cup", "--out", out) == 0
    was = {path: path.read_bytes() for path in out.iterdir()}
    sentence = refused(capsys, embed, run, photos, "--out", out, "--overwrite")
    assert "No space left on device; make room" in sentence
    assert os.listdir(out.parent) == ["out"]
    assert {path: path.read_bytes() for path in out.iterdir()} == was


def test_a_kill_in_the_middle_leaves_nothing(run, tmp_path):
    root, out = tmp_path / "photos", tmp_path / "sets" / "out"
    for i in range(4):
        put(root / f"{i}.jpg", encode(i))
    os.mkfifo(root / "9.jpg")  # reading it waits for a writer
    command = [sys.executable, "dml/embed.py", run, root, "--out", out]
    command = [str(word) for word in (*command, "--batch", 2, "--workers", 0)]
    with subprocess.Popen(command, cwd=ROOT, env=environment()) as process:
        pipe = os.open(root / "9.jpg", os.O_WRONLY)  # returns when the program has come to it
        process.send_signal(signal.SIGKILL)
        process.wait()
        os.close(pipe)
    assert os.listdir(tmp_path) == ["photos"]


def test_linked_folders_are_followed_once(run, photos, tmp_path):
    root = tmp_path / "photos"
    root.mkdir()
    (root / "kettle").symlink_to(photos / "pot")
    (root / "up").symlink_to(root)
    assert main(embed, run, root, "--out", tmp_path / "out") == 0
    assert {line["class"] for line in lines(tmp_path / "out")} == {"kettle"}
    assert len(lines(tmp_path / "out")) == 4


# ---- nearest --------------------------------------------------------------------------------------


def unit(n, d, seed):
    X = np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)
    return X / np.linalg.norm(X, axis=1, keepdims=True)


def naive(queries, gallery, k):
    """Every pair in float64, sorted."""
    found = []
    for q in queries.astype(np.float64):
        pairs = sorted(((float(q @ g), i) for i, g in enumerate(gallery)), reverse=True)
        found.append(pairs[:k])
    return np.array(found)[..., 0], np.array(found)[..., 1].astype(int)


@pytest.mark.parametrize("library", ["faiss", "torch"])
@pytest.mark.parametrize(("q", "n", "k"), [(1, 50, 5), (7, 300, 20), (30, 9, 9), (2, 1, 1)])
def test_nearest_equals_the_loop(monkeypatch, library, q, n, k):
    if library == "torch":
        monkeypatch.setitem(sys.modules, "faiss", None)  # as if it were not installed
        monkeypatch.setattr(neighbours, "CHUNK", 4)
    else:
        failing(monkeypatch, neighbours, "nearest_by_torch", AssertionError("faiss is installed"))
    queries, gallery = unit(q, 24, 1), unit(n, 24, 2)
    S, places = neighbours.nearest(queries, gallery, k)
    S_naive, places_naive = naive(queries, gallery, k)
    assert S.dtype == np.float32
    np.testing.assert_allclose(S, S_naive, atol=1e-6)
    assert np.array_equal(places, places_naive)


@pytest.mark.parametrize("library", ["faiss", "torch"])
def test_nearest_gives_all_there_are(monkeypatch, library):
    if library == "torch":
        monkeypatch.setitem(sys.modules, "faiss", None)
    S, places = neighbours.nearest(unit(3, 8, 0), unit(4, 8, 1), 100)
    assert S.shape == places.shape == (3, 4)
    assert all(set(row) == {0, 1, 2, 3} for row in places.tolist())


def test_ties_differ_in_order_only():
    """Every vector four times: the libraries may order copies as they like."""
    queries, gallery = unit(5, 8, 0), np.tile(unit(10, 8, 1), (4, 1))
    S, places = neighbours.nearest(queries, gallery, 8)
    S_torch, places_torch = neighbours.nearest_by_torch(queries, gallery, 8)
    np.testing.assert_allclose(S, S_torch, atol=1e-6)
    assert np.array_equal(np.sort(places % 10), np.sort(places_torch % 10))


# ---- search ---------------------------------------------------------------------------------------


def test_icons_are_found_in_shards(run, icon_set, tmp_path, capsys):
    index = load_index(ICONS)
    reader, rows = ImageReader(index), index.positions("test")[[3, 500]]
    for row in rows.tolist():
        put(tmp_path / "queries" / f"{row}.png", reader.read(row))
    X = vectors(icon_set)
    found = answers(capsys, run, icon_set, tmp_path / "queries", "--k", 7)
    assert [a["query"] for a in found] == [str(tmp_path / f"queries/{row}.png") for row in rows]
    for answer, place in zip(found, (3, 500), strict=True):
        assert answer["class"] is None
        similarities = [one["similarity"] for one in answer["found"]]
        S, places = naive(X[[place]], X, 7)
        np.testing.assert_allclose(similarities, S[0], atol=2e-6)
        assert answer["found"][0]["image"] == f"{rows[0] - 3 + place:08d}"  # another path: found
        assert answer["found"][0]["class"] == lines(icon_set)[places[0, 0]]["class"]


@pytest.mark.parametrize("query", ["mug/1.png", "loose.png", "."])
def test_a_query_of_the_set_does_not_find_itself(run, photos, photo_set, capsys, query):
    found = answers(capsys, run, photo_set, photos / query, "--k", 100)
    everyone = {line["image"]: line["class"] for line in lines(photo_set)}
    assert len(found) == (13 if query == "." else 1)
    for answer in found:
        own = str(Path(answer["query"]).relative_to(photos))
        assert answer["class"] == everyone[own]
        assert {one["image"]: one["class"] for one in answer["found"]} == {
            image: name for image, name in everyone.items() if image != own
        }


def test_itself_is_seen_through_links_and_dots(run, photos, photo_set, tmp_path, capsys):
    (tmp_path / "link").symlink_to(photos)
    for path in (tmp_path / "link" / "cup" / "1.png", photos / "pot" / ".." / "cup" / "1.png"):
        (answer,) = answers(capsys, run, photo_set, path, "--k", 13)
        assert "cup/1.png" not in [one["image"] for one in answer["found"]]
        assert len(answer["found"]) == 12


def test_fewer_are_found_than_asked_for(run, photos, tmp_path, capsys):
    put(tmp_path / "one" / "a.png", encode(1, "PNG"))
    assert main(embed, run, tmp_path / "one", "--out", tmp_path / "set") == 0
    (answer,) = answers(capsys, run, tmp_path / "set", photos / "loose.png", "--k", 9)
    assert [one["image"] for one in answer["found"]] == ["a.png"]
    assert main(search, run, tmp_path / "set", tmp_path / "one") == 0
    assert "nothing else is in the set" in capsys.readouterr().out


def test_text_and_json_say_the_same(run, photos, photo_set, capsys):
    (answer,) = answers(capsys, run, photo_set, photos / "mug" / "1.png", "--k", 3)
    assert main(search, run, photo_set, photos / "mug" / "1.png", "--k", 3) == 0
    head, *rest = capsys.readouterr().out.splitlines()
    assert head == f"{photos / 'mug' / '1.png'}  (mug)"
    assert [line.split() for line in rest] == [
        [f"{one['similarity']:.4f}", one["image"], *filter(None, [one["class"]])]
        for one in answer["found"]
    ]


def test_torch_finds_what_faiss_finds(run, photos, photo_set, capsys, monkeypatch):
    by_faiss = answers(capsys, run, photo_set, photos, "--k", 3)
    monkeypatch.setitem(sys.modules, "faiss", None)
    by_torch = answers(capsys, run, photo_set, photos, "--k", 3)
    for a, b in zip(by_faiss, by_torch, strict=True):
        assert [one["image"] for one in a["found"]] == [one["image"] for one in b["found"]]


def frames(picture, rows, columns):
    """The colours of the frames."""
    pitch = CELL + 2 * FRAME + GAP
    down = pitch + 2 * LINE
    assert picture.size == (2 * GAP + (columns + 1) * pitch, GAP + rows * down)
    return [
        [
            picture.getpixel((2 * GAP + j * pitch + 1, GAP + i * down + 1))
            for j in range(1, columns + 1)
        ]
        for i in range(rows)
    ]


def test_the_picture_frames_by_class(run, photos, photo_set, tmp_path, capsys):
    found = answers(capsys, run, photo_set, photos, "--k", 12, "--picture", tmp_path / "found.png")
    colours = {None: PLAIN, True: RIGHT, False: WRONG}
    expected = [
        [
            colours[answer["class"] == one["class"] if answer["class"] and one["class"] else None]
            for one in answer["found"]
        ]
        for answer in found
    ]
    assert {PLAIN, RIGHT, WRONG} == {colour for row in expected for colour in row}
    with Image.open(tmp_path / "found.png") as picture:
        assert frames(picture, 13, 12) == expected
    assert os.listdir(tmp_path) == ["found.png"]


def test_the_picture_shows_the_images(run, icon_set, tmp_path, capsys):
    """A query that is found first, from shards: both cells are the same picture."""
    index = load_index(ICONS)
    put(tmp_path / "q.png", ImageReader(index).read(int(index.positions("test")[0])))
    out = tmp_path / "found.png"
    (answer,) = answers(capsys, run, icon_set, tmp_path / "q.png", "--k", 2, "--picture", out)
    with Image.open(out) as picture:
        assert frames(picture, 1, 2) == [[PLAIN, PLAIN]]
        cells = [
            np.asarray(picture.crop((x, GAP + FRAME, x + CELL, GAP + FRAME + CELL)))
            for x in (GAP + FRAME, 3 * GAP + CELL + 3 * FRAME)
        ]
    assert answer["found"][0]["similarity"] == pytest.approx(1, abs=1e-5)
    assert np.array_equal(*cells)
    assert cells[0].std() > 0


def test_a_single_query_has_the_class_of_its_folder(run, photos, photo_set, tmp_path, capsys):
    """Outside of the set, in a folder that is called as one of its classes."""
    data, out = (photos / "mug" / "1.png").read_bytes(), tmp_path / "found.png"
    put(tmp_path / "mug" / "new.png", data)
    put(tmp_path / "other" / "new.png", data)
    query = tmp_path / "mug" / "new.png"
    (answer,) = answers(capsys, run, photo_set, query, "--k", 12, "--picture", out)
    assert answer["class"] == "mug"
    with Image.open(out) as picture:
        (row,) = frames(picture, 1, 12)
    colours = {None: PLAIN, "mug": RIGHT}
    assert row == [colours.get(one["class"], WRONG) for one in answer["found"]]
    assert {RIGHT, WRONG} <= set(row)
    (answer,) = answers(capsys, run, photo_set, tmp_path / "other" / "new.png")
    assert answer["class"] is None


def test_the_picture_carries_names_and_similarities(run, photos, photo_set, tmp_path, capsys):
    """Below every image there is text; another name is another text, a long one is cut."""
    below = {}
    for name in ("mug", "mug" * 20):
        put(tmp_path / name / "q.png", (photos / "mug" / "1.png").read_bytes())
        out = tmp_path / f"{name}.png"
        answers(capsys, run, photo_set, tmp_path / name, "--k", 2, "--picture", out)
        with Image.open(out) as picture:
            top = GAP + CELL + 2 * FRAME
            below[name] = np.asarray(
                picture.convert("L").crop((0, top, picture.width, top + 2 * LINE))
            )
    for text in below.values():
        columns = np.array_split(text, 3, axis=1)
        assert all((part < 128).sum() > 20 for part in columns)
    assert (
        retrieval_picture([(Image.new("RGB", (9, 9)), [])]).height == GAP + CELL + 2 * FRAME + GAP
    )


def test_a_long_picture_is_cut_and_says_so(run, photos, photo_set, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(search, "ROWS", 2)
    arguments = (run, photo_set, photos, "--k", 3, "--picture", tmp_path / "found.png")
    assert main(search, *arguments) == 0
    assert "the first 2 of 13 queries" in capsys.readouterr().err
    with Image.open(tmp_path / "found.png") as picture:
        assert len(frames(picture, 2, 3)) == 2


def test_another_model_is_refused(photos, photo_set, tmp_path, capsys):
    other = make_run(tmp_path / "other", seed=8)
    sentence = refused(capsys, search, other, photo_set, photos)
    assert f"{photo_set} was made by another model" in sentence
    assert str(other) in sentence


def test_bad_queries_are_explained(run, photos, photo_set, spoiled, tmp_path, capsys):
    def sentence(*arguments):
        return refused(capsys, search, run, photo_set, *arguments)

    assert f"{tmp_path / 'no.png'} is not there" in sentence(tmp_path / "no.png")
    assert f"{spoiled / 'b.jpg'} cannot be read as an image" in sentence(spoiled)
    assert f"{spoiled / 'd.jpg'} cannot be read as an image" in sentence(spoiled / "d.jpg")
    (tmp_path / "empty").mkdir()
    assert "has no images" in sentence(tmp_path / "empty")
    assert "--k must be at least 1" in sentence(photos, "--k", 0)
    assert "must end in .png" in sentence(photos, "--picture", tmp_path / "a.gif")
    assert "there is no folder" in sentence(photos, "--picture", tmp_path / "no" / "a.png")
    (tmp_path / "dir.png").mkdir()
    assert "cannot be written" in sentence(photos, "--picture", tmp_path / "dir.png")
    assert sorted(os.listdir(tmp_path)) == ["dir.png", "empty", "spoiled"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: folder.rename(folder.parent / "moved"), "there is no folder"),
        (lambda folder: (folder / "info.json").unlink(), "not a folder of embeddings"),
        (lambda folder: put(folder / "info.json", "[]"), "not a folder of embeddings"),
        (
            lambda folder: spoil(folder / "info.json", lambda b: b.replace(b": 1,", b": 2,", 1)),
            "of version 2, this program reads 1",
        ),
        (lambda folder: spoil(folder / "info.json", lambda b: b.replace(b"run", b"r")), "damaged"),
        (lambda folder: (folder / "embeddings.npy").unlink(), "No such file"),
        (lambda folder: spoil(folder / "embeddings.npy", lambda b: b[:-4]), "is damaged"),
        (lambda folder: put(folder / "embeddings.npy", ""), "is damaged"),
        (lambda folder: spoil(folder / "index.jsonl", lambda b: b[:-9]), "is damaged"),
        (lambda folder: put(folder / "index.jsonl", "[" * 10**6), "is damaged"),
        (lambda folder: put(folder / "index.jsonl", b"\n"), "is damaged"),
        (
            lambda folder: spoil(folder / "index.jsonl", lambda b: b.replace(b'"cup"', b"5")),
            "index.jsonl names an image or a class that is not text",
        ),
        (
            lambda folder: spoil(
                folder / "index.jsonl", lambda b: b.replace(b'"loose.png"', b"[]")
            ),
            "index.jsonl names an image or a class that is not text",
        ),
        (lambda folder: put(folder / "info.json", "[" * 10**6), "not a folder of embeddings"),
        (
            lambda folder: put(
                folder / "info.json",
                json.dumps({**json.loads((folder / "info.json").read_text()), "source": 5}),
            ),
            "info.json has numbers where there should be text",
        ),
        (lambda folder: os.truncate(folder / "info.json", 2**42), "not a folder of embeddings"),
        (lambda folder: os.truncate(folder / "index.jsonl", 2**42), "more than the"),
        (lambda folder: os.truncate(folder / "embeddings.npy", 2**42), "more than the"),
        (lambda folder: pipe(folder / "embeddings.npy"), "not a regular file"),
        (lambda folder: pipe(folder / "index.jsonl"), "not a regular file"),
        (lambda folder: pipe(folder / "info.json"), "not a folder of embeddings"),
        (
            lambda folder: spoil(
                folder / "embeddings.npy",
                lambda b: b.replace(b"(13, 16), } ", b"(1300000, 16)}", 1),
            ),
            "is damaged",
        ),
        (
            lambda folder: put(folder / "embeddings.npy", b"\x93NUMPY\2\0\xff\xff\xff\xff{}"),
            "is damaged",
        ),
        (
            lambda folder: spoil(folder / "index.jsonl", lambda b: b[b.index(b"\n") + 1 :]),
            "12 line",
        ),
    ],
)
def test_damaged_embeddings_are_explained(run, photos, tmp_path, capsys, damage, words):
    assert main(embed, run, photos, "--out", tmp_path / "set") == 0
    damage(tmp_path / "set")
    sentence = refused(capsys, search, run, tmp_path / "set", photos)
    assert words in sentence
    assert str(tmp_path / "set") in sentence


@pytest.mark.parametrize("damage", DAMAGE)
def test_any_damage_of_embeddings_is_a_sentence_or_harmless(photo_set, tmp_path, damage):
    shutil.copytree(photo_set, tmp_path / "set")
    for trial in range(60):
        for path in sorted((tmp_path / "set").iterdir()):
            good = path.read_bytes()
            data = bytearray(good)
            damage(data, random.Random(f"{path.name} {trial}"))
            path.write_bytes(data)
            with contextlib.suppress(EmbeddedError):
                assert embedded.read(tmp_path / "set").X.shape == (13, DIMENSIONS)
            path.write_bytes(good)


def test_moved_images_are_explained(run, photos, tmp_path, capsys):
    here, out, picture = tmp_path / "here", tmp_path / "set", tmp_path / "found.png"
    for name in ("a", "b"):
        put(here / f"{name}.png", encode(ord(name), "PNG"))
    assert main(embed, run, here, "--out", out) == 0
    arguments = (run, out, photos / "loose.png")
    (here / "b.png").unlink()
    sentence = refused(capsys, search, *arguments, "--picture", picture)
    assert f"{here / 'b.png'} is no longer readable (No such file or directory)" in sentence
    here.rename(tmp_path / "there")
    sentence = refused(capsys, search, *arguments, "--picture", picture)
    assert f"have moved ({here} is not there)" in sentence
    assert not picture.exists()
    assert main(search, *arguments) == 0  # without a picture they are not needed


def test_moved_shards_are_explained(run, photos, icon_set, tmp_path, capsys):
    def told(**changes):
        info = json.loads((icon_set / "info.json").read_text())
        for name in ("embeddings.npy", "index.jsonl"):
            put(tmp_path / "set" / name, (icon_set / name).read_bytes())
        put(tmp_path / "set" / "info.json", json.dumps({**info, **changes}))
        picture = ("--picture", tmp_path / "found.png")
        return refused(capsys, search, run, tmp_path / "set", photos / "loose.png", *picture)

    assert "/gone is not there" in told(source="/gone")
    assert "has no manifest.json" in told(source=str(photos))
    assert "has other shards now" in told(shards_sha256="0" * 64)


# ---- as users start them --------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["embed", "search"])
def test_help_comes_at_once(program):
    """Without torch: it alone takes longer than the rest of the program's start."""
    command = [sys.executable, "-X", "importtime", f"dml/{program}.py", "--help"]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment(), check=True, capture_output=True, text=True
    )
    assert "python dml/embed.py runs/" in ended.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in ended.stderr.splitlines()}
    assert not imported & {"torch", "numpy", "PIL", "faiss"}


def test_both_programs_from_any_folder(run, photos, tmp_path):
    def start(program, *arguments):
        command = [sys.executable, ROOT / "dml" / program, *arguments]
        return subprocess.run(
            [str(word) for word in command],
            cwd=tmp_path,
            env=environment(PYTHONWARNINGS="error"),
            check=False,
            capture_output=True,
            text=True,
        )

    (tmp_path / "photos").symlink_to(photos)
    made = start("embed.py", run, "photos", "--out", "set", "--workers", 2)
    assert (made.returncode, made.stderr) == (0, "")
    found = start("search.py", run, "set", "photos/cup/1.png", "--k", 2, "--picture", "found.png")
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith("photos/cup/1.png  (cup)\n")
    assert (tmp_path / "found.png").exists()


class Notebook:
    """As little of a stream as print needs."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.mark.parametrize("stream", [io.StringIO, Notebook])
def test_a_search_prints_to_any_stream(stream, tmp_path, monkeypatch):
    run = make_run(tmp_path / "run")
    for n in range(3):
        put(tmp_path / f"album/{n}.png", encode(n))
    printed = stream()
    with contextlib.redirect_stdout(printed):
        assert embed.main([str(run), str(tmp_path / "album"), "--out", str(tmp_path / "out")]) == 0
        query = str(tmp_path / "album/0.png")
        assert search.main([str(run), str(tmp_path / "out"), query, "--k", "2"]) == 0
    text = printed.getvalue() if isinstance(printed, io.StringIO) else printed.text
    assert "1.png" in text
    assert "2.png" in text
