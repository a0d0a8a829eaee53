"""Batches from shards: the same for any number of processes, workers and restarts."""

import io
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from fleet import ROOT
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dml.data import loader as loading
from dml.data.batches import Batches, EvalBatches, TrainBatches, held_out, own_share
from dml.data.deck import mix, uniforms
from dml.data.loader import loader
from dml.data.preprocessing import (
    NUMBERS,
    Input,
    Normalise,
    eval_image,
    random_box,
    train_image,
)
from shards.index import ImageReader, load_index

SMALL = Input(size=16, resize=20)


def draws(*key):
    return iter(uniforms(NUMBERS, mix(*key)))


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """20 training classes of 2 to 7 images and 5 test classes, JPEG and PNG, by the real builder."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for c in range(25):
        folder = root / ("train" if c < 20 else "test") / f"class{c:02d}"
        folder.mkdir(parents=True)
        for i in range(2 + c % 6):
            shape = (rng.integers(24, 60), rng.integers(24, 60), 3)
            image = Image.fromarray(rng.integers(0, 255, shape, dtype=np.uint8))
            image.save(folder / f"{i}.{'jpg' if i % 2 else 'png'}")
    out = root.parent / "shards"
    command = [sys.executable, "shards/build.py", "folder", "--root", root, "--out", out]
    subprocess.run([str(w) for w in command], cwd=ROOT, check=True, capture_output=True)
    return load_index(out)


def batches(index, seed=0, classes=8, per_class=5):
    return Batches(index.positions("train"), index.labels("train"), classes, per_class, seed)


def local_batches(index, first, last, rank=0, size=1, workers=0, seed=0, context=None):
    own = TrainBatches(index, batches(index, seed), SMALL, rank, size)
    return list(loader(own, range(first, last), workers=workers, context=context))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_batch_of_a_step_is_the_same_for_any_number_of_processes(index, size):
    for step, (images, labels) in enumerate(local_batches(index, 0, 3)):
        parts = [local_batches(index, step, step + 1, rank, size)[0] for rank in range(size)]
        assert torch.equal(torch.cat([p[0] for p in parts]), images)
        assert torch.equal(torch.cat([p[1] for p in parts]), labels)


@pytest.mark.parametrize("workers", [0, 1])
def test_no_batches_are_none(index, workers):
    """As for the images of other splits of a folder that has no splits."""
    assert local_batches(index, 3, 3, workers=workers) == []


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_loader_workers_change_nothing(index, workers):
    for (a, y), (b, z) in zip(
        local_batches(index, 0, 4), local_batches(index, 0, 4, workers=workers), strict=True
    ):
        assert torch.equal(a, b)
        assert torch.equal(y, z)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_several_workers_share_a_batch_and_change_nothing(index, workers, monkeypatch):
    """40 images per batch in six parts."""
    monkeypatch.setattr(loading, "PART", 7)
    expected = local_batches(index, 0, 4)
    found = local_batches(index, 0, 4, workers=workers)
    assert [len(y) for _, y in found] == [40] * 4
    for (a, y), (b, z) in zip(expected, found, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(y, z)


def made_in_parts(index, step, lengths, rank=0, size=1):
    own = TrainBatches(index, batches(index), SMALL, rank, size)
    ends = np.cumsum([0, *lengths]).tolist()
    images = np.empty((own.count(step), 16, 16, 3), np.uint8)
    labels = [own.into(images[a:b], step, range(a, b)) for a, b in pairwise(ends)]
    return images, torch.cat(labels)


def test_any_part_of_a_batch_can_be_made_alone(index):
    """Parts end inside a class, at its end, or hold several; also of the second of two processes."""
    for rank, size, lengths in [(0, 1, [1, 4, 3, 12, 20]), (1, 2, [2, 3, 15])]:
        ((images, labels),) = local_batches(index, 3, 4, rank, size)
        found = made_in_parts(index, 3, lengths, rank, size)
        assert (found[0] == images.numpy()).all()
        assert torch.equal(found[1], labels)


def test_all_labels_are_known_without_the_rows(index):
    for step in range(10):
        assert (batches(index).all_labels(step) == batches(index)(step)[1]).all()


class Blank(loading.ImageBatches):
    """Batches of black images."""

    def __init__(self, most, side):
        self.most, self.spec = most, Input(size=side, resize=side)

    def count(self, n):
        return self.most

    def into(self, out, n, part):
        return torch.arange(part.start, part.stop)


@pytest.mark.parametrize(
    ("images", "side", "workers", "prefetch", "parts", "size", "ahead"),
    [
        (40, 32, 8, 2, 1, 40, 2),  # a small batch is one part: every worker has two of them
        (1000, 32, 8, 2, 16, 64, 4),  # two batches are 32 parts: four for each of the workers
        (8192, 224, 8, 2, 128, 64, 6),  # 512 MiB have room for six
        (8192, 224, 8, 1000, 128, 64, 6),
        (8192, 32, 1000, 2, 128, 64, 2),
        (100, 2000, 8, 2, 100, 1, 5),  # an image of 12 MB is a part
        (100, 10_000, 8, 2, 100, 1, 1),
    ],
)
def test_shared_memory_does_not_grow_with_the_batch(
    images, side, workers, prefetch, parts, size, ahead, monkeypatch
):
    monkeypatch.setattr(torch.Tensor, "share_memory_", lambda self: self)  # not even allocated
    blank = Blank(images, side)
    cut = loading.parts_of(blank, 0)
    assert (len(cut), loading.part_size(blank)) == (parts, size)
    assert [i for part in cut for i in part] == list(range(images))
    slots = loading.Slots(blank, range(3), workers, prefetch)
    assert slots.ahead == ahead
    one_each = workers * size * 3 * side**2
    assert slots.memory.nbytes <= max(loading.SHARED_MEMORY, one_each) + size * 3 * side**2


def test_spawned_workers_change_nothing(index):
    ((a, _),) = local_batches(index, 2, 3)
    ((b, _),) = local_batches(index, 2, 3, workers=1, context="spawn")
    assert torch.equal(a, b)


def test_to_resume_is_to_start_at_another_step(index):
    whole = local_batches(index, 0, 6)
    resumed = local_batches(index, 4, 6)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(whole[4:], resumed, strict=True))


def test_loading_takes_no_random_number_from_the_model(index):
    """Dropout after a resume must draw what it would have drawn."""
    before = torch.get_rng_state()
    local_batches(index, 0, 2, workers=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_steps_and_seeds_differ(index):
    first, second = local_batches(index, 0, 2)
    (other,) = local_batches(index, 0, 1, seed=1)
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], other[0])


def test_a_batch_is_p_classes_of_m_images(index):
    for step in range(40):
        rows, labels = batches(index)(step)
        assert rows.shape == labels.shape == (40,)
        assert len(np.unique(labels)) == 8
        assert (labels.reshape(8, 5) == labels.reshape(8, 5)[:, :1]).all()
        assert (index.rows["label"][rows] == labels).all()
        for images in rows.reshape(8, 5):
            have = (index.labels("train") == index.rows["label"][images[0]]).sum()
            assert len(np.unique(images)) == min(5, have)


def test_over_an_epoch_classes_and_images_come_equally_often(index):
    """20 classes in hands of 8: after 10 steps every class came 4 times; images to within one."""
    rows, labels = zip(*(batches(index)(step) for step in range(10)), strict=True)
    _, per_class = np.unique(np.concatenate(labels), return_counts=True)
    assert (per_class == 4 * 5).all()
    drawn = np.bincount(np.concatenate(rows), minlength=len(index.rows))
    for label in np.unique(index.labels("train")):
        own = drawn[(index.rows["label"] == label)]
        assert own.max() - own.min() <= 1


def test_a_small_class_repeats_images_each_cropped_anew(index):
    rows, _ = batches(index)(0)
    (images, _), *_ = local_batches(index, 0, 1)
    twice = [i for i in range(40) if (rows == rows[i]).sum() > 1]
    assert twice
    same = [j for j in range(40) if rows[j] == rows[twice[0]]]
    assert not torch.equal(images[same[0]], images[same[1]])


def test_more_classes_than_there_are_is_refused(index):
    with pytest.raises(
        ValueError, match=r"batch\.classes is 21 but there are only 20 .* at most 20"
    ):
        batches(index, classes=21)


def test_planning_knows_the_sizes_of_built_shards(index):
    """20 training classes of 2 to 7 images."""
    command = [sys.executable, "-m", "dml.plan", "--config", "configs/sop.yaml", "--set"]
    command += [
        f"data.shards={index.root}",
        "data.dataset=folder",
        "length.epochs=2",
        "batch.classes=4",
    ]
    planned = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "training classes           20" in planned
    refused = subprocess.run(
        [*command, "batch.classes=21"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert "batch.classes = 21: only 20 classes to train on" in refused.stderr


@pytest.mark.parametrize(("size", "workers"), [(1, 0), (1, 1), (2, 2), (3, 0), (7, 0)])
def test_evaluation_sees_every_image_once(index, size, workers):
    rows, labels = index.positions("test"), index.labels("test")
    seen = []
    for rank in range(size):
        own = EvalBatches(index, rows, labels, SMALL, 4, rank, size)
        seen += list(loader(own, range(len(own)), workers))
    assert torch.cat([y for _, y in seen]).tolist() == labels.tolist()
    reader = ImageReader(index)
    expected = np.stack([eval_image(reader.read(int(row)), SMALL) for row in rows])
    assert (torch.cat([x for x, _ in seen]).numpy() == expected).all()


@given(st.integers(0, 1000), st.integers(1, 64))
def test_shares_are_a_partition(n, size):
    shares = [own_share(n, rank, size) for rank in range(size)]
    assert [i for share in shares for i in share] == list(range(n))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_held_out_classes(index):
    labels = index.labels("train")
    out = held_out(labels, 0.25, seed=3)
    assert len(np.unique(labels[out])) == 5
    assert not set(labels[out]) & set(labels[~out])
    assert (held_out(labels, 0.25, seed=3) == out).all()
    assert (held_out(labels, 0.25, seed=4) != out).any()
    assert not held_out(labels, 0.0, seed=3).any()


@given(st.integers(1, 500), st.integers(1, 500), st.integers(0, 10_000))
def test_random_boxes_lie_inside(width, height, key):
    left, top, right, bottom = random_box(width, height, draws(key))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


def test_random_boxes_have_the_authors_areas():
    boxes = [random_box(400, 300, draws(5, key)) for key in range(2000)]
    shares = np.array([(r - x) * (b - y) / 120_000 for x, y, r, b in boxes])
    assert 0.155 < shares.min()
    assert shares.max() <= 1
    assert 0.4 < np.median(shares) < 0.58  # 0.58 is the middle, but large boxes do not always fit


def test_a_larger_smallest_crop_shows_more_of_an_image():
    boxes = [random_box(400, 300, draws(5, key), 0.5) for key in range(500)]
    shares = np.array([(r - x) * (b - y) / 120_000 for x, y, r, b in boxes])
    assert 0.49 < shares.min() < 0.55
    whole = random_box(400, 300, iter([0.5] * 23), 1.0)
    assert whole == (0, 0, 400, 300), "all of it, and its own aspect ratio"


def encoded(image, kind="PNG", **options):
    out = io.BytesIO()
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    image.save(out, kind, **options)
    return out.getvalue()


def test_an_image_of_the_right_size_passes_unchanged():
    array = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    out = eval_image(encoded(array), Input(size=32, resize=32))
    assert (np.asarray(out) == array).all()


def test_the_centre_crop_is_resize_then_crop():
    """Oracle: Pillow's resize of the whole image, then its crop; interpolation differs at the rim."""
    y, x = np.mgrid[0:120, 0:90]
    array = np.stack([x * 2, y * 2, x + y], -1).astype(np.uint8)
    out = eval_image(encoded(array), Input(size=48, resize=60))
    whole = Image.fromarray(array).resize((60, 80), Image.Resampling.BILINEAR)
    expected = np.asarray(whole.crop((6, 16, 54, 64)))
    assert np.abs(np.asarray(out).astype(int) - expected.astype(int)).max() <= 2


def test_a_reduced_jpeg_looks_like_the_full_one():
    y, x = np.mgrid[0:480, 0:640]
    wave = 127 + 100 * np.sin(x / 60) * np.cos(y / 40)
    data = encoded(np.stack([wave, wave / 2, 255 - wave], -1).astype(np.uint8), "JPEG", quality=95)
    small = np.asarray(eval_image(data, Input(size=32, resize=32))).astype(int)
    full = np.asarray(
        Image.open(io.BytesIO(data)).resize((32, 32), Image.Resampling.BILINEAR, (80, 0, 560, 480))
    )
    assert np.abs(small - full.astype(int)).mean() < 3


def test_crops_depend_only_on_their_key():
    data = encoded(np.random.default_rng(0).integers(0, 255, (50, 60, 3), dtype=np.uint8))
    first = train_image(data, SMALL, draws(1, 2, 3))
    assert train_image(data, SMALL, draws(1, 2, 3)) == first
    assert train_image(data, SMALL, draws(1, 2, 4)) != first


def test_half_of_the_crops_are_flipped():
    array = np.zeros((8, 8, 3), dtype=np.uint8)
    array[:, 4:] = 255
    crops = [np.asarray(train_image(encoded(array), SMALL, draws(key))) for key in range(400)]
    flipped = sum(crop[:, 0].sum() > crop[:, -1].sum() for crop in crops)
    assert 140 < flipped < 260


@pytest.mark.parametrize("channels", ["rgb", "bgr"])
def test_normalise_is_the_formula(channels):
    images = torch.randint(0, 256, (2, 4, 4, 3), dtype=torch.uint8)
    spec = Input(mean=(104, 117, 128), std=(1, 2, 3), channels=channels, top=255.0)
    out = Normalise(spec)(images)
    for c in range(3):
        source = images[..., c if channels == "rgb" else 2 - c].float()
        assert torch.allclose(out[:, c], (source - spec.mean[c]) / spec.std[c])


@pytest.mark.parametrize("channels", ["rgb", "bgr"])
def test_normalise_has_the_bits_of_the_formula_channel_by_channel(channels):
    """In any layout of the images, which it leaves as they are."""
    spec = Input(channels=channels)
    every = torch.arange(3 * 256).view(1, 16, 16, 3).remainder(256).to(torch.uint8)
    for images in (every, every.transpose(1, 2), every[:, :, 3:11]):
        before = images.clone()
        x = images.permute(0, 3, 1, 2).float() * (spec.top / 255)
        x = x.flip(1) if channels == "bgr" else x
        mean, std = (torch.tensor(y).view(3, 1, 1) for y in (spec.mean, spec.std))
        out = Normalise(spec)(images)
        assert torch.equal(out, (x - mean) / std)
        assert out.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(images, before)
