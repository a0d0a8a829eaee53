"""Reads the npm package `@iconify/json`: about 240 icon sets, each a json file with its licence and
author.

Sets of logos or emoji, sets in colour, animated sets and sets whose licence asks for more than the
author's name are left out, and so are logos in the other sets."""

from __future__ import annotations

import json
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from shards.item import ShardError
from shards.sources.icons_drawing import document
from shards.sources.icons_names import Words, without_style

LICENCES = "MIT Apache-2.0 ISC CC0-1.0 CC-BY-3.0 CC-BY-4.0 OFL-1.1 Unlicense BSD-3-Clause"
# sets of logos that have another category
LOGO_SETS = "academicons file-icons devicon devicon-line devicon-plain fa-brands fa6-brands"
LOGO_WORDS = frozenset(["brand", "brands", "logo", "logos"])
AROUND_LOGOS = frozenset(["circle", "square", "social", "brand", "logo"])
# A name is a brand if at least BRAND logo sets draw it and few families use it in longer names: at
# most WITHIN times as many as draw it alone. apple, wechat; not target (0.6), link (0.8), box (1.3)
BRAND, WITHIN = 5, 0.55

# Sets of the same designers, or redrawn from one another. Any other set is a family of its own.
FAMILIES = {
    "boxicons": "boxicons bx bxs",
    "feather": "feather lucide lucide-lab",
    "font-awesome": "fa fa-regular fa-solid fa6-regular fa6-solid fa7-regular fa7-solid",
    "guidance": "guidance streamline-guidance",
    "heroicons": "heroicons heroicons-outline heroicons-solid sidekickicons",
    "icon-park": "icon-park-outline icon-park-solid icon-park-twotone",
    "ionicons": "ion famicons",
    "material": "ic material-symbols material-symbols-light mdi mdi-light zmdi",
    "mono": "mi mono-icons",
    "myna": "mynaui vadivam",
    "pepicons": "pepicons pepicons-pencil pepicons-pop pepicons-print",
    "streamline": "streamline streamline-flex streamline-plump streamline-sharp",
    "unicons": "uil uim uis uit",
}
FAMILY = {prefix: family for family, sets in FAMILIES.items() for prefix in sets.split()}
MAX_SET_BYTES = 200 << 20  # the largest set has 25 MB


@dataclass(frozen=True)
class Icon:
    family: str
    words: Words  # of its name, without style
    svg: str
    extra: Mapping[str, str]

    @property
    def name(self) -> str:
        return f"{self.extra['set']}:{self.extra['icon']}"


def read(root: Path) -> list[Icon]:
    """The icons of the package, sorted by set; root is the npm tgz or its unpacked folder."""
    icons, logos = list[Icon](), Counter[str]()
    for name, content in _sets(root):
        try:
            if content["info"].get("category") == "Logos" or content["prefix"] in LOGO_SETS.split():
                logos.update(content["icons"].keys())
            elif _wanted(content["info"]):
                icons += _icons(content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ShardError(f"{root}: {name} is not an icon set: {error!r}") from None
    brands = _brands(icons, {name for name, count in logos.items() if count >= BRAND})
    icons = [icon for icon in icons if not _logo(icon.words, brands)]
    if not icons:
        raise ShardError(f"{root}: no icons in json/*.json; give the npm package @iconify/json")
    return icons


def infos(root: Path) -> dict[str, Any]:
    """set -> its title, its author and its licence, with their addresses."""
    return {content["prefix"]: content["info"] for _, content in _sets(root)}


def _sets(root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, text in sorted(_files(root)):
        try:
            yield name, json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ShardError(f"{root}: {name} is not an icon set: {error!r}") from None


def _files(root: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of every json/*.json. Nothing is unpacked to disk."""
    if root.is_dir():
        folder = root / "package" if (root / "package").is_dir() else root
        yield from ((path.name, path.read_bytes()) for path in folder.glob("json/*.json"))
        return
    try:
        with tarfile.open(root) as tar:
            for member in tar:
                if member.isfile() and PurePosixPath(member.name).match("json/*.json"):
                    if member.size > MAX_SET_BYTES:
                        raise ShardError(
                            f"{root}: {member.name} has {member.size:,} bytes, but at most "
                            f"{MAX_SET_BYTES:,} are read"
                        )
                    file = tar.extractfile(member)
                    assert file is not None  # None only for members that are not regular files
                    yield PurePosixPath(member.name).name, file.read()
    except (OSError, EOFError, tarfile.TarError) as error:
        raise ShardError(f"{root} is not the npm package @iconify/json: {error}") from None


def _wanted(info: Mapping[str, Any]) -> bool:
    return (
        info["license"].get("spdx") in LICENCES.split()
        and not info.get("palette")
        and info.get("category") != "Emoji"
        and "Contains Animations" not in info.get("tags", ())
    )


def _icons(content: Mapping[str, Any]) -> Iterator[Icon]:
    """The icons of a set, without aliases, which are second names of the same drawings."""
    prefix, info = content["prefix"], content["info"]
    words = without_style(content["icons"])
    for name, icon in content["icons"].items():
        box = {**content, **icon}
        frame = (float(box.get(key, 0)) for key in ("left", "top"))
        size = (float(box.get(key, 16)) for key in ("width", "height"))
        extra = {
            "set": prefix,
            "icon": name,
            "licence": info["license"]["spdx"],
            "author": info["author"]["name"],
        }
        svg = document(icon["body"], *frame, *size)
        yield Icon(FAMILY.get(prefix, prefix), words[name], svg, extra)


def _bare(words: Words) -> Words:
    return tuple(word for word in words if word not in AROUND_LOGOS)


def _brands(icons: Iterable[Icon], known: set[str]) -> set[str]:
    alone: defaultdict[str, set[str]] = defaultdict(set)  # name -> families
    within: defaultdict[str, set[str]] = defaultdict(set)
    for icon in icons:
        words = _bare(icon.words)
        for word in known.intersection(words):
            (within if len(words) > 1 else alone)[word].add(icon.family)
    return {word for word in known if len(within[word]) <= WITHIN * len(alone[word])}


def _logo(words: Words, brands: set[str]) -> bool:
    return "-".join(_bare(words)) in brands or not LOGO_WORDS.isdisjoint(words)
