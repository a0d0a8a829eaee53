"""Verification finds what was broken, and only that."""

import errno
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from pictures import as_version_1, encode, make_folder, put_index, reseal

from shards.build import build
from shards.index import load_index
from shards.sources import folder
from shards.verify import main, verify

ROOT = Path(__file__).parents[1]


@pytest.fixture
def out(tmp_path):
    build(
        folder.collect(make_folder(tmp_path / "in")), "folder", tmp_path / "out", max_bytes=20_000
    )
    return tmp_path / "out"


@pytest.fixture
def full_shm(monkeypatch):
    """As if there were no room for the locks of worker processes."""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("shards.workers.ProcessPoolExecutor", full)


def members(path):
    with tarfile.open(path) as tar:
        return [(member, tar.extractfile(member).read()) for member in tar]


def rewrite(out, contents):
    """The first tar anew, with true checksums: only its members can be found wrong."""
    path = out / "train-000000.tar"
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for member, data in contents:
            if isinstance(member, str):
                member = tarfile.TarInfo(member)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    data = path.read_bytes()
    shards = json.loads((out / "manifest.json").read_text())["shards"]
    shards[0] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rows = np.load(out / "index.npy")
    for i in np.flatnonzero(rows["shard"] == 0):
        image = data[rows["offset"][i] :][: rows["size"][i]]
        rows["crc32"][i] = zlib.crc32(image)
    put_index(out, rows, shards=shards)


@pytest.mark.parametrize("workers", [1, 2])
def test_good_shards_have_no_problems(out, capsys, workers):
    assert len(load_index(out).shards) > 2
    assert main([str(out), "--workers", str(workers), "--deep"]) == 0
    assert capsys.readouterr().out == f"{out}: no problems\n"


def test_as_a_program(out):
    command = [sys.executable, "shards/verify.py", str(out), "--workers", "1"]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    os.truncate(out / "train-000000.tar", 100)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "train-000000.tar is cut short" in done.stdout


def test_one_changed_byte_in_a_tar(out):
    path, row = out / "test-000000.tar", load_index(out).positions("test")[0]
    offset, size = (load_index(out).rows[column][row] for column in ("offset", "size"))
    data = bytearray(path.read_bytes())
    data[offset] ^= 0xFF  # the first byte of a PNG
    path.write_bytes(data)
    damaged = (
        f"{path}: image {row:08d} ({size:,} bytes at offset {offset:,}) is damaged, its checksum "
        "differs from that in the index: copy or build the shards again"
    )
    assert list(verify(out)) == [
        "test-000000.tar: differs from its checksum in the manifest",
        damaged,
    ]


def test_every_damaged_image_is_listed(out):
    index = load_index(out)
    for row in (0, 1, 5):
        path = index.shards[index.rows["shard"][row]]
        data = bytearray(path.read_bytes())
        data[index.rows["offset"][row] + 30] ^= 1
        path.write_bytes(data)
    found = [line for line in verify(out, workers=2) if "is damaged" in line]
    assert [line.partition("image ")[2][:8] for line in found] == [
        "00000000",
        "00000001",
        "00000005",
    ]


def test_version_1_has_no_problems_but_a_note(out, capsys):
    as_version_1(out)
    assert main([str(out), "--workers", "1"]) == 0
    assert capsys.readouterr().out == (
        f"{out}: no problems\nnote: shards of version 1 have no checksum per image, so training cannot "
        "notice a changed bit; shards that are built again have one\n"
    )


def test_worker_processes_that_cannot_start(out, capsys, full_shm):
    assert main([str(out), "--workers", "2", "--deep"]) == 2
    assert capsys.readouterr().err == (
        "error: worker processes cannot be started (No space left on device): make room in /dev/shm, "
        "or pass --workers 1\n"
    )


def test_a_changed_byte_that_no_decoder_sees(out):
    path = out / "train-000000.tar"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # behind the end of the archive
    path.write_bytes(data)
    assert list(verify(out)) == ["train-000000.tar: differs from its checksum in the manifest"]


def test_index_checksum_version_and_absence(out, tmp_path, capsys):
    reseal(out, version=7)
    assert main([str(out)]) == 1
    assert "version 7" in capsys.readouterr().out
    reseal(out, version=2)
    (out / "index.npy").write_bytes(b"x")
    assert main([str(out)]) == 1
    assert "index.npy differs from its checksum" in capsys.readouterr().out
    assert main([str(tmp_path / "nowhere")]) == 1
    assert "is not there" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["/etc/cron.d/x", "../../x.jpg", "a/../../b", ".."])
def test_hostile_members_are_refused_by_name(out, name, tmp_path):
    before = sorted(path for path in tmp_path.rglob("*"))
    rewrite(out, [*members(out / "train-000000.tar"), (name, b"x")])
    assert f"train-000000.tar: refused member {name!r}" in list(verify(out))
    assert sorted(path for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE]
)
def test_links_and_the_like_are_refused(out, kind):
    member = tarfile.TarInfo("00000000.jpg")
    member.type, member.linkname = kind, "/etc/passwd"
    rewrite(out, [*members(out / "train-000000.tar"), (member, b"")])
    assert "train-000000.tar: refused member '00000000.jpg'" in list(verify(out))


def test_members_against_the_index(out):
    good = members(out / "train-000000.tar")
    cases = {
        "members, but the index needs": [*good, ("extra.txt", b"x")],
        "'other.png' should be 00000000.jpg or": [("other.png", good[0][1]), *good[1:]],
        "'00000000.cls' is not the label of": [good[0], ("00000000.cls", b"2"), *good[2:]],
        "'00000000.json' is not the json of": [*good[:2], ("00000000.json", b"[]"), *good[3:]],
        "disagrees with the index on the class or split of": [
            *good[:2],
            ("00000000.json", b'{"class": "other", "split": "train"}'),
            *good[3:],
        ],
        # one block of the tar more: everything behind it moves
        "00000001.jpg has another offset": [("00000000.png", good[0][1] + bytes(600)), *good[1:]],
    }
    for words, contents in cases.items():
        rewrite(out, contents)
        assert any(words in problem for problem in verify(out)), words


def test_images_that_do_not_decode_though_every_checksum_holds(out):
    good = members(out / "train-000000.tar")
    rewrite(out, [("00000000.png", b"x" * len(good[0][1])), *good[1:]])
    assert list(verify(out)) == []
    (problem,) = verify(out, deep=True)
    assert problem.startswith(
        "train-000000.tar: 00000000 is not an image (JPEG, PNG, WEBP, GIF, BMP,"
    )
    data = encode(0, "BMP", size=(4, 4)).ljust(len(good[0][1]), b"\0")
    rewrite(out, [("00000000.png", data), *good[1:]])
    assert list(verify(out, deep=True)) == ["train-000000.tar: 00000000 is neither JPEG nor PNG"]


def test_a_tar_that_is_not_a_tar(out):
    path = out / "train-000000.tar"
    path.write_bytes(b"x" * path.stat().st_size)
    assert any("cannot be read as a tar" in problem for problem in verify(out))


def test_a_tar_that_the_manifest_does_not_know(out):
    (out / "train-000099.tar").write_bytes(b"")
    assert list(verify(out)) == ["train-000099.tar: is not in the manifest"]
