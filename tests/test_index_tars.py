"""Other people's tars, indexed where they are. The oracle is webdataset, which wrote them."""

import gzip
import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset
from pictures import encode, put
from PIL import Image
from servers import http

from shards.cache import Cache
from shards.index import INDEXED, ImageReader, load_index
from shards.index_tars import main
from shards.verify import verify

ICONS = Path(__file__).parents[1] / "shards" / "bundled" / "icons-mini"
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning"
)  # webdataset leaves its files open


def webp(seed):
    file = io.BytesIO()
    Image.open(io.BytesIO(encode(seed))).save(file, "WEBP")
    return file.getvalue()


def npy(seed):
    file = io.BytesIO()
    np.save(file, np.random.default_rng(seed).normal(size=8).astype(np.float16))
    return file.getvalue()


def sample(number):
    """Keys, suffixes and orders as people have them."""
    kinds = {
        "jpg": encode,
        "jpeg": encode,
        "png": lambda n: encode(n, "PNG"),
        "webp": webp,
        "npy": npy,
    }
    suffix = list(kinds)[number % len(kinds)]
    name = f"class {number % 4}"
    about = {"caption": "x" * number, "meta": {"class": name}}
    return {
        "__key__": f"part/{name}/a_{number:05d}",
        "__url__": "where it came from",
        suffix: kinds[suffix](number),
        "cls": str(number % 4).encode(),
        "json": json.dumps(about).encode(),
        "txt": b"a caption",
    }


@pytest.fixture(scope="module")
def tars(tmp_path_factory):
    """Written by stock webdataset, with its own owners, modes and times."""
    place = tmp_path_factory.mktemp("tars")
    for split, numbers in (("train", range(40)), ("test", range(100, 120))):
        pattern = str(place / f"{split}-%06d.tar")
        with webdataset.ShardWriter(pattern, maxcount=15, verbose=0, encoder=False) as writer:
            for number in numbers:
                writer.write(sample(number))
    return place


def delivered(paths, label):
    """(key, class, image) of every sample as webdataset delivers it."""
    for path in paths:
        for each in webdataset.WebDataset(str(path), shardshuffle=False):
            (suffix,) = set(each) & {"jpg", "jpeg", "png", "webp", "npy"}
            yield label(each), each[suffix]


def indexed(out, split, cache=None):
    index = load_index(out, cache)
    reader = ImageReader(index)
    for row, label in zip(index.positions(split), index.labels(split), strict=True):
        yield index.class_names[label], reader.read(int(row))


LABELS = {
    "cls": lambda each: each["cls"].decode(),
    "json:meta.class": lambda each: json.loads(each["json"])["meta"]["class"],
    "key-prefix": lambda each: each["__key__"].rpartition("/")[0],
    "csv:{table}": lambda each: f"of {each['__key__'][-5:]}",
}


@pytest.mark.parametrize("label", LABELS)
def test_same_images_and_labels_as_webdataset(tmp_path, tars, label, capsys):
    table, out = tmp_path / "labels.csv", tmp_path / "out"
    keys = [f"{sample(n)['__key__']},of {n:05d}\n" for n in (*range(40), *range(100, 120))]
    table.write_text("key,label\n" + "".join(keys))
    names = [str(tars / "train-00000{0..2}.tar"), str(tars / "test-*.tar")]
    split = "train=train-*,test=test-*"
    given = ["--label", label.format(table=table), "--split", split, "--out", str(out)]
    assert main([*names, *given, "--workers", "1"]) == 0
    assert f"{out}: 60 images of" in capsys.readouterr().out
    for split in ("train", "test"):
        expected = delivered(sorted(tars.glob(f"{split}-*.tar")), LABELS[label])
        assert list(indexed(out, split)) == list(expected)
    assert {path.name for path in out.iterdir()} == {"manifest.json", "index.npy"}
    assert list(verify(out, deep=True)) == []


def test_icons_packed_by_webdataset(tmp_path):
    """Real images: the bundled icons, in another order and under nested keys."""
    index = load_index(ICONS)
    reader, order = ImageReader(index), np.random.default_rng(0).permutation(500)
    with webdataset.ShardWriter(
        str(tmp_path / "icons-%06d.tar"), maxcount=200, verbose=0, encoder=False
    ) as writer:
        for row in order:
            name = index.class_names[index.rows["label"][row]]
            key = f"set/{name.replace('.', '-')}/{row}"
            writer.write({"__key__": key, "PNG": reader.read(int(row)), "cls": name.encode()})
    out = tmp_path / "out"
    assert main([str(tmp_path / "icons-*.tar"), "--label", "cls", "--out", str(out)]) == 0
    expected = [
        (index.class_names[index.rows["label"][row]], reader.read(int(row))) for row in order
    ]
    assert list(indexed(out, "train")) == expected
    assert load_index(out).manifest["version"] == INDEXED


@pytest.mark.skipif("CARS196" not in os.environ, reason="CARS196 names no tar of Cars-196")
def test_cars_packed_by_webdataset(tmp_path):
    """CARS196: a tar with the photos as cars196/CLASS/FILE.jpg."""
    with tarfile.open(os.environ["CARS196"]) as source:
        photos = [member for member in source if member.name.endswith(".jpg")]
        np.random.default_rng(0).shuffle(photos)
        with webdataset.ShardWriter(
            str(tmp_path / "cars-%06d.tar"), maxcount=2000, verbose=0, encoder=False
        ) as writer:
            for number, photo in enumerate(photos):
                _, name, _ = photo.name.split("/")
                suffix = ("jpg", "JPEG", "small.jpg")[number % 3]
                about = json.dumps({"car": {"model": name}}).encode()
                data = source.extractfile(photo).read()
                writer.write({"__key__": f"cars/{number}", "json": about, suffix: data})
    out = tmp_path / "out"
    given = ["--label", "json:car.model", "--out", str(out), "--workers", "2"]
    assert main([str(tmp_path / "cars-*.tar"), *given]) == 0
    found = 0
    for ours, sample in zip(
        indexed(out, "train"),
        webdataset.WebDataset(sorted(map(str, tmp_path.glob("*.tar"))), shardshuffle=False),
        strict=True,
    ):
        (suffix,) = (each for each in sample if each.endswith(("jpg", "jpeg")))
        assert ours == (json.loads(sample["json"])["car"]["model"], sample[suffix])
        found += 1
    assert found == len(photos) > 16_000


@pytest.mark.parametrize("ranges", [False, True])
def test_tars_on_a_server(tmp_path, tars, ranges, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with http(tars) as server:
        address = f"{server.url}/train-{{000000..000002}}.tar"
        given = ["--label", "cls", "--out", str(tmp_path / "out"), "--workers", "1"]
        assert main([address, *given]) == 0
        server.requests.clear()
        found = list(indexed(tmp_path / "out", "train", Cache(tmp_path / "cache", ranges=ranges)))
        assert sum(server.requests.values()) == (40 if ranges else 3)
    expected = delivered(sorted(tars.glob("train-*.tar")), LABELS["cls"])
    assert found == list(expected)


def refused(capsys, tmp_path, *arguments):
    out = tmp_path / "out"
    code = main([*map(str, arguments), "--out", str(out), "--workers", "1"])
    assert code == 2
    assert not list(tmp_path.glob("out*"))
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def write_tar(path, members):
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def test_bad_tars_get_a_sentence(tmp_path, tars, capsys):
    good = (tars / "train-000000.tar").read_bytes()
    put(tmp_path / "bad.tar", gzip.compress(good))
    said = refused(capsys, tmp_path, tmp_path / "bad.tar", "--label", "cls")
    assert f"{tmp_path / 'bad.tar'} is compressed (gzip), so single images cannot be read" in said
    put(tmp_path / "bad.tar", good[:6000])
    said = refused(capsys, tmp_path, tmp_path / "bad.tar", "--label", "cls")
    assert "is damaged, or no tar (truncated header): copy it again" in said
    with tarfile.open(tars / "train-000000.tar") as tar:
        second = tar.getmembers()[1].offset
    put(tmp_path / "bad.tar", good[:second] + b"\xff" * 512 + good[second + 512 :])
    said = refused(capsys, tmp_path, tmp_path / "bad.tar", "--label", "cls")
    assert f"is damaged, or no tar (no header at offset {second:,})" in said
    put(tmp_path / "bad.tar", b"no tar at all")
    said = refused(capsys, tmp_path, tmp_path / "bad.tar", "--label", "cls")
    assert "is damaged, or no tar" in said
    put(tmp_path / "bad.tar", good)
    both = (tmp_path / "bad.tar", tars / "train-000000.tar")
    assert "has the same bytes as" in refused(capsys, tmp_path, *both, "--label", "cls")
    assert "is named twice" in refused(capsys, tmp_path, both[0], both[0], "--label", "cls")
    assert "there is no such file" in refused(capsys, tmp_path, "none.tar", "--label", "cls")
    assert "has no offsets" in refused(capsys, tmp_path, "pipe:cat x.tar", "--label", "cls")


def test_bad_samples_get_a_sentence(tmp_path, capsys):
    path, image = tmp_path / "x.tar", encode(0)

    def said(label, *members):
        return refused(capsys, tmp_path, write_tar(path, members), "--label", label)

    assert "has no a.cls" in said("cls", ("a.jpg", image))
    assert "has a.jpg twice" in said("cls", ("a.jpg", image), ("a.jpg", image))
    assert "a.jpg and a.png: a key may have one image" in said(
        "cls", ("a.jpg", image), ("a.png", image)
    )
    assert "has no 'b.c' in a.json" in said("json:b.c", ("a.jpg", image), ("a.json", b'{"b": 1}'))
    assert "a.json is no JSON" in said("json:b", ("a.jpg", image), ("a.json", b"{"))
    assert "neither text nor a whole" in said("json:b", ("a.jpg", image), ("a.json", b'{"b": []}'))
    assert "has no / and no _" in said("key-prefix", ("a.jpg", image))
    assert "has control characters" in said("cls", ("a.jpg", image), ("a.cls", b"a\x1bb"))
    assert "a.jpg is empty" in said("cls", ("a.jpg", b""), ("a.cls", b"1"))
    assert "has no images (jpg, jpeg, png, webp, npy)" in said("cls", ("a.txt", b"1"))
    assert "is none of cls, json:FIELD" in said("class", ("a.jpg", image))
    put(tmp_path / "labels.csv", "key,label\nb,1\n")
    table = f"csv:{tmp_path / 'labels.csv'}"
    assert "has the key 'a', which" in said(table, ("a.jpg", image))
    put(tmp_path / "labels.csv", "name,label\nb,1\n")
    assert "has no column 'key'" in said(table, ("a.jpg", image))


def test_splits_are_told_by_names(tmp_path, tars, capsys):
    names = (tars / "train-000000.tar", tars / "test-000000.tar", "--label", "cls", "--split")
    assert "test-000000.tar belongs to no split" in refused(
        capsys, tmp_path, *names, "train=train*"
    )
    said = refused(capsys, tmp_path, *names, "train=*,test=test*")
    assert "test-000000.tar belongs to the splits train and test" in said
    assert "'Train' is not NAME=PATTERN" in refused(capsys, tmp_path, *names, "Train=*")


def test_an_image_over_two_gibibytes(tmp_path, capsys):
    """Refused by its header: nothing of it is read."""
    info = tarfile.TarInfo("a.jpg")
    info.size = 2**31 + 1
    path = tmp_path / "x.tar"
    path.write_bytes(info.tobuf())
    with path.open("r+b") as file:
        file.truncate(2**31 + 4096)
    said = refused(capsys, tmp_path, path, "--label", "cls")
    assert "has a.jpg of 2,147,483,649 bytes, more than the 1,073,741,824" in said


def test_more_images_than_an_index_holds(tmp_path, tars, capsys, monkeypatch):
    monkeypatch.setattr("shards.index_tars.MOST_IMAGES", 14)
    said = refused(capsys, tmp_path, tars / "train-000000.tar", "--label", "cls")
    assert "there are more than 14 images" in said


def test_verify_finds_a_tar_that_changed(tmp_path, tars):
    put(tmp_path / "x.tar", (tars / "train-000000.tar").read_bytes())
    copy, out = tmp_path / "x.tar", tmp_path / "out"
    assert main([str(copy), "--label", "cls", "--out", str(out), "--workers", "1"]) == 0
    row = load_index(out).rows[3]
    with copy.open("r+b") as file:
        file.seek(int(row["offset"]))
        file.write(bytes(8))
    problems = list(verify(out))
    assert problems[0] == "x.tar: differs from its checksum in the manifest"
    assert "image 00000003" in problems[1]
    assert len(problems) == 2
    copy.unlink()
    (problem,) = verify(out)
    assert f"{copy}: No such file or directory" in problem
