"""Damaged shards, from seeds: the same pixels or a ShardError, never other pixels or another error."""

import json
import random
import shutil

import numpy as np
import pytest
from damage import DAMAGE, flip
from pictures import as_version_1, make_folder, put_index, reseal

from dml.data.batches import EvalBatches
from dml.data.preprocessing import Input
from shards.build import build
from shards.index import load_index
from shards.item import ShardError
from shards.sources import folder
from shards.verify import verify

SPEC = Input(size=16, resize=16)
TRIALS = 80  # per kind of damage


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    place = tmp_path_factory.mktemp("fuzz")
    build(
        folder.collect(make_folder(place / "in", images=2)), "folder", place / "out", max_bytes=9000
    )
    return place / "out"


@pytest.fixture(scope="module")
def packed_1(packed):
    out = packed.with_name("version_1")
    shutil.copytree(packed, out)
    as_version_1(out)
    return out


def outcome(out):
    """What training and evaluation make of the shards, or the sentence that refuses them."""
    try:
        return seen(load_index(out))
    except ShardError as error:
        return str(error)


def seen(index):
    everything = np.arange(len(index.rows))
    pixels, labels = EvalBatches(index, everything, index.rows["label"], SPEC, len(everything))[0]
    splits = {split: index.positions(split).tolist() for split in index.splits}
    return pixels.numpy().tobytes(), labels.tolist(), index.class_names, splits


def damaged(original, place, rng, damage):
    """Copy the shards, and damage one of their files."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(original, place)
    tars = sorted(place.glob("*.tar"))
    path = rng.choice(
        [place / "manifest.json", place / "index.npy", rng.choice(tars), rng.choice(tars)]
    )
    data = bytearray(path.read_bytes())
    damage(data, rng)
    path.write_bytes(data)


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_same_pixels_or_a_sentence(packed, tmp_path, damage):
    expected, refused = outcome(packed), 0
    for trial in range(TRIALS):
        damaged(packed, tmp_path / "out", random.Random(f"{damage.__name__} {trial}"), damage)
        found = outcome(tmp_path / "out")
        assert found == expected or (isinstance(found, str) and "again" in found), trial
        refused += isinstance(found, str)
    assert refused > TRIALS / 5  # damage between the images changes nothing


@pytest.mark.parametrize("damage", DAMAGE)
def test_verification_finds_every_changed_byte_of_a_shard(packed, tmp_path, damage):
    for trial in range(TRIALS // 5):
        damaged(packed, tmp_path / "out", random.Random(f"{damage.__name__} {trial}"), damage)
        changed = any(
            path.read_bytes() != (tmp_path / "out" / path.name).read_bytes()
            for path in packed.glob("*.tar")
        )
        assert list(verify(tmp_path / "out", deep=True)) or not changed, trial


@pytest.mark.parametrize("damage", DAMAGE)
def test_without_checksums_other_pixels_are_not_noticed(packed_1, tmp_path, damage):
    """What the checksums are for. Version 1 at least raises no other error."""
    expected, silent = outcome(packed_1), 0
    for trial in range(TRIALS):
        damaged(packed_1, tmp_path / "out", random.Random(trial), damage)
        found = outcome(tmp_path / "out")
        silent += found != expected and not isinstance(found, str)
    assert silent or damage is not flip


# Somebody else's shards may have true checksums and be wrong all the same.


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("damage", DAMAGE)
def test_an_index_with_a_true_checksum(packed, packed_1, tmp_path, damage, version):
    original = packed_1 if version == 1 else packed
    shutil.copytree(original, tmp_path / "out")
    for trial in range(TRIALS):
        data = bytearray((original / "index.npy").read_bytes())
        damage(data, random.Random(trial))
        put_index(tmp_path / "out", bytes(data))
        outcome(tmp_path / "out")
        list(verify(tmp_path / "out", deep=True))


ODD = (
    None,
    True,
    -1,
    0,
    10**30,
    1.5,
    float("nan"),
    "",
    "../x",
    "\0",
    "\udce9",
    "9" * 5000,
    [],
    {},
    [[]],
)


def places(value, path=()):
    """Every place in a manifest."""
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


@pytest.mark.parametrize("seed", range(3))
def test_a_manifest_with_a_true_checksum(packed, tmp_path, seed):
    rng, original = random.Random(seed), json.loads((packed / "manifest.json").read_text())
    shutil.copytree(packed, tmp_path / "out")
    everywhere = [path for path in places(original) if path]
    for _ in range(TRIALS):
        manifest = json.loads((packed / "manifest.json").read_text())
        *path, last = rng.choice(everywhere)
        inner = manifest
        for key in path:
            inner = inner[key]
        inner[last] = rng.choice(ODD)
        (tmp_path / "out/manifest.json").write_text(json.dumps(manifest))
        reseal(tmp_path / "out")
        outcome(tmp_path / "out")
        list(verify(tmp_path / "out", deep=True))
