"""Several datasets in a run, and batches within a super-class: exact counts, for any number of processes
and workers. Oracles: counting, a loop over classes, exact fractions."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from fleet import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import make_folder
from PIL import Image
from runs import ICONS

from dml.config import ConfigError, load
from dml.config.mixing import Part, dataset_names, share_classes
from dml.data.batches import IMAGES, Batches, Grouping
from dml.data.deck import Deck, GroupedDeck, mix
from dml.data.loader import loader
from dml.data.preprocessing import Input
from dml.data.splits import read_splits, train_batches
from dml.evaluate import Evaluation, mean
from dml.plan import built_sizes, plan
from shards.build import main as build
from shards.index import load_index
from shards.item import ShardError

CONFIG = ROOT / "configs" / "icons_mini.yaml"
SMALL = Input(size=16, resize=20)

groups = st.lists(st.integers(1, 12), min_size=1, max_size=6)


# ---- a deck of groups ------------------------------------------------------------------------------


@settings(max_examples=100)
@given(groups, st.data(), st.integers(0, 2**64 - 1))
def test_over_a_shuffle_every_card_of_a_grouped_deck_comes_equally_often(sizes, data, key):
    total = sum(sizes)
    hand = data.draw(st.integers(1, total))
    deck, counts, first = GroupedDeck(sizes, hand, key), np.zeros(total, int), 0
    for c in range(4):
        end = math.ceil((c + 1) * total / hand)  # a hand that begins in a shuffle belongs to it
        for n in range(first, end):
            cards, times = deck.deal(n)
            assert len(set(cards.tolist())) == hand
            assert set(times.tolist()) <= {c, c + 1}
            counts += np.bincount(cards, minlength=total)
        first = end
        assert set(counts.tolist()) <= {c + 1, c + 2}
        assert counts.sum() == end * hand  # so with a whole number of hands all come c + 1 times


@settings(max_examples=60)
@given(groups, st.integers(1, 8), st.integers(0, 2**32))
def test_a_hand_of_several_groups_comes_only_where_a_group_ends(sizes, hand, key):
    total = sum(sizes)
    hand = min(hand, total)
    group = np.repeat(np.arange(len(sizes)), sizes)
    deck = GroupedDeck(sizes, hand, key)
    hands = [group[deck.deal(n)[0]] for n in range(total // hand)]  # those within the first shuffle
    assert sum(len(set(each.tolist())) > 1 for each in hands) < len(sizes) + 1
    # in their order of the shuffle each group is one run
    order = group[deck.shuffle(0)]
    assert len([g for g, _ in itertools.groupby(order)]) == len(sizes)


def test_a_grouped_deal_needs_no_history_and_the_hands_of_a_group_are_spread():
    used = GroupedDeck([40, 30, 30], 10, 5)
    for n in reversed(range(50)):
        used.deal(n)
    for n in range(50):
        assert used.deal(n)[0].tolist() == GroupedDeck([40, 30, 30], 10, 5).deal(n)[0].tolist()
    order = [int(used.deal(n)[0][0] >= 40) for n in range(20)]
    assert order != sorted(order)
    assert order != sorted(order, reverse=True)


# ---- batches within a group ------------------------------------------------------------------------


def population(rng, count):
    """`count` classes of 1 to 8 images in 3 groups: rows, labels, groups."""
    sizes = rng.integers(1, 9, count)
    labels = np.repeat(rng.permutation(10 * count)[:count], sizes)
    group = np.repeat(rng.integers(0, 3, count), sizes)
    order = rng.permutation(len(labels))
    return order, labels[order], group[order]


@settings(max_examples=40)
@given(st.integers(2, 30), st.integers(2, 12), st.integers(0, 2**63 - 1), st.integers(0, 500))
def test_the_images_of_a_step_are_those_of_a_loop_over_classes(count, M, seed, step):
    rng = np.random.default_rng(seed % 1000)
    rows, labels, _ = population(rng, count)
    P = int(rng.integers(2, count + 1))
    batches = Batches(rows, labels, P, M, seed)
    found, found_labels = batches(step)
    classes, times = Deck(count, P, mix(seed, 0)).deal(step)
    expected = []
    for c, n in zip(classes.tolist(), times.tolist(), strict=True):
        label = batches.names[c]
        own = np.sort(np.flatnonzero(labels == label))  # stable: in the order of the rows given
        hand = list(range(len(own))) * (M // len(own))
        if M % len(own):
            deck = Deck(len(own), M % len(own), mix(seed, IMAGES, int(label)))
            hand += deck.deal(n)[0].tolist()
        expected += [(rows[own[i]], label) for i in hand]
    assert list(zip(found, found_labels, strict=True)) == expected


@settings(max_examples=40)
@given(
    st.integers(2, 12),
    st.integers(1, 4),
    st.sampled_from(["0", "0.25", "0.1", "0.5"]),
    st.integers(0, 99),
)
def test_over_epochs_all_classes_and_images_come_equally_often(P, factor, share, seed):
    """With P x factor classes an epoch of each of the two decks is `factor` batches."""
    count, M = P * factor, 4
    rows, labels, group = population(np.random.default_rng(seed), count)
    batches = Batches(rows, labels, P, M, seed, Grouping(group, float(share)))
    mixed = Fraction(share)
    steps = factor * mixed.denominator * 4  # whole epochs of both
    classes, images = {}, np.zeros(len(rows), int)
    seen = [batches(step) for step in range(steps)]
    for chosen, of in seen:
        assert len(np.unique(of)) == P
        for label in np.unique(of):
            classes[label] = classes.get(label, 0) + 1
        images += np.bincount(chosen, minlength=len(rows))
    assert set(classes.values()) == {steps // factor}
    assert len(classes) == count
    for label in classes:
        own = images[rows[labels == label]]
        assert own.max() - own.min() <= 2  # to within one in each of the two decks
    of_group = dict(zip(labels.tolist(), group.tolist(), strict=True))
    pure = [len({of_group[label] for label in of.tolist()}) == 1 for _, of in seen]
    if factor > 3 and mixed == 0:
        assert sum(pure) > 0


def test_the_share_of_mixed_batches_is_exact():
    """A mixed batch is one that the plain deck deals."""
    rows = np.arange(120)
    labels, group = rows // 4, rows // 40
    grouped = Batches(rows, labels, 5, 4, 3, Grouping(group, 0.3))
    plain = Batches(rows, labels, 5, 4, 3)
    is_mixed = [
        np.array_equal(grouped(step)[0], plain(math.floor(step * Fraction(3, 10)))[0])
        for step in range(100)
    ]
    assert [sum(is_mixed[: n + 1]) for n in range(100)] == [3 * (n + 1) // 10 for n in range(100)]
    kinds = [len(set((labels_of // 10).tolist())) for _, labels_of in map(grouped, range(100))]
    assert np.mean([kind > 1 for kind, m in zip(kinds, is_mixed, strict=True) if m]) > 0.8
    assert np.mean([kind > 1 for kind, m in zip(kinds, is_mixed, strict=True) if not m]) == 0


# ---- several datasets ------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 500), st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_the_classes_of_a_batch_are_shared_in_proportion(P, weights):
    shares = share_classes(P, weights)
    assert sum(shares) == P
    exact = [P * Fraction(w) / sum(map(Fraction, weights)) for w in weights]
    assert all(abs(share - part) < 1 for share, part in zip(shares, exact, strict=True))


def test_folders_are_named_by_what_tells_them_apart():
    assert dataset_names(["data/sop", "other/cars/"]) == ["sop", "cars"]
    assert dataset_names(["a/train", "b/train"]) == ["a/train", "b/train"]
    assert dataset_names(["data/sop"]) == ["sop"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two datasets of 12 and 6 classes, which have the same class names; the first has super-classes."""
    root = tmp_path_factory.mktemp("mixed")
    for name, classes in (("large", 12), ("little", 6)):
        make_folder(root / "images" / name, classes=classes)
    table = ["path,label,split,super_class"]
    for path in sorted((root / "images" / "large").rglob("*.*")):
        split, label, _ = path.relative_to(root / "images" / "large").parts
        table.append(
            f"large/{path.relative_to(root / 'images' / 'large')},{label},{split},{hash_of(label)}"
        )
    (root / "images" / "large.csv").write_text("\n".join(table) + "\n")
    sources = {"large": root / "images" / "large.csv", "little": root / "images" / "little"}
    for name, source in sources.items():
        assert (
            build(["folder", "--root", str(source), "--out", str(root / name), "--workers", "1"])
            == 0
        )
    return [str(root / name) for name in sources]


def hash_of(label):
    return f"group{sum(label.encode()) % 3}"


def config_of(folders, *sets):
    shards = f"data.shards=[{', '.join(folders)}]"
    return load(
        CONFIG, [shards, "data.dataset=folder", "batch.classes=6", "batch.per_class=3", *sets]
    )


def test_the_index_has_super_classes(folders):
    index = load_index(folders[0])
    names = index.manifest["super_classes"]
    labels, found = index.labels("train"), index.super_classes("train")
    assert [names[g] for g in found] == [hash_of(index.class_names[label]) for label in labels]
    with pytest.raises(ShardError, match="has no super-classes: build the shards again"):
        load_index(folders[1]).super_classes("train")


def test_a_mixture_is_the_same_for_any_number_of_processes_and_workers(folders):
    config = config_of(folders, "data.weights=[2, 1]")
    splits = read_splits(config)
    whole = list(loader(train_batches(splits, config, SMALL, 0, 1), range(4)))
    for size, workers in ((2, 0), (3, 1)):
        parts = [
            list(loader(train_batches(splits, config, SMALL, rank, size), range(4), workers))
            for rank in range(size)
        ]
        for step, (images, labels) in enumerate(whole):
            assert torch.equal(torch.cat([part[step][0] for part in parts]), images)
            assert torch.equal(torch.cat([part[step][1] for part in parts]), labels)
    # resuming is to begin at another step
    again = list(loader(train_batches(splits, config, SMALL, 0, 1), range(2, 4)))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(whole[2:], again, strict=True))


def test_a_mixture_has_exact_shares_and_labels_of_its_own(folders):
    """4 of 12 and 2 of 6 classes per batch: an epoch is 3 batches for both."""
    config = config_of(folders, "data.weights=[2, 1]")
    splits = read_splits(config)
    large, little = (len(data.index.class_names) for data in splits.datasets)
    batches = train_batches(splits, config, SMALL, 0, 1).batches
    labels = np.concatenate([batches(step)[1] for step in range(6)])
    rows = np.concatenate([batches(step)[0] for step in range(6)])
    _, counts = np.unique(labels, return_counts=True)
    assert counts.tolist() == [2 * 3] * 18  # twice M images of each class of both
    assert ((labels >= large) == (rows >= len(splits.datasets[0].index.rows))).all()
    assert labels.max() < large + little
    for step in range(6):
        assert (batches(step)[1] >= large).sum() == 2 * 3
    # the images are those of the folders
    reader = train_batches(splits, config, SMALL, 0, 1).reader
    for row, label in zip(rows.tolist(), labels.tolist(), strict=True):
        own, number = reader.place(row)
        known = own.index.rows["label"][number] + (large if own is reader.readers[1] else 0)
        assert known == label


def test_groups_within_a_dataset_of_real_shards(folders):
    config = config_of(folders[:1], "batch.group=super_class", "batch.classes=4")
    splits = read_splits(config)
    index = splits.datasets[0].index
    batches = train_batches(splits, config, SMALL, 0, 1).batches
    group = dict(
        zip(index.labels("train").tolist(), index.super_classes("train").tolist(), strict=True)
    )
    seen = [{group[label] for label in batches(step)[1].tolist()} for step in range(9)]
    assert min(map(len, seen)) == 1
    config = config_of(folders[1:], "batch.group=super_class", "batch.classes=4")
    splits = read_splits(config)
    with pytest.raises(ShardError, match="has no super-classes"):
        train_batches(splits, config, SMALL, 0, 1)


def test_the_plan_of_a_mixture_says_how_often_an_image_is_seen(folders):
    config = config_of(folders, "data.weights=[1, 1]", "length.epochs=null", "length.steps=20")
    found = plan(config, 1, *built_sizes(config))
    images = [built_sizes(config_of([folder]))[1] for folder in folders]
    assert [part.classes_per_batch for part in found.datasets] == [3, 3]
    assert [part.times_seen for part in found.datasets] == [20 * 9 / n for n in images]
    assert f"of little{' ' * 18}3 classes per batch; each image is seen" in str(found)
    assert [part["name"] for part in found.to_dict()["datasets"]] == ["large", "little"]
    assert read_splits(config).sizes == built_sizes(config)
    alone = plan(config_of(folders[:1]), 1, *built_sizes(config_of(folders[:1])))
    assert "datasets" not in alone.to_dict()
    # by default in proportion to the classes
    shared = plan(config_of(folders), 1, *built_sizes(config))
    assert [part.classes_per_batch for part in shared.datasets] == [4, 2]


@pytest.mark.parametrize(
    ("sets", "sentence"),
    [
        (["data.weights=[1, 8]"], "data.weights = '[1.0, 8.0]': little would bring 5 classes"),
        (["data.weights=[50, 1]"], "little would bring none of the 6 classes of a batch; change"),
        (["batch.classes=30"], "batch.classes = 30: only 18 classes to train on"),
        (["eval.validation_classes=0.2", "eval.every_steps=5"], "of little to train on"),
    ],
)
def test_a_plan_refuses_shares_that_cannot_be(folders, sets, sentence):
    folders = [*folders[:1], folders[1]]
    little = Part("little", 4, 16)
    config = config_of(folders, *sets)
    sizes = built_sizes(config)
    parts = [sizes[2][0], little] if "weights" in sets[0] else sizes[2]
    with pytest.raises(ConfigError) as refused:
        plan(config, 1, sizes[0], sizes[1], parts)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("sets", "sentence"),
    [
        (["data.weights=[1, 2, 3]"], "a number for each of the 2 folders of data.shards"),
        (["data.weights=[1, 0]"], "must be a list of finite numbers, not empty, all above 0"),
        (["data.shards=[a, a]"], "a list of different paths"),
        (["data.shards=[a, 1]"], "a list of different paths"),
        (["batch.mixed=0.1"], "has no effect without batch.group"),
        (["batch.group=colour"], "must be text, one of super_class"),
        (["batch.group=super_class", "batch.mixed=1"], "at least 0 and below 1"),
    ],
)
def test_mistakes_in_the_config(folders, sets, sentence):
    with pytest.raises(ConfigError) as refused:
        config_of(folders, *sets)
    assert sentence in str(refused.value)


def test_the_score_of_several_datasets_is_their_mean():
    def evaluation(recall, colour):
        picture = Image.new("RGB", (4, 2), colour)
        return Evaluation({"recall@1": recall, "map@r": recall / 2}, [torch.ones(1)], picture)

    first, second = evaluation(0.5, "red"), evaluation(1.0, "blue")
    assert mean([first], ["a"]) is first
    found = mean([first, second], ["a", "b"])
    assert found.scores == {
        "recall@1": 0.75,
        "map@r": 0.375,
        "a/recall@1": 0.5,
        "a/map@r": 0.25,
        "b/recall@1": 1.0,
        "b/map@r": 0.5,
    }
    assert found.picture.size == (4, 4)
    assert [found.picture.getpixel((0, y)) for y in (0, 3)] == [(255, 0, 0), (0, 0, 255)]


def test_a_run_of_an_earlier_version_keeps_its_settings():
    """Keys that came later are no part of what was learned unless they are set."""
    from dml.run_folder.folder import learned

    later = {
        "data.weights",
        "batch.group",
        "batch.mixed",
        "model.head",
        "model.hidden",
        "model.dropout",
    }
    config = load(CONFIG, [f"data.shards={ICONS}"])
    assert not later & learned(config).keys()
    changed = load(CONFIG, [f"data.shards={ICONS}", "model.head=mlp", "model.hidden=[8]"])
    assert learned(changed)["model.hidden"] == [8]
