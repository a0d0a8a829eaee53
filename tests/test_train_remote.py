"""Whole trainings from servers and from other people's tars: the oracle is the same run from disk."""

import json
import os
import shutil
import threading
import time
from collections import Counter
from contextlib import contextmanager

import pytest
from fleet import ROOT, WORKERS, environment, free_port
from forks import Forked
from namespaces import missing, two_nodes
from pictures import make_folder
from runs import BASE, losses, train_several
from servers import Killable, http, s3

from shards.build import build
from shards.fetcher import DOWNLOADS
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
    path = place / "damaged" / "train-000001.tar"
    data = bytearray(path.read_bytes())
    data[700] ^= 1
    path.write_bytes(data)
    return place / "data"


def whole(server):
    """How often each client asked for each tar. What starts later is the first image, which tells what
    the shards hold."""
    return Counter(
        (client, path.rpartition("/")[2])
        for client, path, start in server.asked
        if path.endswith(".tar") and start == 0
    )


@contextmanager
def killed_once(root, log):
    """A slow server that is killed (SIGKILL) in the middle of a tar, and started again a second later."""
    server, ended = Killable(root, log, rate=40_000), threading.Event()
    server.kills = 0

    def watch():
        while whole(server).total() < 2:
            if ended.wait(0.02):
                return
        time.sleep(0.1)
        server.kill()
        server.kills += 1
        time.sleep(1)
        server.start()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield server
    finally:
        ended.set()
        thread.join()
        server.kill()


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
        killed_once(local.parent, place / "asked") as killed,
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
                f"data.cache_gib={5.5 * biggest / 2**30}",
            ],
            "killed": [f"data.shards={killed.url}/data", f"data.cache={place}/killed"],
            "damaged": [f"data.shards={server.url}/damaged", f"data.cache={place}/damaged"],
            "verified": [f"data.shards={local.parent}/damaged", "data.verify=true"],
            "indexed": [f"data.shards={place}/indexed"],
            "small": [
                f"data.shards={server.url}/data",
                f"data.cache={place}/small",
                "data.cache_gib=0.000001",
            ],
        }
        settings = {name: [*sets, *SMALL] for name, sets in runs.items()}
        found = train_several(2, place, settings, timeout=600)
        yield place, found, server, killed


def metrics(place, name):
    return (place / name / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize(
    "name", ["http", "http_again", "s3", "range", "limit", "killed", "indexed"]
)
def test_the_same_bytes_from_anywhere(trained, name):
    place, found, *_ = trained
    assert [code for code, _ in found["local"]] == [0, 0], found["local"]
    assert [code for code, _ in found[name]] == [0, 0], found[name]
    assert metrics(place, name) == metrics(place, "local")
    assert json.loads(metrics(place, name).splitlines()[0])["step"]


def test_a_killed_server_is_asked_again(trained):
    """What had come before it was killed does not come again."""
    place, _, _, killed = trained
    assert killed.kills == 1
    again = sum(count - 1 for count in whole(killed).values())
    assert 1 <= again <= DOWNLOADS
    assert list((place / "http").rglob("*.tar"))
    assert not list((place / "range").rglob("*.tar"))


def test_damage_on_the_server_ends_the_run(trained):
    place, found, server, _ = trained
    for code, said in found["damaged"]:
        assert code == 2, said
    assert (
        f"{server.url}/damaged/train-000001.tar differs from its checksum" in found["damaged"][0][1]
    )
    assert "Traceback" not in found["damaged"][0][1]
    assert not list((place / "damaged").rglob("train-000001*.tar"))


def test_damage_is_found_before_training(trained):
    place, found, *_ = trained
    assert [code for code, _ in found["verified"]] == [2, 2]
    said = "".join(text for _, text in found["verified"])
    assert "damaged/train-000001.tar differs from its checksum in the manifest" in said
    assert not (place / "verified" / "metrics.jsonl").exists()


def test_a_cache_that_is_too_small(trained):
    _, found, *_ = trained
    assert [code for code, _ in found["small"]] == [2, 2]
    assert "data.cache_gib allows 1,074 bytes" in found["small"][0][1]


def test_two_nodes_fetch_every_shard_once_each(local, trained, tmp_path):
    """Two network namespaces, each with a cache and two processes of one training: what the server saw."""
    if reason := missing():
        if os.environ.get("CI"):
            pytest.fail(f"CI must run this test: {reason}")
        pytest.skip(reason)
    with two_nodes(f"10.77.{os.getpid() % 250 + 1}") as nodes:
        first, address = nodes[0]
        launcher = ("ip", "netns", "exec", first)
        server = Killable(local.parent, tmp_path / "asked", address, launcher=launcher)
        sets = [*SMALL, f"data.shards={server.url}/data", "run.name=nodes"]
        port, running = free_port(), []
        for rank in range(4):
            name = nodes[rank // 2][0]
            env = environment(
                RANK=str(rank),
                LOCAL_RANK=str(rank % 2),
                WORLD_SIZE="4",
                LOCAL_WORLD_SIZE="2",
                MASTER_ADDR=address,
                MASTER_PORT=str(port),
                GLOO_SOCKET_IFNAME="eth0",
                NAMESPACE=name,
            )
            here = [f"run.dir={tmp_path}", f"data.cache={tmp_path}/{name}"]
            command = [WORKERS / "in_namespace.py", *BASE, *sets, *here]
            running.append(Forked(command, ROOT, env, tmp_path / "out", tmp_path / f"{rank}.err"))
        try:
            codes = [process.wait(200) for process in running]
        finally:
            for process in running:
                process.kill()
            server.kill()
    assert codes == [0] * 4, (tmp_path / "0.err").read_text()
    kept = [
        (address, f"{path.stem.rpartition('-')[0]}.tar")
        for name, address in nodes
        for path in (tmp_path / name).rglob("*.tar")
    ]
    assert whole(server) == Counter(kept)
    assert set(whole(server).values()) == {1}
    shards = Counter(shard for _, shard in whole(server))
    assert len(shards) == len(load_index(local).places)
    assert 2 in shards.values()  # both nodes need it
    # gradients of four processes are added in another order than those of two
    expected = pytest.approx(losses(trained[0] / "local"), rel=1e-4)
    assert losses(tmp_path / "nodes") == expected
