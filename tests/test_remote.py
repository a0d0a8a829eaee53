"""Shards on real servers: what is read is what was packed, whatever the servers do meanwhile.

The oracle is the local folder of the same shards.
"""

import datetime
import hashlib
import json
import multiprocessing
import ssl
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from fleet import environment
from pictures import make_folder
from servers import HTTP, http, s3

import shards.remote
from dml.data.ahead import Ahead
from dml.data.batches import Batches, EvalBatches, TrainBatches
from dml.data.loader import loader
from dml.data.preprocessing import Input
from shards.build import build
from shards.cache import Cache, File
from shards.fetcher import Fetcher
from shards.index import ImageReader, load_index
from shards.item import ShardError
from shards.sources import folder
from shards.verify import main as verify


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Shards of several tars."""
    place = tmp_path_factory.mktemp("shards")
    collection = folder.collect(make_folder(place / "in", classes=6, images=4))
    build(collection, "folder", place / "data", max_bytes=20_000)
    return place / "data"


@pytest.fixture(scope="module")
def server(local):
    with http(local.parent) as server:
        yield server


@pytest.fixture(autouse=True)
def calm(request, monkeypatch):
    """A server as new, and short pauses."""
    monkeypatch.setattr(shards.remote, "FIRST_PAUSE", 0.02)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        server.requests.clear()
        server.asked.clear()
        server.ranges, server.rate, server.cut, server.damaged = True, None, None, None


def everything(index):
    reader = ImageReader(index)
    rows = range(len(index.rows))
    reader.expect(rows)
    return [reader.read(row) for row in rows]


def tars(counter):
    return {path: count for path, count in counter.items() if path.endswith(".tar")}


@pytest.mark.parametrize("ranges", [False, True])
def test_a_server_gives_what_the_disk_gives(tmp_path, local, server, ranges):
    index = load_index(f"{server.url}/data/", Cache(tmp_path, ranges=ranges))
    assert everything(index) == everything(load_index(local))
    assert len(index.shards) > 3
    if ranges:
        assert not list(tmp_path.rglob("*.tar"))
        assert sum(tars(server.requests).values()) == len(index.rows)
    else:
        assert set(tars(server.requests).values()) == {1}
        again = everything(load_index(f"{server.url}/data", Cache(tmp_path)))
        assert again == everything(load_index(local))
        assert set(tars(server.requests).values()) == {1}
    assert server.requests["/data/index.npy"] == 1


def test_s3_gives_what_the_disk_gives(tmp_path, local, monkeypatch):
    with s3(local) as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        whole = load_index("s3://shards/data", Cache(tmp_path / "whole"))
        single = load_index("s3://shards/data", Cache(tmp_path / "ranges", ranges=True))
        assert everything(whole) == everything(single) == everything(load_index(local))
        with pytest.raises(
            ShardError, match=r"s3://shards/none/manifest.json .*HTTP 404 NoSuchKey"
        ):
            load_index("s3://shards/none", Cache(tmp_path))
        # a public bucket needs no credentials
        for name in list(variables)[1:]:
            monkeypatch.delenv(name)
        shards.remote._s3.cache_clear()
        anonymous = load_index("s3://shards/data", Cache(tmp_path / "anonymous"))
        assert everything(anonymous) == everything(whole)
    shards.remote._s3.cache_clear()


def test_file_addresses_come_to_the_cache(tmp_path, local):
    index = load_index(local.as_uri(), Cache(tmp_path))
    assert everything(index) == everything(load_index(local))
    assert all(path.is_relative_to(tmp_path) for path in index.shards)


def test_names_in_the_cache_tell_where_files_come_from(tmp_path, local, server):
    """webdataset's cache mixes data sets whose tars have the same names."""
    one = load_index(f"{server.url}/data", Cache(tmp_path))
    other = load_index(local.as_uri(), Cache(tmp_path))
    assert {p.name for p in one.shards} == {p.name for p in other.shards}
    assert not set(one.shards) & set(other.shards)
    assert "127.0.0.1" in one.shards[0].parent.name
    long = File(f"https://host/{'x' * 3000}/a.tar?signature=secret", 1, "0" * 64)
    assert len(Cache(tmp_path).path(long).parent.name) < 200
    assert "secret" not in str(Cache(tmp_path).path(long))


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_connection_goes_on_where_it_broke(tmp_path, local, server, ranges, monkeypatch):
    big = local / "big.tar"
    big.write_bytes(np.random.default_rng(0).bytes(3_000_000))
    data = big.read_bytes()
    file = File(f"{server.url}/data/big.tar", len(data), hashlib.sha256(data).hexdigest())
    server.ranges, server.cut = ranges, 2_200_000
    path = Cache(tmp_path).fetch(file)
    big.unlink()
    assert path.read_bytes() == data
    assert [start for _, start in server.asked] == ([0, 2**21] if ranges else [0, 0])
    assert not list(tmp_path.rglob("*.part"))


def test_a_killed_download_is_resumed(tmp_path, server, local):
    """The part that a killed process left is not downloaded again."""
    index = load_index(f"{server.url}/data", Cache(tmp_path))
    file, path = index.places[0], index.shards[0]
    part = path.with_name(f".{path.name}.{file.size}.part")
    part.write_bytes((local / "train-000000.tar").read_bytes()[:5000])
    index.local(0)
    assert server.asked[-1] == ("/data/train-000000.tar", 5000)
    # a file that is shorter than the manifest says is refused at once
    path.unlink()
    short = File(file.url, file.size + 1, file.sha256)
    with pytest.raises(ShardError, match=r"train-000000.tar is cut short .*but the manifest says"):
        index.cache.fetch(short)
    # a part of another time is found out, and the file comes again
    part.write_bytes(bytes(5000))
    index.local(0)
    assert server.asked[-1] == ("/data/train-000000.tar", 0)
    assert path.read_bytes() == (local / "train-000000.tar").read_bytes()


def test_a_server_that_is_restarted_is_waited_for(tmp_path, local):
    server = HTTP(local.parent)
    index = load_index(f"{server.url}/data", Cache(tmp_path))
    server.stop()
    threading.Timer(0.5, server.start).start()
    assert everything(index) == everything(load_index(local))
    server.stop()


def test_patience_ends_with_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(shards.remote, "PATIENCE", 0.1)
    with pytest.raises(
        ShardError, match=r"http://127.0.0.1:9/x/manifest.json could not be read for"
    ):
        load_index("http://127.0.0.1:9/x", Cache(tmp_path))


@pytest.mark.parametrize("ranges", [False, True])
def test_a_flipped_byte_on_the_server_is_refused(tmp_path, server, ranges):
    server.damaged = "/data/train-000000.tar"
    index = load_index(f"{server.url}/data", Cache(tmp_path, ranges=ranges))
    name = f"{server.url}/data/train-000000.tar"
    words = (
        "image 00000000 .* is damaged" if ranges else "differs from its checksum in the manifest"
    )
    with pytest.raises(ShardError, match=f"{name}.* {words}"):
        everything(index)
    assert not index.shards[0].exists()
    assert not list(tmp_path.rglob("*.part"))


def test_verify_brings_shards_to_a_cache(tmp_path, local, server, capsys):
    given = [f"{server.url}/data", "--cache", str(tmp_path / "a"), "--deep", "--workers", "1"]
    assert verify(given) == 0
    assert verify(given[:1]) == 1
    assert "(data.cache in a config, --cache of verify)" in capsys.readouterr().out
    server.damaged = "/data/train-000000.tar"
    assert verify([given[0], "--cache", str(tmp_path / "b")]) == 1
    found = capsys.readouterr().out.splitlines()
    assert "train-000000.tar differs from its checksum" in found[0]
    assert found[1].endswith(": 1 problems")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("gs://bucket/x", "gs:// is not read, only https://, http://, s3://, file://"),
        ("pipe:cat x.tar", "has no offsets"),
        ("{url}/none", r"cannot be read .HTTP 404 Not Found.: check the address"),
        ("file:///none", "No such file"),
    ],
)
def test_bad_addresses(tmp_path, server, address, words):
    with pytest.raises(ShardError, match=words):
        load_index(address.format(url=server.url), Cache(tmp_path))


def test_a_certificate_that_is_not_trusted_is_refused_at_once(tmp_path, local, server, monkeypatch):
    """And one that SSL_CERT_FILE names is trusted."""
    certificate, key = self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    secure = HTTP(local.parent, context=context)
    address = secure.url.replace("http://127.0.0.1", "https://localhost")
    with pytest.raises(ShardError, match=r"CERTIFICATE_VERIFY_FAILED.*SSL_CERT_FILE"):
        load_index(f"{address}/data", Cache(tmp_path))
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    shards.remote._pool.cache_clear()
    assert everything(load_index(f"{address}/data", Cache(tmp_path))) == everything(
        load_index(local)
    )
    shards.remote._pool.cache_clear()
    secure.stop()


def self_signed(folder):
    """The files of a certificate for localhost and of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "certificate").write_bytes(certificate.public_bytes(pem))
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    (folder / "key").write_bytes(private)
    return folder / "certificate", folder / "key"


def test_without_a_cache(server):
    with pytest.raises(ShardError, match=r"to keep them in \(data\.cache in a config"):
        load_index(f"{server.url}/data")


def test_a_full_disk(small_disk, server):
    place = small_disk(64 * 1024)
    index = load_index(f"{server.url}/data", Cache(place))
    with pytest.raises(ShardError, match=rf"the cache {place} is full, .* does not fit: make room"):
        everything(index)
    assert not list(place.rglob("*.part"))
    for path in place.rglob("*.tar"):  # what is there is whole
        assert hashlib.sha256(path.read_bytes()).hexdigest().startswith(path.stem[-12:])


def test_a_cache_that_cannot_be_written(tmp_path, server):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ShardError, match=r"the cache .*/file/inner cannot be written .Not a directory."
    ):
        load_index(f"{server.url}/data", Cache(tmp_path / "file" / "inner"))


def test_the_oldest_leave_when_the_limit_is_reached(tmp_path, server, local):
    sizes = [shard["bytes"] for shard in load_index(local).manifest["shards"]]
    cache = Cache(tmp_path, limit=sum(sizes[:2]) + 100)
    index = load_index(f"{server.url}/data", cache)
    for shard in range(len(index.shards)):
        index.local(shard)
        assert sum(path.stat().st_size for path in tmp_path.rglob("*.tar")) <= cache.limit
    assert index.shards[-1].exists()
    assert not index.shards[0].exists()
    assert everything(index) == everything(load_index(local))
    cache.release([index.places[-1]])
    cache.fetch(index.places[0])
    assert not index.shards[-1].exists()
    with pytest.raises(ShardError, match=r"may hold 100 bytes, but .* raise data.cache_gib"):
        everything(load_index(f"{server.url}/data", Cache(tmp_path / "small", limit=100)))


def read_all(address, place, answers):
    index = load_index(address, Cache(place))
    answers.put(hashlib.sha256(b"".join(everything(index))).hexdigest())


def test_two_machines_of_three_processes_fetch_every_shard_once_each(tmp_path, server, local):
    """A machine is a cache folder, which its processes share."""
    context, answers = multiprocessing.get_context("fork"), multiprocessing.SimpleQueue()
    places = [tmp_path / machine for machine in ("a", "b") for _ in range(3)]
    readers = [
        context.Process(target=read_all, args=(f"{server.url}/data", place, answers))
        for place in places
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
        assert reader.exitcode == 0
    expected = hashlib.sha256(b"".join(everything(load_index(local)))).hexdigest()
    assert {answers.get() for _ in readers} == {expected}
    assert set(tars(server.requests).values()) == {2}


class Spy:
    """Stands for the process that downloads, and notes what it is told."""

    def __init__(self, cache):
        self.wanted, self.released = [], []

    def want(self, files, no_longer=()):
        self.wanted.append(files)
        self.released += no_longer

    def close(self):
        pass


def train_batches(index, seed=0):
    rows, labels = index.positions("train"), index.labels("train")
    batches = Batches(rows, labels, classes=2, per_class=2, seed=seed)
    return TrainBatches(index, batches, Input(size=8, resize=8))


def files_of(index, batches, steps):
    """In the order of first need, by a naive loop."""
    found = []
    for step in steps:
        for row in batches.batches(step)[0]:
            place = index.places[index.rows["shard"][row]]
            if place not in found:
                found.append(place)
    return found


def test_files_are_wanted_in_the_order_of_the_batches(tmp_path, server, monkeypatch):
    monkeypatch.setattr("dml.data.ahead.Fetcher", Spy)
    index = load_index(f"{server.url}/data", Cache(tmp_path))
    batches = train_batches(index)
    for start in (0, 7):
        ahead = Ahead(batches, range(start, 100), index.cache)
        assert ahead.fetcher.wanted == [files_of(index, batches, range(start, 100))]


def test_with_a_limit_the_window_moves_with_the_batches(tmp_path, server, monkeypatch):
    """What is wanted always fits, begins with the next batch, and reaches as far as it can."""
    monkeypatch.setattr("dml.data.ahead.Fetcher", Spy)
    index = load_index(f"{server.url}/data", Cache(tmp_path, limit=70_000))
    batches = train_batches(index)
    ahead = Ahead(batches, range(30), index.cache)
    ahead.refuse_small_cache()
    for step in range(30):
        ahead.at(step)
        wanted = ahead.fetcher.wanted[-1]
        assert set(files_of(index, batches, [step])) <= set(wanted)
        assert sum(file.size for file in wanted) <= 70_000
        assert set(wanted) == set(files_of(index, batches, range(step, ahead.end)))
    assert ahead.fetcher.released
    small = load_index(f"{server.url}/data", Cache(tmp_path / "small", limit=100))
    with pytest.raises(
        ShardError, match=r"data\.cache_gib allows 100 bytes, but .* one batch needs"
    ):
        Ahead(train_batches(small), range(3), small.cache).refuse_small_cache()


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_machine_fetches_for_its_own_processes(tmp_path, server, monkeypatch, rank):
    """Two machines of two processes: the first process of each looks ahead, for both."""
    monkeypatch.setattr("dml.data.ahead.Fetcher", Spy)
    monkeypatch.setenv("LOCAL_RANK", str(rank % 2))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    index = load_index(f"{server.url}/data", Cache(tmp_path))
    rows, labels = index.positions("test"), index.labels("test")
    batches = EvalBatches(index, rows, labels, Input(size=8, resize=8), 2, rank, 4)
    ahead = Ahead(batches, range(len(batches)), index.cache)
    if rank % 2:
        assert ahead.fetcher is None
    else:
        half = rows[:12] if rank == 0 else rows[12:]
        assert set(ahead.fetcher.wanted[-1]) == set(ImageReader(index).files(half))


@pytest.mark.parametrize("limit", [None, 70_000])
def test_batches_come_through_the_cache_ahead_of_use(tmp_path, server, local, limit):
    """The real process downloads, with and without room for everything: the same batches."""
    index = load_index(f"{server.url}/data", Cache(tmp_path, limit))
    batches, order = train_batches(index), range(6)
    expected = list(loader(train_batches(load_index(local)), order))
    ahead = Ahead(batches, order, index.cache)
    while not ahead.is_ready():
        time.sleep(0.05)
    for step, (images, labels) in enumerate(loader(batches, order)):
        ahead.at(step)
        assert (images == expected[step][0]).all()
        assert (labels == expected[step][1]).all()
    if limit is None:
        assert set(tars(server.requests).values()) == {1}
    assert ahead.fetcher._process.is_alive()
    ahead.close()
    if limit is None:  # all that the training needs is here: nothing to start
        assert Ahead(batches, order, index.cache).fetcher is None


def test_a_download_that_fails_is_told_by_who_reads(tmp_path, server):
    server.damaged = "/data/train-000000.tar"
    index = load_index(f"{server.url}/data", Cache(tmp_path))
    fetcher = Fetcher(index.cache)
    fetcher.want([index.places[0]])
    deadline = time.monotonic() + 60
    while not fetcher.has_failed():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(ShardError, match="differs from its checksum"):
        index.local(0)
    fetcher.close()


def test_a_process_with_a_fetcher_leaves_nothing_behind(tmp_path, server):
    """No semaphore of a progress bar, of which Python would warn when the process ends."""
    script = """
import sys, time
from pathlib import Path
from shards.cache import Cache
from shards.fetcher import Fetcher
from shards.index import load_index

if __name__ == "__main__":
    index = load_index(sys.argv[1], Cache(Path(sys.argv[2])))
    fetcher = Fetcher(index.cache)
    fetcher.want(index.places)
    while not all(map(index.cache.has, index.places)):
        time.sleep(0.02)
    fetcher.close()
"""
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, str(tmp_path / "script.py"), f"{server.url}/data", str(tmp_path)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_manifest_from_a_server_names_no_local_paths(tmp_path, local, server):
    from pictures import reseal

    (local.parent / "bad").mkdir()
    for name in ("manifest.json", "index.npy"):
        (local.parent / "bad" / name).write_bytes((local / name).read_bytes())
    found = json.loads((local / "manifest.json").read_text())["shards"]
    reseal(local.parent / "bad", version=3, shards=[{**s, "url": "/etc/passwd"} for s in found])
    with pytest.raises(
        ShardError, match="points to /etc/passwd, which is a path on another machine"
    ):
        load_index(f"{server.url}/bad", Cache(tmp_path))
