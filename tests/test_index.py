"""An index beside embeddings. Oracle: the exact search."""

import json
import shutil
import sys

import numpy as np
import pytest
from pictures import put
from test_search import answers, icon_set, photos, refused, run, spoil, unit  # noqa: F401

from dml import search
from dml.errors import EmbeddedError
from dml.inference import index_file, make_index
from dml.inference.embedded import FAISS, FAISS_INFO, read
from dml.inference.index_file import build, nearest_by_index, read_index
from dml.inference.neighbours import nearest


@pytest.mark.parametrize("kind", ["flat", "hnsw", "ivfpq"])
def test_an_index_finds_what_the_exact_search_finds(kind):
    centres = unit(2000, 32, 0)
    X = (centres[np.arange(11_000) % 2000] + 0.2 * unit(11_000, 32, 1)).astype(np.float32)
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    queries = X[:300] + 0.05 * unit(300, 32, 2)
    made, recall = build(X, kind)
    S, places = nearest_by_index(made, queries, X, 7)
    _, exact = nearest(queries, X, 7)
    hits = (exact[:, :, None] == places[:, None, :]).any(2).mean()
    assert hits == 1 if kind == "flat" else hits > 0.95
    # similarities are exact, in order, and of the images that are named
    assert np.allclose(S, np.einsum("qd,qkd->qk", queries, X[places]), atol=1e-5)
    assert (np.diff(S) <= 0).all()
    assert recall == 1 if kind == "flat" else recall > 0.95


def test_more_neighbours_than_images():
    X = unit(5, 8, 0)
    S, places = nearest_by_index(build(X, "hnsw")[0], X, X, 100)
    assert sorted(places[0].tolist()) == [0, 1, 2, 3, 4]
    assert S.shape == (5, 5)


@pytest.fixture
def indexed(icon_set, tmp_path, capsys):  # noqa: F811
    folder = shutil.copytree(icon_set, tmp_path / "icons")
    assert make_index.main([str(folder), "--kind", "hnsw"]) == 0
    assert "finds 100.00% of the 10 nearest" in capsys.readouterr().out
    return folder


def test_search_uses_the_index(run, photos, icon_set, indexed, capsys, monkeypatch):  # noqa: F811
    by_index = answers(capsys, run, indexed, photos, "--k", 4)
    exact = answers(capsys, run, indexed, photos, "--k", 4, "--exact")
    for a, b in zip(by_index, exact, strict=True):
        assert [one["image"] for one in a["found"]] == [one["image"] for one in b["found"]]
    calls = []
    monkeypatch.setattr(
        index_file, "nearest_by_index", lambda *a: calls.append(1) or nearest(a[1], a[2], a[3])
    )
    answers(capsys, run, indexed, photos)
    answers(capsys, run, indexed, photos, "--exact")
    answers(capsys, run, icon_set, photos)
    assert calls == [1]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: spoil(f / FAISS, lambda b: b[:-9]), "is damaged (its checksum differs)"),
        (lambda f: spoil(f / FAISS, lambda b: b"\0" * 64), "is damaged (its checksum differs)"),
        (lambda f: (f / FAISS).unlink(), "cannot be read: No such file"),
        (lambda f: put(f / FAISS_INFO, "{}"), "is of another version"),
        (lambda f: put(f / FAISS_INFO, "[" * 10**5), "is damaged"),
    ],
)
def test_a_damaged_index_is_refused(run, photos, indexed, capsys, damage, words):  # noqa: F811
    damage(indexed)
    sentence = refused(capsys, search, run, indexed, photos)
    assert words in sentence
    assert "search with --exact" in sentence
    assert answers(capsys, run, indexed, photos, "--exact")


def test_the_index_of_other_embeddings_is_refused(run, photos, indexed, capsys):  # noqa: F811
    """One image was embedded anew, and the old index was copied there."""
    X = read(indexed).X.copy()
    X[7] = X[8]
    np.save(indexed / "embeddings.npy", X)
    sentence = refused(capsys, search, run, indexed, photos)
    assert "is the index of other embeddings" in sentence
    with pytest.raises(EmbeddedError, match="other embeddings"):
        read_index(indexed, X[:-1])


def test_mistakes_are_explained(icon_set, tmp_path, capsys, monkeypatch):  # noqa: F811
    def sentence(*words):
        assert make_index.main([str(word) for word in words]) == 2
        return capsys.readouterr().err

    assert "there is no folder" in sentence(tmp_path / "no")
    assert "needs at least 9,984" in sentence(icon_set, "--kind", "ivfpq")
    monkeypatch.setitem(sys.modules, "faiss", None)
    assert "pip install 'dml[search]'" in sentence(icon_set)
    assert not (icon_set / FAISS).exists()


def test_the_index_says_what_it_is(indexed):
    head = json.loads((indexed / FAISS_INFO).read_text())
    assert (head["kind"], head["recall"]) == ("hnsw", 1.0)
    import faiss

    assert faiss.read_index(str(indexed / FAISS)).ntotal == 1000
