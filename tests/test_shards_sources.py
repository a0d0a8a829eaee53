"""Miniature replicas of the datasets, in the layouts in which they are published."""

import io
import os
import tarfile

import numpy as np
import pyarrow.parquet
import pytest
from pictures import encode, make_folder, put

from dml.catalogue import DATASETS
from shards.build import build, main
from shards.index import ImageReader, load_index
from shards.item import ShardError
from shards.sources import cars196, cub200, folder, inshop, sop

# SOP has 120,053 images, Cars-196 16,185.
PUBLISHED = {
    sop: {"train": (11318, 59551), "test": (11316, 120053 - 59551)},
    cub200: {"train": (100, 5864), "test": (100, 5924)},
    cars196: {"train": (98, 8054), "test": (98, 16185 - 8054)},
    inshop: {"train": (3997, 25882), "query": (3985, 14218), "gallery": (3985, 12612)},
}


def make_sop(root):
    number = 0
    for split, classes in (("train", (1, 2, 3)), ("test", (11319, 11320))):
        lines = ["image_id class_id super_class_id path"]
        for c in classes:
            for i in range(2):
                number += 1
                path = f"bicycle_final/{c}_{i}.JPG"
                put(root / path, encode(number))
                lines.append(f"{number} {c} {1 + c % 2} {path}")
        put(root / f"Ebay_{split}.txt", "\n".join(lines) + "\n")


def make_cub200(root):
    images, labels = [], []
    for number, (c, i) in enumerate((c, i) for c in (1, 100, 101, 200) for i in range(2)):
        path = f"{c:03d}.Some_Bird/Some_Bird_{i}.jpg"
        put(root / "images" / path, encode(number))
        images.append(f"{number + 1} {path}\n")
        labels.append(f"{number + 1} {c}\n")
    put(root / "images.txt", "".join(images))
    put(root / "image_class_labels.txt", "".join(labels))


def make_inshop(root):
    rows = []
    for c, splits in (
        (1, ("train", "train")),
        (2, ("query", "gallery", "gallery")),
        (3, ("query",)),
    ):
        for i, split in enumerate(splits):
            path = f"img/WOMEN/Dresses/id_{c:08d}/0{i}_front.jpg"
            put(root / path, encode(c * 10 + i))
            rows.append(f"{path}      id_{c:08d}   {split}\n")
    header = f"{len(rows)}\nimage_name item_id evaluation_status\n"
    put(root / "Eval/list_eval_partition.txt", header + "".join(rows))


CARS = [(c, i) for c in (1, 98, 99, 196) for i in range(2)]


def annotations(field, names):
    array = np.zeros((1, len(CARS)), dtype=[(field, "O"), ("class", "O"), ("bbox_x1", "O")])
    for k, (c, _) in enumerate(CARS):
        array[0, k] = (names[k], c, 1)
    return array


def class_names():
    names = np.zeros((1, 196), dtype="O")
    names[0] = [f"Car {c}" for c in range(1, 197)]
    return names


def make_cars_annos(root):
    savemat = pytest.importorskip("scipy.io").savemat
    names = [f"car_ims/{k + 1:06d}.jpg" for k in range(len(CARS))]
    for k, name in enumerate(names):
        put(root / name, encode(k))
    table = annotations("relative_im_path", names)
    savemat(root / "cars_annos.mat", {"annotations": table, "class_names": class_names()})


def make_cars_devkit(root):
    """In the devkit's own split every class is in both halves: here one image in each."""
    savemat = pytest.importorskip("scipy.io").savemat
    (root / "devkit").mkdir(parents=True)
    table = annotations("fname", [f"{k + 1:05d}.jpg" for k in range(len(CARS))])
    for half, folder_, mat in (
        (0, "cars_train", "devkit/cars_train_annos.mat"),
        (1, "cars_test", "cars_test_annos_withlabels.mat"),
    ):
        savemat(root / mat, {"annotations": table[:, half::2]})
        for k in range(half, len(CARS), 2):
            put(root / folder_ / f"{k + 1:05d}.jpg", encode(k))
    savemat(root / "devkit/cars_meta.mat", {"class_names": class_names()})


def make_cars_folders(root):
    for k, (c, i) in enumerate(CARS):
        put(root / f"cars196/{c:03d}.Car {c}/{('train', 'test')[i]}_{k}.jpg", encode(k))


def tar_of(path, members):
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def names_of(root, source, out):
    """split -> [(class, bytes)] as they come out of the shards; the flags for a miniature."""
    flags = {"allow_counts": True, "allow_singles": True}
    build(source.collect(root), source.__name__.rsplit(".", 1)[-1], out, **flags)
    index = load_index(out)
    reader = ImageReader(index)
    return {
        split: [
            (index.class_names[label], reader.read(row))
            for row, label in zip(index.positions(split), index.labels(split), strict=True)
        ]
        for split in index.splits
    }


def test_sop(tmp_path):
    make_sop(tmp_path / "in")
    made = names_of(tmp_path / "in", sop, tmp_path / "out")
    assert [name for name, _ in made["train"]] == ["1", "1", "2", "2", "3", "3"]
    assert [name for name, _ in made["test"]] == ["11319", "11319", "11320", "11320"]
    index = load_index(tmp_path / "out")
    names = index.manifest["super_classes"]
    assert [names[g] for g in index.super_classes("train")] == ["2", "2", "1", "1", "2", "2"]
    assert [data for split in made.values() for _, data in split] == [
        encode(n) for n in range(1, 11)
    ]


def test_cub200(tmp_path):
    make_cub200(tmp_path / "in")
    made = names_of(tmp_path / "in", cub200, tmp_path / "out")
    assert {name for name, _ in made["train"]} == {"001.Some_Bird", "100.Some_Bird"}
    assert {name for name, _ in made["test"]} == {"101.Some_Bird", "200.Some_Bird"}
    assert [data for split in made.values() for _, data in split] == [encode(n) for n in range(8)]


@pytest.mark.parametrize("moved", ["", "Img"])
def test_inshop_query_and_gallery_share_labels(tmp_path, moved):
    make_inshop(tmp_path / "in")
    if moved:
        (tmp_path / "in/Img").mkdir()
        (tmp_path / "in/img").rename(tmp_path / "in/Img/img")
        (tmp_path / "in/Eval/list_eval_partition.txt").rename(
            tmp_path / "in/list_eval_partition.txt"
        )
    made = names_of(tmp_path / "in", inshop, tmp_path / "out")
    index = load_index(tmp_path / "out")
    assert index.splits == ("train", "query", "gallery")
    assert index.labels("query").tolist() == [1, 2]
    assert index.labels("gallery").tolist() == [1, 1]
    assert made["gallery"] == [("id_00000002", encode(21)), ("id_00000002", encode(22))]


@pytest.mark.parametrize("make", [make_cars_annos, make_cars_devkit, make_cars_folders])
def test_cars196_in_every_form(tmp_path, make):
    (tmp_path / "in").mkdir()
    make(tmp_path / "in")
    made = names_of(tmp_path / "in", cars196, tmp_path / "out")
    assert {name for name, _ in made["train"]} == {"001.Car 1", "098.Car 98"}
    assert {name for name, _ in made["test"]} == {"099.Car 99", "196.Car 196"}
    assert {data for _, data in made["train"]} == {encode(k) for k in range(4)}
    assert {data for _, data in made["test"]} == {encode(k) for k in range(4, 8)}


def test_cars196_from_the_tar_itself(tmp_path):
    make_cars_folders(tmp_path / "in")
    with tarfile.open(tmp_path / "cars.tar", "w") as tar:
        tar.add(tmp_path / "in/cars196", "cars196")
    from_tar = names_of(tmp_path / "cars.tar", cars196, tmp_path / "a")
    from_folder = names_of(tmp_path / "in/cars196", cars196, tmp_path / "b")
    assert {k: sorted(v) for k, v in from_tar.items()} == {
        k: sorted(v) for k, v in from_folder.items()
    }


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/etc/001.x/1.jpg", "outside the dataset"),
        ("cars196/../../001.x/1.jpg", "outside the dataset"),
        ("cars196/readme.txt", "not NNN.CLASS/IMAGE"),
    ],
)
def test_cars196_tar_with_hostile_members(tmp_path, name, words):
    path = tar_of(tmp_path / "x.tar", [("cars196/001.x/0.jpg", encode(0)), (name, encode(1))])
    with pytest.raises(ShardError, match=words):
        cars196.collect(path)


def test_cars196_tar_with_a_link_or_cut_short(tmp_path):
    link = tarfile.TarInfo("cars196/001.x/1.jpg")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.addfile(link)
    with pytest.raises(ShardError, match=r"not NNN\.CLASS/IMAGE"):
        cars196.collect(tmp_path / "x.tar")
    path = tar_of(tmp_path / "y.tar", [("cars196/001.x/0.jpg", bytes(5000))])
    os.truncate(path, 3000)
    with pytest.raises(ShardError, match="cannot be read as a plain tar"):
        cars196.collect(path)


@pytest.mark.parametrize("source", [sop, cub200, cars196, inshop, folder])
def test_a_missing_root_and_a_wrong_layout(tmp_path, source):
    with pytest.raises(ShardError, match="nowhere is not there"):
        source.collect(tmp_path / "nowhere")
    with pytest.raises(ShardError, match="--root"):
        source.collect(tmp_path)


@pytest.mark.parametrize(
    ("make", "source", "file"),
    [
        (make_sop, sop, "Ebay_test.txt"),
        (make_cub200, cub200, "image_class_labels.txt"),
        (make_inshop, inshop, "Eval/list_eval_partition.txt"),
        (make_cars_devkit, cars196, "cars_test_annos_withlabels.mat"),
        (make_cars_devkit, cars196, "devkit/cars_meta.mat"),
    ],
)
def test_the_missing_file_is_named(tmp_path, make, source, file):
    make(tmp_path)
    (tmp_path / file).unlink()
    with pytest.raises(ShardError, match=f"{file} is missing: --root must be"):
        source.collect(tmp_path)


@pytest.mark.parametrize("path", ["/etc/passwd", "../secret.jpg", "a/../../b.jpg"])
def test_lists_cannot_point_outside(tmp_path, path):
    make_sop(tmp_path)
    with (tmp_path / "Ebay_test.txt").open("a") as file:
        file.write(f"99 11320 1 {path}\n")
    with pytest.raises(ShardError, match=r"Ebay_test.txt:6: the path .* leads outside"):
        sop.collect(tmp_path)


def test_a_list_larger_than_memory(tmp_path, capsys):
    make_sop(tmp_path / "sop")
    os.truncate(tmp_path / "sop/Ebay_train.txt", 2**42)
    arguments = ["sop", "--root", str(tmp_path / "sop"), "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "it has 4,398,046,511,104 bytes, more than" in error
    assert "Ebay_train.txt" in error
    assert error.count("\n") == 1


def test_a_member_larger_than_any_image(tmp_path):
    """A sparse tar, whose last member claims a terabyte."""
    path = tar_of(
        tmp_path / "x.tar", [("cars196/001.x/0.jpg", encode(0)), ("cars196/099.y/1.jpg", b"")]
    )
    member = tarfile.TarInfo("cars196/099.y/2.jpg")
    member.size = 2**40
    with path.open("r+b") as file:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            end = tar.getmembers()[-1].offset_data
        file.seek(end)
        file.write(member.tobuf())
        file.truncate(end + 512 + 2**40 + 1024)
    item = cars196.collect(path).items[-1]
    with pytest.raises(
        ShardError, match="has 1,099,511,627,776 bytes, more than the 1,073,741,824"
    ):
        item.encoded()


def test_lists_that_are_not_what_they_should_be(tmp_path):
    make_sop(tmp_path / "sop")
    put(tmp_path / "sop/Ebay_test.txt", "header\n1 2 3\n")
    with pytest.raises(ShardError, match=r"Ebay_test.txt:2 has 3 columns instead of 4"):
        sop.collect(tmp_path / "sop")
    put(tmp_path / "sop/Ebay_test.txt", b"\xff\xfe\x00")
    with pytest.raises(ShardError, match="not a text file"):
        sop.collect(tmp_path / "sop")
    make_cub200(tmp_path / "cub")
    put(tmp_path / "cub/image_class_labels.txt", "1 1\n")
    with pytest.raises(ShardError, match="image 2 has no class number"):
        cub200.collect(tmp_path / "cub")
    make_inshop(tmp_path / "inshop")
    listing = tmp_path / "inshop/Eval/list_eval_partition.txt"
    put(listing, listing.read_text().replace("6\n", "7\n", 1))
    with pytest.raises(ShardError, match="announces '7' images but lists 6"):
        inshop.collect(tmp_path / "inshop")
    put(listing, listing.read_text().replace("gallery", "galery"))
    with pytest.raises(ShardError, match="'galery' is none of train, query, gallery"):
        inshop.collect(tmp_path / "inshop")


def test_mat_files_that_are_not_what_they_should_be(tmp_path):
    savemat = pytest.importorskip("scipy.io").savemat
    mat = tmp_path / "cars_annos.mat"
    put(mat, b"not a mat file")
    with pytest.raises(ShardError, match=r"cannot be read as a \.mat file"):
        cars196.collect(tmp_path)
    savemat(mat, {"class_names": class_names()})
    with pytest.raises(ShardError, match="has no annotations"):
        cars196.collect(tmp_path)
    savemat(mat, {"annotations": np.zeros(3), "class_names": class_names()})
    with pytest.raises(ShardError, match="does not give relative_im_path and class"):
        cars196.collect(tmp_path)
    hostile = annotations("relative_im_path", ["../../etc/passwd"] * len(CARS))
    savemat(mat, {"annotations": hostile, "class_names": class_names()})
    with pytest.raises(ShardError, match="leads outside"):
        cars196.collect(tmp_path)


@pytest.mark.parametrize(
    ("source", "make"), [(sop, make_sop), (cub200, make_cub200), (inshop, make_inshop)]
)
def test_the_published_counts_are_asked_for(tmp_path, capsys, source, make):
    make(tmp_path / "in")
    assert source.collect(tmp_path / "in").expected == PUBLISHED[source]
    args = [source.__name__.rsplit(".", 1)[-1], "--root", str(tmp_path / "in")]
    args += ["--out", str(tmp_path / "out"), "--workers", "1"]
    assert main(args) == 2
    error = capsys.readouterr().err
    classes, images = PUBLISHED[source]["train"]
    assert f"but {classes:,} and {images:,} were published" in error
    assert "--allow-counts" in error
    assert os.listdir(tmp_path) == ["in"]
    assert main([*args, "--allow-counts"]) == 0
    assert "were published" in capsys.readouterr().out


def test_the_catalogue_has_the_same_counts():
    for source, splits in PUBLISHED.items():
        dataset = DATASETS[source.__name__.rsplit(".", 1)[-1]]
        assert (dataset.train_classes, dataset.train_images) == splits["train"]


def test_cars196_counts(tmp_path):
    make_cars_folders(tmp_path)
    assert cars196.collect(tmp_path).expected == PUBLISHED[cars196]


def test_folder_order_hidden_files_and_strays(tmp_path):
    make_folder(tmp_path, classes=2, images=2)
    for name in (".hidden", "train/.DS_Store", "train/train0/.x.jpg"):
        put(tmp_path / name, "x")
    for name in ("README", "train/list.txt", "test/test1/notes.txt"):
        put(tmp_path / name, "x")
    collection = folder.collect(tmp_path)
    assert [item.name for item in collection.items] == [
        f"{split}/{split}{c}/{i}.{'jpeg' if i else 'png'}"
        for split in ("train", "test")
        for c in range(2)
        for i in range(2)
    ]
    assert collection.notes == [
        "left out 3 files that are not images: README, train/list.txt, test/test1/notes.txt"
    ]


@pytest.mark.parametrize("splits", [("train",), ("train", "val"), ("train", "test", "query")])
def test_folder_with_other_splits(tmp_path, splits):
    make_folder(tmp_path, splits=splits)
    with pytest.raises(ShardError, match="train and test, or train, query and gallery"):
        folder.collect(tmp_path)


def test_folder_too_deep_or_empty(tmp_path):
    make_folder(tmp_path)
    (tmp_path / "test/test0/deeper").mkdir()
    with pytest.raises(ShardError, match="deeper is a folder where an image should be"):
        folder.collect(tmp_path)
    make_folder(tmp_path / "b", splits=("train",))
    (tmp_path / "b/test/empty").mkdir(parents=True)
    with pytest.raises(ShardError, match="test has no images"):
        folder.collect(tmp_path / "b")


def flat(root, classes=10):
    """root/CLASS/IMAGE"""
    for c in range(classes):
        for i in range(2):
            put(root / f"class{c}" / f"{i}.jpg", encode(10 * c + i))
    return root


def splits_of(collection):
    """class -> its splits"""
    found = {}
    for item in collection.items:
        found.setdefault(item.class_name, set()).add(item.split)
    return found


def test_without_splits_classes_are_held_out(tmp_path):
    flat(tmp_path)
    found = folder.collect(tmp_path)
    assert found.notes == ["held out 5 of 10 classes as test (share 0.5, seed 0)"]
    chosen = splits_of(found)
    assert all(len(splits) == 1 for splits in chosen.values()), "classes, not images"
    assert len(found.items) == 20
    assert splits_of(folder.collect(tmp_path)) == chosen
    assert splits_of(folder.collect(tmp_path, seed=1)) != chosen
    few = splits_of(folder.collect(tmp_path, 0.2))
    assert sum(splits == {"test"} for splits in few.values()) == 2
    assert sum(s == {"test"} for s in splits_of(folder.collect(tmp_path, 0.001)).values()) == 1
    assert sum(s == {"test"} for s in splits_of(folder.collect(tmp_path, 0.999)).values()) == 9
    put(tmp_path / "class_new" / "0.jpg", encode(1))
    more = splits_of(folder.collect(tmp_path))
    changed = sum(more[name] != splits for name, splits in chosen.items())
    assert changed <= 1, "a new class hardly moves the others"


def test_test_classes_are_for_images_without_splits(tmp_path):
    make_folder(tmp_path / "a")
    with pytest.raises(ShardError, match="--test-classes is for images without splits"):
        folder.collect(tmp_path / "a", 0.5)
    flat(tmp_path / "b", classes=1)
    with pytest.raises(ShardError, match="a single class"):
        folder.collect(tmp_path / "b")
    out = ["--out", str(tmp_path / "out"), "--test-classes", "0.5"]
    assert main(["sop", "--root", str(tmp_path), *out]) == 2


def as_csv(path, columns, rows):
    lines = [",".join(columns), *(",".join(row) for row in rows)]
    path.write_text("\ufeff" + "\r\n".join(lines) + "\r\n", encoding="utf-8")


def as_parquet(path, columns, rows):
    values = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in columns]
    pyarrow.parquet.write_table(pyarrow.table(dict(zip(columns, values, strict=True))), path)


TABLES = {"list.csv": as_csv, "list.parquet": as_parquet}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_lists_images(tmp_path, name):
    flat(tmp_path / "photos", classes=2)
    rows = [(f"photos/class{c}/{i}.jpg", f"name {c}", "x") for c in range(2) for i in range(2)]
    TABLES[name](tmp_path / name, ["path", "label", "other"], rows)
    found = folder.collect(tmp_path / name)
    assert [(item.name, item.class_name) for item in found.items] == [row[:2] for row in rows]
    assert {item.split for item in found.items} == {"train", "test"}
    assert found.items[0].encoded() == (tmp_path / "photos/class0/0.jpg").read_bytes()
    rows = [
        (path, label, split)
        for (path, label, _), split in zip(rows, ["train"] * 2 + ["test"] * 2, strict=True)
    ]
    TABLES[name](tmp_path / name, ["path", "label", "split"], rows)
    assert [item.split for item in folder.collect(tmp_path / name).items] == [
        row[2] for row in rows
    ]


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(
    ("columns", "row", "sentence"),
    [
        (["path", "class"], ("a.jpg", "a"), "has no column 'label', only 'path', 'class'"),
        (["path", "label"], ("../a.jpg", "a"), "'../a.jpg' is not below"),
        (["path", "label"], ("/etc/passwd", "a"), "'/etc/passwd' is not below"),
        (["path", "label"], ("a.jpg", ""), "has no label"),
        (["path", "label"], ("", "a"), "has no path"),
        (["path", "label", "split"], ("a.jpg", "a", "dev"), "has the splits 'dev'"),
    ],
)
def test_a_table_that_cannot_be_used(tmp_path, name, columns, row, sentence):
    TABLES[name](tmp_path / name, columns, [row])
    with pytest.raises(ShardError, match=sentence):
        folder.collect(tmp_path / name)


@pytest.mark.parametrize("name", TABLES)
def test_a_damaged_table_is_a_sentence(tmp_path, name):
    for data in (b"", b"\xff\xfe\0\0", b'path,label\n"a', bytes(1000)):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ShardError, match=name):
            folder.collect(tmp_path / name)


@pytest.mark.parametrize("place", ["train/train0/link.jpg", "train/link", "link"])
def test_folder_links_do_not_lead_outside(tmp_path, place):
    make_folder(tmp_path / "in")
    put(tmp_path / "secret/class/a.jpg", encode(1))
    (tmp_path / "in" / place).symlink_to(tmp_path / "secret")
    with pytest.raises(ShardError, match="link that leads outside"):
        folder.collect(tmp_path / "in")


def test_folder_links_to_themselves_are_left_out(tmp_path):
    make_folder(tmp_path)
    (tmp_path / "train" / "train0" / "loop.jpg").symlink_to("loop.jpg")
    assert "train/train0/loop.jpg" in folder.collect(tmp_path).notes[0]


def test_folder_links_inside_are_fine(tmp_path):
    make_folder(tmp_path)
    before = len(folder.collect(tmp_path).items)
    (tmp_path / "train/train0/link.jpg").symlink_to(tmp_path / "train/train0/1.jpeg")
    assert len(folder.collect(tmp_path).items) == before + 1
