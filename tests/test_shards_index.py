"""The index and the reader. Oracles: the source files, tarfile, and stock webdataset."""

import gc
import hashlib
import io
import json
import multiprocessing
import os
import pickle
import tarfile

import numpy as np
import pytest
from pictures import as_version_1, encode, make_folder, pixels, put, put_index, reseal

from shards.build import build
from shards.index import ROW, ImageReader, load_index, load_npy, read_manifest
from shards.item import ShardError
from shards.sources import folder


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Three splits, many small tars."""
    root = make_folder(tmp_path_factory.mktemp("own"), splits=("train", "query", "gallery"))
    out = tmp_path_factory.mktemp("packed") / "own"
    build(folder.collect(root), "folder", out, max_bytes=12_000)
    return root, out


@pytest.fixture
def copy(packed, tmp_path):
    out = tmp_path / "copy"
    out.mkdir()
    for path in packed[1].iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    return out


def told(out, row, shard):
    with tarfile.open(shard) as tar:
        return json.load(tar.extractfile(f"{row:08d}.json"))


def test_every_row_gives_the_bytes_of_its_file(packed):
    root, out = packed
    index = load_index(out)
    reader = ImageReader(index)
    assert len(index.shards) > len(index.splits) == 3
    for number, row in enumerate(index.rows):
        about = told(out, number, index.shards[row["shard"]])
        assert reader.read(number) == (root / about["source"]).read_bytes()
        assert about["class"] == index.class_names[row["label"]]
        assert about["split"] == index.splits[row["split"]]
    reader.close()


def test_splits_labels_and_positions(packed):
    index = load_index(packed[1])
    assert index.splits == ("train", "query", "gallery")
    assert index.class_names == ("train0", "train1", "train2", "class0", "class1", "class2")
    assert index.positions("train").tolist() == list(range(12))
    assert index.labels("train").tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert index.labels("query").tolist() == index.labels("gallery").tolist()
    assert set(index.labels("query")) == {3, 4, 5}
    assert index.positions("gallery").dtype == index.labels("gallery").dtype == np.int64
    with pytest.raises(ShardError, match="no split 'test', only train, query, gallery"):
        index.positions("test")
    assert read_manifest(packed[1])["splits"]["query"] == {"classes": 3, "images": 12}


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # webdataset leaves its tars open
@pytest.mark.parametrize("split", ["train", "query", "gallery"])
def test_stock_webdataset_reads_the_same(packed, split):
    webdataset = pytest.importorskip("webdataset")
    index, reader = load_index(packed[1]), ImageReader(load_index(packed[1]))
    paths = [str(path) for path in index.shards if path.name.startswith(split)]
    dataset = webdataset.WebDataset(paths, shardshuffle=False).decode("pil")
    samples = list(dataset.to_tuple("__key__", "jpg;png", "cls", "json"))
    del dataset
    gc.collect()
    assert [int(key) for key, *_ in samples] == index.positions(split).tolist()
    assert [label for _, _, label, _ in samples] == index.labels(split).tolist()
    for key, image, label, about in samples:
        assert np.array_equal(np.asarray(image.convert("RGB")), pixels(reader.read(int(key))))
        assert about["class"] == index.class_names[label]


def read_all(reader, seed, answers):
    order = np.random.default_rng(seed).permutation(len(reader.index.rows))
    answers.put({int(row): hashlib.sha256(reader.read(int(row))).hexdigest() for row in order})
    reader.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_reader_goes_to_other_processes(packed, method):
    reader = ImageReader(load_index(packed[1]))
    expected = {
        row: hashlib.sha256(reader.read(row)).hexdigest() for row in range(len(reader.index.rows))
    }  # every descriptor is open now, and inherited by a fork
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    children = [context.Process(target=read_all, args=(reader, s, answers)) for s in range(3)]
    for child in children:
        child.start()
    assert [answers.get(timeout=60) for _ in children] == [expected] * 3
    for child in children:
        child.join()
    assert hashlib.sha256(reader.read(0)).hexdigest() == expected[0]


def test_descriptors_open_late_once_and_close(packed):
    def descriptors():
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        return sum(str(packed[1]) in os.readlink(link) for link in links if os.path.islink(link))

    index = load_index(packed[1])
    reader = ImageReader(index)
    assert descriptors() == 0
    reader.read(0)
    reader.read(1)
    assert descriptors() == 1
    for row in range(len(index.rows)):
        reader.read(row)
    assert descriptors() == len(index.shards)
    other = pickle.loads(pickle.dumps(reader))
    assert descriptors() == len(index.shards)
    assert other.read(0) == reader.read(0)
    reader.close()
    assert descriptors() == 1
    del other
    assert descriptors() == 0


def test_not_there_and_not_finished(tmp_path, copy):
    with pytest.raises(ShardError, match="nowhere is not there"):
        load_index(tmp_path / "nowhere")
    (copy / "manifest.json").unlink()
    with pytest.raises(ShardError, match="not finished"):
        load_index(copy)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 4}, "of version 4, but this program reads versions up to 3"),
        ({"version": 0}, "of version 0"),
        ({"version": [2]}, r"of version \[2\]"),
        ({"version": "2"}, "of version '2'"),
        ({"version": True}, "of version True"),
        ({"format": "wids"}, "not the manifest of dml-shards"),
        ({"shards": [{"name": "../x-000000.tar", "bytes": 1, "sha256": ""}]}, "damaged"),
        ({"splits": {"train": 3}}, "damaged"),
        ({"classes": None}, "damaged"),
        ({"source": None}, "damaged"),
    ],
)
def test_a_manifest_that_is_not_ours(copy, changes, words):
    reseal(copy, **changes)
    with pytest.raises(ShardError, match=words):
        load_index(copy)


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff", "[" * 100_000])
def test_a_manifest_that_is_no_manifest(copy, text):
    (copy / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(ShardError, match="not the manifest"):
        load_index(copy)


def test_a_tar_cut_short_or_missing_is_noticed_at_load(copy):
    path = load_index(copy).shards[1]
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ShardError, match=rf"{path.name} is cut short .* build the shards again"):
        load_index(copy)
    path.unlink()
    with pytest.raises(ShardError, match=rf"{path.name}: No such file"):
        load_index(copy)


def test_a_tar_cut_short_later_is_noticed_by_the_reader(copy):
    reader = ImageReader(load_index(copy))
    os.truncate(reader.index.shards[0], 1024)
    with pytest.raises(ShardError, match="was cut short"):
        reader.read(1)


def test_an_index_that_differs_from_its_checksum(copy):
    data = bytearray((copy / "index.npy").read_bytes())
    data[-1] ^= 1
    (copy / "index.npy").write_bytes(data)
    with pytest.raises(ShardError, match=r"index.npy differs from its checksum"):
        load_index(copy)


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("offset", 2**63 - 1, "points outside a shard"),
        ("offset", -1, "points outside a shard"),
        ("size", 2**31 - 1, "points outside a shard"),
        ("size", 0, "points outside a shard"),
        ("shard", 99, "has a shard that"),
        ("label", -1, "has a label that"),
        ("split", 3, "has a split that"),
        ("split", 1, "other numbers of images"),
    ],
)
def test_rows_that_do_not_belong_to_the_shards(copy, column, value, words):
    rows = load_index(copy).rows.copy()
    rows[column][0] = value
    put_index(copy, rows)
    with pytest.raises(ShardError, match=words):
        load_index(copy)


class Hostile:
    def __reduce__(self):
        return print, ("unpickled",)


def test_an_index_never_unpickles(copy, capsys):
    put_index(copy, np.array([Hostile()], dtype=object))
    with pytest.raises(ShardError, match="not an index"):
        load_index(copy)
    assert capsys.readouterr().out == ""
    put_index(copy, np.zeros(3, ROW["label"]))
    with pytest.raises(ShardError, match="not an index"):
        load_index(copy)


def test_odd_names_survive(tmp_path):
    """Class names are anything a folder can be called; tars and manifest stay plain ASCII."""
    for name in ("ünï c/ö".replace("/", "-"), "a.b", 'quo"te'):
        for i in range(2):
            put(tmp_path / "in/train" / name / f"ä {i}.jpg", encode(i))
            put(tmp_path / "in/test" / name / f"{i}.jpg", encode(i))
    build(folder.collect(tmp_path / "in"), "folder", tmp_path / "out")
    index = load_index(tmp_path / "out")
    assert set(index.class_names) == {"ünï c-ö", "a.b", 'quo"te'}
    assert (tmp_path / "out/manifest.json").read_bytes().isascii()


# damage, and shards of the first version


def flip(path, at, bit=0):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def test_one_flipped_bit_of_an_image_is_noticed(copy):
    index = load_index(copy)
    reader, row = ImageReader(index), 7
    name, offset, size = (index.shards[index.rows["shard"][row]], *index.rows[row].item()[3:5])
    good = [reader.read(i) for i in range(len(index.rows))]
    flip(name, offset + size // 2)
    with pytest.raises(ShardError) as error:
        reader.read(row)
    assert str(error.value) == (
        f"{name}: image 00000007 ({size:,} bytes at offset {offset:,}) is damaged, its checksum "
        "differs from that in the index: copy or build the shards again"
    )
    assert [reader.read(i) for i in range(len(good)) if i != row] == good[:row] + good[row + 1 :]


def test_a_changed_manifest_is_noticed(copy):
    text = (copy / "manifest.json").read_text()
    (copy / "manifest.json").write_text(text.replace('"class1"', '"class7"'))
    with pytest.raises(
        ShardError, match=r"manifest.json is damaged: copy or build the shards again"
    ):
        load_index(copy)
    (copy / "manifest.json").write_text(json.dumps(json.loads(text)))  # the same, on one line
    load_index(copy)


def test_the_order_of_the_splits_is_part_of_the_checksum(copy):
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["splits"] = dict(reversed(manifest["splits"].items()))
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ShardError, match="damaged"):
        load_index(copy)


def test_version_1_is_read_without_the_checks(copy):
    good = load_index(copy)
    expected = [ImageReader(good).read(row) for row in range(len(good.rows))]
    as_version_1(copy)
    index = load_index(copy)
    assert (good.has_checksums, index.has_checksums) == (True, False)
    assert [ImageReader(index).read(row) for row in range(len(index.rows))] == expected
    assert index.class_names == good.class_names
    assert (index.labels("query") == good.labels("query")).all()
    row = index.rows[7]
    flip(index.shards[row["shard"]], int(row["offset"] + row["size"] // 2))
    assert ImageReader(index).read(7) != expected[7]  # nobody notices


def test_the_index_of_another_version_is_refused(copy):
    rows = load_index(copy).rows
    as_version_1(copy)
    reseal(copy, version=2)
    with pytest.raises(ShardError, match="not an index"):
        load_index(copy)
    put_index(copy, rows, version=1)
    with pytest.raises(ShardError, match="not an index"):
        load_index(copy)


# files that claim or hold more than there is memory


def npy(header, data=b"", version=(1, 0)):
    """A .npy file with any header."""
    length = len(header).to_bytes(2 if version == (1, 0) else 4, "little")
    return b"\x93NUMPY" + bytes(version) + length + header.encode("latin-1") + data


HEADERS = {
    "more rows than memory": npy(f"{{'descr': {ROW.descr}, 'fortran_order': False, 'shape': (10**12,)}}"),
    "10^12 rows": npy(f"{{'descr': {ROW.descr}, 'fortran_order': False, 'shape': ({10**12},)}}"),
    "10^5 rows of nothing": npy(f"{{'descr': {ROW.descr}, 'fortran_order': False, 'shape': (100000,)}}"),
    "negative": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, -1)}", bytes(4)),
    "not numbers": npy("{'descr': '<f4', 'fortran_order': False, 'shape': ('a',)}", bytes(4)),
    "a number of 5,000 digits": npy(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({'9' * 5000},)}}"),
    "objects": npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", bytes(8)),
    "4 GB of header": b"\x93NUMPY\x02\x00\xff\xff\xff\xff{}",
    "nested brackets": npy("(" * 9000),
    "nested lists": npy("[" * 90 + "]" * 90),
    "nested signs": npy("-" * 9000 + "1"),
    "nested descr": npy(f"{{'descr': {'[' * 80 + ']' * 80}, 'fortran_order': False, 'shape': ()}}"),
    "no dict": npy("5"),
    "empty": b"",
    "a pickle": b"\x80\x04N.",
    "a zip": b"PK\x03\x04" + bytes(60),
}  # fmt: skip


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_claims_too_much(copy, what):
    with pytest.raises(ValueError, match=r".+"):
        load_npy(io.BytesIO(HEADERS[what]))
    put_index(copy, HEADERS[what])
    with pytest.raises(ShardError, match="not an index of images: copy or build the shards again"):
        load_index(copy)


@pytest.mark.parametrize("name", ["manifest.json", "index.npy"])
def test_a_sparse_file_larger_than_memory(copy, name):
    os.truncate(copy / name, 2**42)
    with pytest.raises(ShardError, match="it has 4,398,046,511,104 bytes, more than the"):
        load_index(copy)


def test_a_sparse_shard_with_an_image_larger_than_any(copy):
    index = load_index(copy)
    rows = index.rows.copy()
    rows["size"][0] = 2**30 + 1
    os.truncate(index.shards[0], 2**42)
    shards = [dict(shard) for shard in index.manifest["shards"]]
    shards[0]["bytes"] = 2**42
    put_index(copy, rows, shards=shards)
    with pytest.raises(ShardError, match="has an image of more than 1,073,741,824 bytes"):
        load_index(copy)


@pytest.mark.parametrize("name", ["manifest.json", "index.npy"])
def test_a_device_or_a_pipe_is_no_file(copy, name):
    (copy / name).unlink()
    (copy / name).symlink_to("/dev/zero")
    with pytest.raises(ShardError, match="it is a device"):
        load_index(copy)
    (copy / name).unlink()
    os.mkfifo(copy / name)  # opening it would wait for a writer
    with pytest.raises(ShardError, match="not a regular file"):
        load_index(copy)
