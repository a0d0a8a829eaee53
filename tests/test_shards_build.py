"""Building: the same bytes always, finished or not at all, and one sentence for what is wrong."""

import io
import os
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from fleet import ROOT, environment
from forks import Forked
from pictures import encode, make_folder, pixels, put
from PIL import Image
from webdataset import TarWriter, WebDataset

from shards.build import build, main
from shards.images import check
from shards.index import ImageReader, load_index
from shards.item import Collection, FileItem, Item, ShardError
from shards.sources import folder


def files(out):
    return {path.name: path.read_bytes() for path in out.iterdir()}


def run(root, out, *flags, source="folder"):
    return main([source, "--root", str(root), "--out", str(out), "--workers", "1", *flags])


def png_of(width, height):
    """A PNG that says it is large and is not."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


BAD = {
    "truncated.jpg": (encode(0, size=(200, 200))[:-3000], "is a damaged image"),
    "truncated.png": (encode(0, "PNG", size=(200, 200))[:-3000], "is a damaged image"),
    "empty.jpg": (b"", "is not an image"),
    "text.jpg": (b"hello", "is not an image"),
    # Pillow would start Ghostscript for this one
    "eps.jpg": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not an image"),
    "svg.png": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "is not an image"),
    "bomb.png": (png_of(50_000, 50_000), "is a decompression bomb"),
    "small_bomb.png": (png_of(10_000, 10_000), "is a decompression bomb"),
}


def test_same_input_same_bytes(tmp_path):
    make_folder(tmp_path / "in", classes=20)  # more than workers take at once
    args = ("--max-bytes", "40K")
    assert run(tmp_path / "in", tmp_path / "one", *args) == 0
    for path in (tmp_path / "in").rglob("*.png"):
        os.utime(path, (1, 1))
    assert run(tmp_path / "in", tmp_path / "again", *args) == 0
    assert run(tmp_path / "in", tmp_path / "two", *args, "--workers", "2") == 0
    assert files(tmp_path / "one") == files(tmp_path / "again") == files(tmp_path / "two")
    assert sorted(os.listdir(tmp_path)) == ["again", "in", "one", "two"]


def test_the_tars_are_plain_and_of_the_size_asked_for(tmp_path):
    make_folder(tmp_path / "in", classes=5)
    run(tmp_path / "in", tmp_path / "out", "--max-bytes", "20KiB")
    shards = load_index(tmp_path / "out").shards
    assert [path.name for path in shards[:2]] == ["train-000000.tar", "train-000001.tar"]
    assert "test-000000.tar" in [path.name for path in shards]
    for path in shards:
        # webdataset's TarWriter ends a tar with zeros, up to a whole record
        assert path.stat().st_size <= 20 * 1024 + tarfile.RECORDSIZE
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                assert (member.mtime, member.uid, member.gid, member.mode) == (0, 0, 0, 0o644)
                assert member.type == tarfile.REGTYPE
                assert not member.pax_headers


def test_summary(tmp_path, capsys):
    make_folder(tmp_path / "in", classes=2, images=2)
    put(tmp_path / "in/train/notes.txt", "x")
    assert run(tmp_path / "in", tmp_path / "out") == 0
    out = capsys.readouterr().out
    assert f"{tmp_path / 'out'}: 8 images of 4 classes" in out
    assert "train          2 classes         4 images" in out
    assert "MiB in 2 shards" in out
    assert "images/s" in out
    assert "note: left out 1 files that are not images: train/notes.txt" in out


@pytest.mark.parametrize("start", [["shards/build.py"], ["-m", "shards.build"]])
def test_both_ways_to_start(tmp_path, start):
    """-S hides the installed project, so that only the program itself can find its package."""
    make_folder(tmp_path / "in", classes=1, images=2)
    paths = [path for path in sys.path if path.endswith("site-packages")]
    command = [sys.executable, "-S", *start, "folder", "--root", str(tmp_path / "in")]
    command += ["--out", str(tmp_path / "out"), "--workers", "2"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no bar without a terminal
    assert load_index(tmp_path / "out").splits == ("train", "test")


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_fails_the_build(tmp_path, capsys, name):
    make_folder(tmp_path / "in")
    data, words = BAD[name]
    put(tmp_path / "in/train/train1" / name, data)
    assert run(tmp_path / "in", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: train/train1/{name} {words}")
    assert error.count("\n") == 1
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_bad_images_are_skipped_and_counted(tmp_path, capsys, workers):
    make_folder(tmp_path / "in")
    run(tmp_path / "in", tmp_path / "without")
    for name, (data, _) in BAD.items():
        put(tmp_path / "in/train/train1" / name, data)
    flags = ("--bad", "skip", "--workers", workers)
    assert run(tmp_path / "in", tmp_path / "out", *flags) == 0
    out = capsys.readouterr().out
    assert f"skipped {len(BAD)} images in all" in out
    assert "skipped: train/train1/empty.jpg is not an image" in out
    index, without = load_index(tmp_path / "out"), load_index(tmp_path / "without")
    assert index.rows.tolist() == without.rows.tolist()
    assert len(index.manifest["skipped"]) == len(BAD)


def test_a_file_that_cannot_be_opened(tmp_path):
    items = [FileItem(split="train", class_name="a", name="a.jpg", path=tmp_path / "a.jpg")] * 2
    with pytest.raises(ShardError, match=r"a.jpg cannot be read \(No such file or directory\)"):
        build(Collection(items), "folder", tmp_path / "out")


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "PPM", "WEBP"])
def test_other_formats_become_png_losslessly(tmp_path, capsys, kind):
    make_folder(tmp_path / "in")
    mode = "L" if kind == "GIF" else "RGB"
    data = encode(7, kind, mode)
    put(tmp_path / "in/train/train0/z.jpg", data)  # the content decides, not the name
    assert run(tmp_path / "in", tmp_path / "out") == 0
    assert "1 images of other formats were converted to PNG" in capsys.readouterr().out
    index = load_index(tmp_path / "out")
    with tarfile.open(index.shards[0]) as tar:
        assert "00000004.png" in tar.getnames()
    assert np.array_equal(pixels(ImageReader(index).read(4)), pixels(data))


def test_jpeg_and_png_keep_their_bytes_in_every_mode():
    for kind, mode in [
        ("JPEG", "L"),
        ("JPEG", "CMYK"),
        ("PNG", "L"),
        ("PNG", "RGBA"),
        ("PNG", "P"),
    ]:
        data = encode(1, kind, mode)
        assert check(data).data == data
        assert check(data).suffix == {"JPEG": "jpg", "PNG": "png"}[kind]


def test_a_train_class_with_one_image(tmp_path, capsys):
    make_folder(tmp_path / "in")
    put(tmp_path / "in/train/lonely/a.jpg", encode(1))
    assert run(tmp_path / "in", tmp_path / "out") == 2
    assert "train class 'lonely' has a single image" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["in"]
    put(tmp_path / "in/train/lonely/b.jpg", "broken")  # found out only while packing
    assert run(tmp_path / "in", tmp_path / "out", "--bad", "skip") == 2
    assert "train class 'lonely' has a single image" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["in"]
    assert run(tmp_path / "in", tmp_path / "out", "--bad", "skip", "--allow-singles") == 0


def test_a_class_whose_images_are_all_skipped_takes_no_label(tmp_path):
    make_folder(tmp_path / "in", classes=2)
    for i in range(2):
        put(tmp_path / f"in/train/a_broken/{i}.jpg", "broken")
    assert run(tmp_path / "in", tmp_path / "out", "--bad", "skip") == 0
    index = load_index(tmp_path / "out")
    assert index.class_names == ("train0", "train1", "test0", "test1")
    assert sorted(set(index.rows["label"])) == [0, 1, 2, 3]


def test_nothing_to_pack(tmp_path):
    with pytest.raises(ShardError, match="found no images"):
        build(Collection([]), "icons", tmp_path / "out")


def test_labels_start_with_train_whatever_the_order(tmp_path):
    put(tmp_path / "a.jpg", encode(1))
    items = [
        FileItem(split=split, class_name=name, name="a.jpg", path=tmp_path / "a.jpg")
        for name, split in [("z", "test"), ("b", "train"), ("b", "train"), ("z", "test")]
    ]
    build(Collection(items), "folder", tmp_path / "out")
    index = load_index(tmp_path / "out")
    assert index.splits == ("train", "test")
    assert index.class_names == ("b", "z")


def test_what_exists_is_not_overwritten(tmp_path, capsys):
    make_folder(tmp_path / "in")
    (tmp_path / "out").mkdir()
    assert run(tmp_path / "in", tmp_path / "out") == 0  # an empty folder is as good as none
    before = files(tmp_path / "out")
    assert run(tmp_path / "in", tmp_path / "out") == 2
    assert "out exists: remove it, or choose another --out" in capsys.readouterr().err
    assert files(tmp_path / "out") == before
    put(tmp_path / "other.partial/thesis.tex", "precious")
    assert run(tmp_path / "in", tmp_path / "other") == 2
    assert "holds 'thesis.tex', which no build wrote" in capsys.readouterr().err
    assert (tmp_path / "other.partial/thesis.tex").read_text() == "precious"


@pytest.mark.parametrize(
    ("text", "size"),
    [("1000000", 10**6), ("64K", 2**16), ("256MiB", 2**28), ("1G", 2**30), ("2 MB", 2**21)],
)
def test_sizes(tmp_path, monkeypatch, text, size):
    make_folder(tmp_path / "in")
    asked = []
    monkeypatch.setattr(
        "shards.build.build", lambda *_, max_bytes, **__: asked.append(max_bytes) or {}
    )
    monkeypatch.setattr("shards.build._summary", lambda *_: "")
    assert run(tmp_path / "in", tmp_path / "out", "--max-bytes", text) == 0
    assert asked == [size]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--max-bytes", "big"), "'big' is not a size such as 256MiB"),
        (("--max-bytes", "0"), "'0' is not a size"),
        (("--workers", "0"), "'0' is not a positive number"),
        (("--bad", "hope"), "choose from"),
    ],
)
def test_wrong_arguments(tmp_path, capsys, flags, words):
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path, tmp_path / "out", *flags)
    assert words in capsys.readouterr().err


@dataclass(frozen=True, kw_only=True)
class Deadly(Item):
    def encoded(self):
        os._exit(9)


def test_a_worker_that_is_killed(tmp_path):
    items = [Deadly(split="train", class_name="a", name="a")] * 2
    with pytest.raises(ShardError, match="a worker process was killed"):
        build(Collection(items), "folder", tmp_path / "out", workers=2)
    assert os.listdir(tmp_path) == []


# A build that stands still in the middle: its last image is a pipe that nobody has filled yet.


@pytest.fixture
def said(tmp_path_factory):
    """The standard output and error of a build."""
    folder = tmp_path_factory.mktemp("said")
    return folder / "out", folder / "err"


@pytest.fixture
def stuck(tmp_path, said):
    lines = ["image_id class_id super_class_id path"]
    for i in range(60):
        put(tmp_path / f"in/{i}.JPG", encode(i))
        lines.append(f"{i} {i // 10} 1 {i}.JPG")
    os.mkfifo(tmp_path / "in/60.JPG")
    put(tmp_path / "in/Ebay_train.txt", "\n".join([*lines, "60 5 1 60.JPG"]))
    put(tmp_path / "in/Ebay_test.txt", lines[0])
    started, pipes = [], []

    def start(workers):
        command = [ROOT / "shards/build.py", "sop", "--root", tmp_path / "in", "--allow-counts"]
        command += ["--out", tmp_path / "out", "--workers", workers, "--max-bytes", "40K"]
        process = Forked(command, ROOT, environment(), *said)
        started.append(process)
        deadline = time.monotonic() + 60
        while not pipes:
            try:  # succeeds once somebody waits at the other end
                pipes.append(os.open(tmp_path / "in/60.JPG", os.O_WRONLY | os.O_NONBLOCK))
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        while not any((tmp_path / "out.partial").glob("train-000001.tar")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return process, lambda: os.close(pipes.pop())

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for pipe in pipes:
        os.close(pipe)


def session(leader):
    """The processes of a session that still live."""
    members = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            members.append(int(entry.name))
    return members


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_build_leaves_nothing_that_looks_finished(tmp_path, stuck, workers):
    process, _ = stuck(workers)
    assert run(tmp_path / "in", tmp_path / "out", "--allow-counts", source="sop") == 2  # it runs
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while session(process.pid):  # its workers notice
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.partial").exists()
    with pytest.raises(ShardError, match="not finished"):
        load_index(tmp_path / "out.partial")
    (tmp_path / "in/60.JPG").unlink()
    put(tmp_path / "in/60.JPG", encode(60))
    assert run(tmp_path / "in", tmp_path / "out", "--allow-counts", source="sop") == 0
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]
    assert sorted(files(tmp_path / "out")) == ["index.npy", "manifest.json", "train-000000.tar"]


def test_two_builds_of_one_folder(tmp_path, stuck, capsys):
    stuck(1)
    assert run(tmp_path / "in", tmp_path / "out", "--allow-counts", source="sop") == 2
    assert "is being written by another build" in capsys.readouterr().err
    assert any((tmp_path / "out.partial").iterdir())


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_leaves_nothing(tmp_path, stuck, said, workers):
    process, let_go = stuck(workers)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers as well
    let_go()  # a worker finishes the image it is at
    assert process.wait(60) == 130
    out, error = (path.read_text() for path in said)
    assert error == f"interrupted: {tmp_path / 'out'} was not built, nothing is left behind\n"
    assert out == ""
    assert os.listdir(tmp_path) == ["in"]


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting a small tmpfs needs root: {error}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_full_disk(tmp_path, small_disk, capsys, workers):
    make_folder(tmp_path / "in", classes=10)
    assert run(tmp_path / "in", small_disk / "out", "--workers", workers) == 2
    error = capsys.readouterr().err
    assert error == f"error: {small_disk / 'out'} was not built: the disk is full\n"
    assert os.listdir(small_disk) == []


def test_a_place_that_cannot_be_written(tmp_path, capsys):
    make_folder(tmp_path / "in")
    put(tmp_path / "file", "x")
    assert run(tmp_path / "in", tmp_path / "file/out") == 2
    assert "was not built: Not a directory; choose another --out" in capsys.readouterr().err


def test_folder_items_come_in_order(tmp_path):
    """What determinism rests on: a source's order is the order of the rows."""
    make_folder(tmp_path / "in")
    collection = folder.collect(tmp_path / "in")
    build(collection, "folder", tmp_path / "out")
    reader = ImageReader(load_index(tmp_path / "out"))
    for row, item in enumerate(collection.items):
        assert reader.read(row) == item.encoded()


# files and names that no program should trust


@pytest.mark.parametrize("workers", ["1", "2"])
def test_an_image_larger_than_memory(tmp_path, capsys, workers):
    make_folder(tmp_path / "in")
    put(tmp_path / "in/train/train1/sparse.jpg", encode(1))
    os.truncate(tmp_path / "in/train/train1/sparse.jpg", 2**40)
    assert run(tmp_path / "in", tmp_path / "out", "--workers", workers) == 2
    assert capsys.readouterr().err == (
        "error: train/train1/sparse.jpg cannot be read (it has 1,099,511,627,776 bytes, more than the "
        "1,073,741,824 that may be read): repair the file, or pass --bad skip\n"
    )
    assert os.listdir(tmp_path) == ["in"]


def test_more_images_than_an_index_holds(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("shards.pack.MOST_IMAGES", 7)
    make_folder(tmp_path / "in", classes=2, images=2)
    assert run(tmp_path / "in", tmp_path / "out") == 2
    assert "there are more than 7 images, which is the most" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # webdataset leaves its files open
def test_webdataset_writes_the_tars(tmp_path):
    """To the byte what its TarWriter writes, image first."""
    make_folder(tmp_path / "in", classes=1, images=3)
    build(folder.collect(tmp_path / "in"), "folder", tmp_path / "out")
    found = io.BytesIO()
    writer = TarWriter(found, user="", group="", mode=0o644, mtime=0, encoder=False)
    for sample in WebDataset(str(tmp_path / "out" / "train-000000.tar"), shardshuffle=False):
        key = sample["__key__"]
        for suffix in [*sorted(set(sample) & {"jpg", "png"}), "cls", "json"]:
            writer.write({"__key__": key, suffix: sample[suffix]})
    writer.close()
    assert found.getvalue() == (tmp_path / "out" / "train-000000.tar").read_bytes()


UNSAFE = {
    "not UTF-8": (b"caf\xe9", r"'caf\udce9'"),
    "a newline": (b"a\nb", r"'a\nb'"),
    "a tab": (b"a\tb", r"'a\tb'"),
    "a terminal's escape": (b"\x1b[2Ja", r"'\x1b[2Ja'"),
    "a line separator": ("a\u2028b".encode(), r"'a\u2028b'"),
    "a C1 control": ("a\x85b".encode(), r"'a\x85b'"),
}


@pytest.mark.parametrize("what", UNSAFE)
def test_class_names_that_cannot_be_shown_are_refused(tmp_path, capsys, what):
    name, shown = UNSAFE[what]
    make_folder(tmp_path / "in")
    for i in range(2):
        put(tmp_path / "in/test" / os.fsdecode(name) / f"{i}.jpg", encode(i))
    assert run(tmp_path / "in", tmp_path / "out") == 2
    assert capsys.readouterr().err == (
        f"error: the class name {shown} in test is not UTF-8 or holds control characters: rename it\n"
    )
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("what", UNSAFE)
def test_file_names_that_cannot_be_shown_are_refused(tmp_path, capsys, what):
    name, shown = UNSAFE[what]
    make_folder(tmp_path / "in")
    put(tmp_path / "in/train/train0" / os.fsdecode(name + b".jpg"), encode(1))
    assert run(tmp_path / "in", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: the file name 'train/train0/" + shown[1:-1] + ".jpg' in train")
    assert error.count("\n") == 1


def test_names_of_any_script_are_fine(tmp_path):
    names = ["ذرت‌بوداده", "क्‍ष", "a\u00a0b", "👩‍🔬", "日本", "co\u00adop"]
    make_folder(tmp_path / "in")
    for name in names:
        for i in range(2):
            put(tmp_path / "in/train" / name / f"{name}{i}.jpg", encode(i))
    assert run(tmp_path / "in", tmp_path / "out") == 0
    assert set(names) < set(load_index(tmp_path / "out").class_names)


def test_files_that_are_left_out_may_be_called_anything(tmp_path, capsys):
    make_folder(tmp_path / "in")
    put(tmp_path / "in/train/train0/Icon\r", "x")  # of a Mac's Finder
    put(tmp_path / "in/train/train1" / os.fsdecode(b"\xff\x1b[2J.txt"), "x")
    assert run(tmp_path / "in", tmp_path / "out") == 0
    assert (
        r"left out 2 files that are not images: train/train0/Icon\r, train/train1/\udcff\x1b[2J.txt"
        in capsys.readouterr().out
    )


def test_a_path_that_standard_output_cannot_show(tmp_path):
    """The shards are built, so the exit code says so."""
    make_folder(tmp_path / "in")
    out = os.path.join(os.fsencode(tmp_path), b"caf\xe9")
    command = [sys.executable, "shards/build.py", "folder", "--root", str(tmp_path / "in")]
    command += ["--workers", "1", "--out", out]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"caf\udce9: 24 images of 6 classes" in done.stdout
    assert os.path.exists(out)


def test_the_checksums_are_those_of_the_images(tmp_path):
    """Oracle: the polynomial division, bit by bit."""

    def crc32(data):
        register = 0xFFFFFFFF
        for byte in data:
            register ^= byte
            for _ in range(8):
                register = register >> 1 ^ (0xEDB88320 if register & 1 else 0)
        return register ^ 0xFFFFFFFF

    collection = folder.collect(make_folder(tmp_path / "in", classes=1))
    build(collection, "folder", tmp_path / "out")
    found = load_index(tmp_path / "out").rows["crc32"].tolist()
    assert found == [crc32(item.encoded()) for item in collection.items]


def test_duplicates_across_classes_and_splits_are_reported(tmp_path, capsys):
    root = make_folder(tmp_path / "in", classes=3)
    first = min((root / "train").rglob("*.jp*g"))  # of class train0
    shutil.copy(first, root / "train" / "train1" / "copy.jpg")
    (root / "test" / first.parent.name).mkdir(exist_ok=True)
    shutil.copy(first, root / "test" / first.parent.name / "same.jpg")
    assert run(root, tmp_path / "out") == 0
    said = capsys.readouterr().out
    name = first.relative_to(root)
    assert f"1 images are in several classes, such as {name} and train/train1/copy.jpg" in said
    assert (
        f"1 images are in several splits, such as {name} and test/{first.parent.name}/same.jpg"
        in said
    )


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_large_images_are_made_smaller(tmp_path, kind):
    file = io.BytesIO()
    exif = Image.Exif()
    exif[274] = 6
    y, x = np.mgrid[0:60, 0:100]
    Image.fromarray(np.stack([2 * x, 4 * y, x + y], -1).astype(np.uint8)).save(
        file, kind, exif=exif
    )
    small = check(file.getvalue(), 30)
    image = Image.open(io.BytesIO(small.data))
    assert image.size == (30, 50), "upright"
    assert image.getexif().get(274, 1) == 1
    assert small.suffix == ("jpg" if kind == "JPEG" else "png")
    same = check(file.getvalue(), 60)
    assert same.converted == (kind == "WEBP")
