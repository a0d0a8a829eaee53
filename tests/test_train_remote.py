"""Whole trainings from servers and from other people's tars: the oracle is the same run from disk."""

import json
import shutil

import pytest
from pictures import make_folder
from runs import train_several
from servers import http, s3

from shards.build import build
from shards.index import load_index
from shards.index_tars import index_tars
from shards.sources import folder

pytestmark = pytest.mark.training
SMALL = [
    "data.dataset=folder",
    "batch.classes=4",
    "batch.per_class=4",
    "length.steps=4",
    "eval.ks=[1]",
    "eval.every_steps=2",
]


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    place = tmp_path_factory.mktemp("shards")
    collection = folder.collect(make_folder(place / "in", classes=8, images=4))
    build(collection, "folder", place / "data", max_bytes=20_000)
    shutil.copytree(place / "data", place / "damaged")
    shutil.copytree(place / "data", place / "restarted")
    path = place / "damaged" / "train-000001.tar"
    data = bytearray(path.read_bytes())
    data[700] ^= 1
    path.write_bytes(data)
    return place / "data"


@pytest.fixture(scope="module")
def trained(local, tmp_path_factory):
    """{name: [(exit code, stderr)]} of all runs, by two processes, and the server."""
    place = tmp_path_factory.mktemp("runs")
    tars = sorted(map(str, local.glob("*.tar")))
    index_tars(tars, "json:class", "train=train-*,test=test-*", place / "indexed")
    with (
        pytest.MonkeyPatch.context() as patch,
        http(local.parent) as server,
        s3(local) as variables,
    ):
        for name, value in variables.items():
            patch.setenv(name, value)
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            patch.delenv(name, raising=False)
        biggest = max(shard["bytes"] for shard in load_index(local).manifest["shards"])
        runs = {
            "local": [f"data.shards={local}", "data.verify=true"],
            "http": [f"data.shards={server.url}/data", f"data.cache={place}/http"],
            "http_again": [f"data.shards={server.url}/data", f"data.cache={place}/http"],
            "s3": ["data.shards=s3://shards/data", f"data.cache={place}/s3", "data.workers=1"],
            "range": [
                f"data.shards={server.url}/data",
                f"data.cache={place}/range",
                "data.remote=range",
                "data.workers=1",
            ],
            "limit": [
                f"data.shards={server.url}/data",
                f"data.cache={place}/limit",
                f"data.cache_gib={4.5 * biggest / 2**30}",
            ],
            "restarted": [f"data.shards={server.url}/restarted", f"data.cache={place}/restarted"],
            "damaged": [f"data.shards={server.url}/damaged", f"data.cache={place}/damaged"],
            "verified": [f"data.shards={local.parent}/damaged", "data.verify=true"],
            "indexed": [f"data.shards={place}/indexed"],
            "small": [
                f"data.shards={server.url}/data",
                f"data.cache={place}/small",
                "data.cache_gib=0.000001",
            ],
        }
        server.breaks = ("/restarted/", 4, 1.5)
        settings = {name: [*sets, *SMALL] for name, sets in runs.items()}
        found = train_several(2, place, settings, timeout=600)
        yield place, found, server


def metrics(place, name):
    return (place / name / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize(
    "name", ["http", "http_again", "s3", "range", "limit", "restarted", "indexed"]
)
def test_the_same_bytes_from_anywhere(trained, name):
    place, found, _ = trained
    assert [code for code, _ in found["local"]] == [0, 0], found["local"]
    assert [code for code, _ in found[name]] == [0, 0], found[name]
    assert metrics(place, name) == metrics(place, "local")
    assert json.loads(metrics(place, name).splitlines()[0])["step"]


def test_what_two_processes_asked_the_server_for(trained):
    place, _, server = trained
    tars = {path: n for path, n in server.requests.items() if path.startswith("/restarted/")}
    assert server.outages == 1
    assert list((place / "http").rglob("*.tar"))
    assert not list((place / "range").rglob("*.tar"))
    assert sum(n for path, n in tars.items() if path.endswith(".tar")) <= 2 * len(tars)


def test_damage_on_the_server_ends_the_run(trained):
    place, found, server = trained
    for code, said in found["damaged"]:
        assert code == 2, said
    assert (
        f"{server.url}/damaged/train-000001.tar differs from its checksum" in found["damaged"][0][1]
    )
    assert "Traceback" not in found["damaged"][0][1]
    assert not list((place / "damaged").rglob("train-000001*.tar"))


def test_damage_is_found_before_training(trained):
    place, found, _ = trained
    assert [code for code, _ in found["verified"]] == [2, 2]
    said = "".join(text for _, text in found["verified"])
    assert "damaged/train-000001.tar differs from its checksum in the manifest" in said
    assert not (place / "verified" / "metrics.jsonl").exists()


def test_a_cache_that_is_too_small(trained):
    _, found, _ = trained
    assert [code for code, _ in found["small"]] == [2, 2]
    assert "data.cache_gib allows 1,074 bytes" in found["small"][0][1]
