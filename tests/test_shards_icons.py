"""The icons source on made-up sets, one rule a test, and the bundled shards on their own promises."""

import io
import json
import pickle
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shards import attribution, sheet
from shards.index import ImageReader, load_index
from shards.item import ShardError
from shards.sources import icons, icons_mini
from shards.sources.icons_drawing import document, ink, png
from shards.sources.icons_names import Language, without_style
from shards.sources.icons_twins import TWIN, synonyms, twins

BUNDLED = Path(__file__).parents[1] / "shards" / "bundled" / "icons-mini"


def picture(seed):
    """A drawing unlike that of any other seed."""
    corners = np.random.default_rng(seed).integers(0, 18, (6, 2))
    return "".join(f'<rect x="{x}" y="{y}" width="6" height="4"/>' for x, y in corners)


def icon_set(prefix, bodies, spdx="MIT", **info):
    about = {"name": prefix.title(), "author": {"name": f"{prefix}'s author"}, **info}
    return {
        "prefix": prefix,
        "info": {"license": {"spdx": spdx}, **about},
        "icons": {name: {"body": body} for name, body in bodies.items()},
        "width": 24,
        "height": 24,
    }


def write(root, *sets):
    (root / "json").mkdir(parents=True)
    for each in sets:
        (root / "json" / f"{each['prefix']}.json").write_text(json.dumps(each))
    return root


def classes(collection):
    found = {}
    for item in collection.items:
        found.setdefault(item.class_name, []).append(item.name)
    return found


def drawn_by(families, concepts, start=0):
    """Sets that draw all concepts, each in its own way."""
    return [
        icon_set(family, {name: picture(start + 100 * i + j) for j, name in enumerate(concepts)})
        for i, family in enumerate(families)
    ]


# names


def concept(*names, others=()):
    """The concepts of names in one set; others: the words of more families."""
    ours = without_style(names)
    language = Language({"ours": list(ours.values()), **{str(i): o for i, o in enumerate(others)}})
    return [language.concept(words) for words in ours.values()]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("home-outline", "home"),
        ("home-filled", "home"),
        ("home-alt", "home"),
        ("circle-user", "circle user"),
        ("user-circle", "circle user"),
        ("trees", "tree"),
        ("batteries", "battery"),
        ("boxes", "box"),
        ("compass", "compass"),
        ("calendar-times", "calendar times"),
        ("tree-2", "tree"),
        ("password2", "password"),
        ("file-mp3", "file mp3"),
        ("chart-line", "chart line"),
        ("outline", "outline"),
    ],
)
def test_concept(name, expected):
    fifty = [f"thing{'x' * i}" for i in range(50)]  # so that no word is common
    assert concept(name, *fifty)[0] == expected


def test_a_word_is_style_where_it_ends_many_names():
    assert concept("home-line", "tree-line", "car-fill") == ["home", "tree", "car"]
    assert concept("baseline-home", "baseline-tree-24", "baseline-car-24") == [
        "home",
        "tree",
        "car",
    ]


def test_a_number_is_the_subject_where_most_count_past_three():
    dice = [("dice", str(i)) for i in range(1, 7)]
    assert concept("dice-5", others=[dice] * 4) == ["5 dice"]
    tree = [("tree", "2")]
    assert concept("tree-5", others=[tree] * 4) == ["tree"]


def test_a_plural_is_a_subject_where_several_families_draw_both():
    both = [("user",), ("users",)]
    assert concept("users", "stars", others=[both] * 4) == ["users", "star"]


def test_compounds_are_spelled_as_most_families_do():
    others = [[("lightbulb",), ("arrow", "right")]] * 3
    assert concept("light-bulb", "arrowright", others=others) == ["lightbulb", "arrow right"]


# sets and families


def test_classes_images_and_credits(tmp_path):
    sets = drawn_by(["aa", "bb"], ["red-fish", "blue-fish", "green-fish", "old-fish"])
    collection = icons.collect(write(tmp_path, *sets))
    assert classes(collection) == {
        " ".join(sorted(name.split("-"))): [f"aa:{name}", f"bb:{name}"] for name in sets[0]["icons"]
    }
    splits = {item.class_name: item.split for item in collection.items}
    assert Counter(splits.values()) == {"train": 2, "test": 2}
    item = collection.items[0]
    prefix, name = item.name.split(":")
    credit = {"set": prefix, "icon": name, "licence": "MIT", "author": f"{prefix}'s author"}
    assert item.extra == credit
    with Image.open(io.BytesIO(pickle.loads(pickle.dumps(item)).encoded())) as image:
        assert (image.format, image.mode, image.size) == ("PNG", "L", (64, 64))
        assert image.getpixel((0, 0)) == 255
        assert image.getextrema() == (0, 255)


@pytest.mark.parametrize(
    "other",
    [
        {"spdx": "GPL-3.0"},
        {"spdx": "CC-BY-SA-4.0"},
        {"spdx": "CC-BY-NC-4.0"},
        {"spdx": None},
        {"category": "Logos"},
        {"category": "Emoji"},
        {"palette": True},
        {"tags": ["Contains Animations"]},
    ],
    ids=str,
)
def test_sets_left_out(tmp_path, other):
    sets = drawn_by(["aa", "bb"], ["red-fish", "blue-fish"])
    out = icon_set("cc", {"red-fish": picture(7), "new-fish": picture(8)}, **other)
    items = icons.collect(write(tmp_path, *sets, out)).items
    assert {item.extra["set"] for item in items} == {"aa", "bb"}


def test_logos_left_out(tmp_path):
    names = ["red-fish", "brand-fish", "fish-logo", "acme-circle", "acme", "box", "box-open"]
    both = {"acme": picture(1), "box": picture(2)}
    logos = [icon_set(f"l{i}", both, category="Logos") for i in range(5)]
    root = write(tmp_path, *drawn_by(["aa", "bb", "cc"], names), *logos)
    found = classes(icons.collect(root)).keys()
    assert found == {"fish red", "box", "box open"}, "box is a brand, too, but more often a box"


def test_a_family_counts_once_and_with_its_plainest_drawing(tmp_path):
    sets = drawn_by(["mdi", "ic", "aa"], ["red-fish-outline", "red-fish", "red-fish-2"])
    sets[2]["aliases"] = {"blue-fish": {"parent": "red-fish"}}
    sets += drawn_by(["bb"], ["blue-fish"])
    assert classes(icons.collect(write(tmp_path, *sets))) == {
        "fish red": ["aa:red-fish", "ic:red-fish"]
    }


def test_a_single_word_needs_three_families(tmp_path):
    sets = drawn_by(["aa", "bb"], ["turkey", "hen"]) + drawn_by(["cc"], ["hen"], start=900)
    assert list(classes(icons.collect(write(tmp_path, *sets)))) == ["hen"]


def test_at_most_twelve(tmp_path):
    sets = drawn_by([f"s{i:02}" for i in range(20)], ["red-fish"])
    assert len(icons.collect(write(tmp_path, *sets)).items) == icons.PER_CLASS


def test_too_faint_to_see(tmp_path):
    sets = drawn_by(["aa", "bb", "cc"], ["red-fish"])
    sets[0]["icons"]["red-fish"]["body"] = '<path stroke="black" stroke-width=".1" d="M0 9h20"/>'
    sets[0]["icons"]["red-fish-filled"] = {"body": picture(5)}
    found = classes(icons.collect(write(tmp_path, *sets)))
    assert found == {"fish red": ["aa:red-fish-filled", "bb:red-fish", "cc:red-fish"]}


# twins


def test_twins_are_all_pairs_above_the_threshold():
    """Oracle: numpy's corrcoef of every pair."""
    draw = np.random.default_rng(0)
    base = draw.integers(0, 256, (20, 1, 8, 8)).repeat(3, 1)
    noisy = np.clip(base + draw.normal(0, 13, base.shape), 0, 255).astype(np.uint8)
    drawings = noisy.reshape(60, 8, 8)
    exact = np.triu(np.corrcoef(drawings.reshape(60, 64)), 1)
    expected = set(zip(*np.nonzero(exact > TWIN), strict=True))
    assert 5 < len(expected) < 60
    assert {(i, j) for i, j, _ in twins(drawings)} == expected


def same(*pairs):
    return [(i, j, 0.999) for i, j in pairs]


def test_concepts_that_share_two_drawings_are_synonyms():
    names = ["add circle"] * 3 + ["circle plus"] * 2
    families = list("abcde")
    assert synonyms(names, families, same((0, 3), (1, 4))) == {"circle plus": "add circle"}
    assert synonyms(names, families, same((0, 3), (1, 3))) == {}, "one drawing is not enough"
    assert synonyms(names, families, [(0, 3, 0.98), (1, 4, 0.98)]) == {}, "alike is not the same"


def test_concepts_that_families_tell_apart_are_not_synonyms():
    names = ["minus user"] * 3 + ["plus user"] * 3
    assert synonyms(names, list("abcabc"), same((0, 4), (1, 3))) == {}
    aliases = same((0, 3), (1, 4), (2, 5))  # the same drawing under both names tells nothing apart
    assert synonyms(names, list("abcabc"), aliases) == {"minus user": "plus user"}


def test_words_that_mean_the_same_elsewhere_mean_it_here():
    names = ["add circle", "circle plus", "add square", "plus square", "add user", "plus user"]
    found = synonyms(names * 2, list("abcdefghijkl"), same((0, 1), (2, 3)))
    assert found["add user"] == "plus user"


def test_chains_are_short():
    names = [f"n{i // 2}" for i in range(40)]
    chain = same(*((i, i + 2) for i in range(38)))
    groups = Counter(synonyms(names, [str(i) for i in range(40)], chain).values())
    assert max(groups.values()) + 1 <= 6


def test_synonyms_are_merged_and_contradictions_dropped(tmp_path):
    one, two, three = picture(1), picture(2), picture(3)
    root = write(
        tmp_path,
        icon_set("aa", {"add-circle": one, "red-fish": picture(11)}),
        icon_set("bb", {"add-circle": two, "red-fish": picture(12)}),
        icon_set("cc", {"circle-plus": one, "red-fish": three}),
        icon_set("dd", {"circle-plus": two, "blue-fish": three}),
        icon_set("ee", {"circle-plus": picture(4), "blue-fish": picture(13)}),
        icon_set("ff", {"red-fish": picture(11), "blue-fish": picture(14)}),
    )
    collection = icons.collect(root)
    assert classes(collection) == {
        "blue fish": ["ee:blue-fish", "ff:blue-fish"],  # dd's is cc's red one
        "fish red": ["aa:red-fish", "bb:red-fish"],  # ff's is aa's
        "circle plus": ["aa:add-circle", "bb:add-circle", "ee:circle-plus"],
    }
    notes = " ".join(collection.notes)
    assert "1 concepts merged" in notes
    assert "different concepts: 2 dropped" in notes


def test_a_family_counts_once_after_a_merger():
    blank = np.zeros((32, 32), np.uint8)
    merged = [
        icons.Drawing("plus", icons.Icon(family, (), "", {}), blank)
        for family in ("aa", "bb", "aa")
    ]
    kept, copies, contradictions = icons.without_twins(merged, [])
    assert [each.icon.family for each in kept["plus"]] == ["aa", "bb"]
    assert (copies, contradictions) == (1, 0)


# the same again


def test_the_package_and_its_folder_give_the_same_items_every_time(tmp_path):
    root = write(tmp_path / "package", *drawn_by(["aa", "bb", "cc"], ["red-fish", "blue-fish"]))
    with tarfile.open(tmp_path / "icons.tgz", "w:gz") as tar:
        tar.add(root, "package")
    first = icons.collect(root)
    assert icons.collect(tmp_path).items == first.items
    assert icons.collect(tmp_path / "icons.tgz").items == first.items
    assert [item.encoded() for item in first.items] == [item.encoded() for item in first.items]


# bad and hostile input


def test_bad_roots_are_refused_in_a_sentence(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.tgz").write_bytes(b"no tar")
    write(tmp_path / "broken")
    (tmp_path / "broken/json/aa.json").write_text("{")
    write(tmp_path / "other")
    (tmp_path / "other/json/aa.json").write_text('{"prefix": "aa", "info": {}}')
    write(tmp_path / "alone", icon_set("aa", {"fish": picture(0)}))
    for name, reason in [
        ("missing", "is not the npm package"),
        ("empty", "no icons in"),
        ("file.tgz", "is not the npm package"),
        ("broken", "aa.json is not an icon set"),
        ("other", "aa.json is not an icon set"),
        ("alone", "no two families"),
    ]:
        with pytest.raises(ShardError, match=reason):
            icons.collect(tmp_path / name)


OUTSIDE = Path(__file__).parent / "never-read.svg"
HOSTILE = {
    "image": f'<image href="{OUTSIDE}" width="9" height="9"/>',
    "image by xlink": f'<image xmlns:x="http://www.w3.org/1999/xlink" x:href="file://{OUTSIDE}"/>',
    "use of a file": f'<use href="file://{OUTSIDE}#a"/>',
    "use of uses": '<g id="a"><path d="M0 0h9"/></g><use href="#a"/>',
    "web": '<image href="http://127.0.0.1:9/a.png"/>',
    "fill by url": f'<path fill="url(file://{OUTSIDE}#a)" d="M0 0h9v9z"/>',
    "fill by URL": f'<path fill=" URL( {OUTSIDE}#a )" d="M0 0h9v9z"/>',
    "script": "<script>1</script>",
    "style": "<style>path{fill:red}</style>",
    "style attribute": f'<path style="fill:url({OUTSIDE})" d="M0 0h9v9z"/>',
    "handler": '<path onload="alert(1)" d="M0 0h9v9z"/>',
    "foreign": "<foreignObject/>",
    "another namespace": '<mask xmlns=""/>',
    "animation": "<animate/>",
    "entity": "<text>&lol;</text>",
    "comment": "<!-- -->",
    "instruction": "<?xml-stylesheet href='a.css'?>",
    "open end": "<g>",
    "early end": '</svg><image href="a.png"/><svg>',
    "deep": "<g>" * 100 + "</g>" * 100,
    "masks of masks": '<mask id="a"><path mask="url(#b)"/></mask><mask id="b"/>',
    "long": " " * 200_000,
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_hostile_drawings_never_reach_the_renderer(body, monkeypatch):
    monkeypatch.setattr("skia.SVGDOM.MakeFromStream", lambda _: pytest.fail("it was rendered"))
    with pytest.raises(ShardError):
        ink(document(body, 0, 0, 24, 24), 32)


def test_an_svg_with_a_doctype_is_refused():
    entity = '<!DOCTYPE svg [<!ENTITY x SYSTEM "file:///etc/hostname">]>'
    with pytest.raises(ShardError, match="declaration"):
        png(entity + document("<g/>", 0, 0, 24, 24), 32)


def test_hostile_icons_are_left_out(tmp_path):
    sets = drawn_by(["aa", "bb", "cc"], ["red-fish"])
    sets[1]["icons"]["red-fish"]["body"] = HOSTILE["image"] + picture(3)
    collection = icons.collect(write(tmp_path, *sets))
    assert classes(collection) == {"fish red": ["aa:red-fish", "cc:red-fish"]}
    assert "faint: 1" in collection.notes[1]


def test_masks_and_clips_within_a_drawing_are_drawn():
    body = '<mask id="m"><path fill="#fff" d="M0 0h12v24H0z"/></mask><g mask="url(#m)">{}</g>'
    drawn = ink(document(body.format('<path d="M0 0h24v24H0z"/>'), 0, 0, 24, 24), 32)
    assert drawn[16, 8] == 255
    assert drawn[16, 24] == 0


# the bundled shards


@pytest.fixture(scope="module")
def bundled():
    return load_index(BUNDLED)


def test_bundled_size_and_counts(bundled):
    assert sum(path.stat().st_size for path in BUNDLED.iterdir()) <= 8_000_000
    labels = {split: set(bundled.labels(split).tolist()) for split in bundled.splits}
    assert {split: len(found) for split, found in labels.items()} == {"train": 500, "test": 500}
    assert not labels["train"] & labels["test"]
    for split, images in icons_mini.IMAGES.items():
        assert set(Counter(bundled.labels(split).tolist()).values()) == {images}


def test_bundled_licences_and_attribution(bundled):
    told = []
    for path in bundled.shards:
        with tarfile.open(path) as tar:
            members = [m for m in tar if m.name.endswith(".json")]
            told += [json.load(tar.extractfile(m))["extra"] for m in members]
    assert {extra["licence"] for extra in told} <= icons_mini.LICENCES
    text = (BUNDLED / "ATTRIBUTION.md").read_text()
    count = Counter(extra["set"] for extra in told)
    assert count == attribution.sets_in(bundled)
    for extra in told:
        line = next(line for line in text.splitlines() if f"(`{extra['set']}`)" in line)
        assert extra["author"] in line
        assert extra["licence"] in line
        assert line.endswith(f" {count[extra['set']]} |")


def test_bundled_images_are_small_and_none_is_in_two_classes(bundled):
    reader, drawings = ImageReader(bundled), []
    for row in range(len(bundled.rows)):
        with Image.open(io.BytesIO(reader.read(row))) as image:
            assert max(image.size) <= 48
            drawings.append(255 - np.asarray(image.convert("L")))
    found = twins(np.stack(drawings))
    label = bundled.rows["label"]
    assert not [(i, j) for i, j, _ in found if label[i] != label[j]]


def test_sheet(tmp_path, capsys):
    out = tmp_path / "sheet.png"
    assert sheet.main([str(BUNDLED), str(out), "--classes", "8"]) == 0
    with Image.open(out) as image:
        assert image.convert("L").getextrema()[0] == 0
    assert sheet.main([str(tmp_path / "missing"), str(out)]) == 2
    assert "missing" in capsys.readouterr().err


def test_attribution_from_the_package(tmp_path, capsys, bundled):
    about = {"url": "https://aa.example"}
    sets = [
        icon_set(prefix, {"fish": picture(0)}, author={"name": "Ann", **about})
        for prefix in attribution.sets_in(bundled)
    ]
    root = write(tmp_path, *sets)
    assert attribution.main([str(BUNDLED), "--root", str(root)]) == 0
    assert "| [Ann](https://aa.example) | MIT |" in capsys.readouterr().out
