"""The npm package `@iconify/json`: some 240 icon sets, each a json file with its licence and author.

Left out are sets of logos, of emoji, in colour, animated, or under a licence that asks for more
than the author's name; and, from the others, the icons that are logos."""

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
# Sets of logos whose category does not say so
LOGO_SETS = "academicons file-icons devicon devicon-line devicon-plain fa-brands fa6-brands"
LOGO_WORDS = frozenset(["brand", "brands", "logo", "logos"])
AROUND_LOGOS = frozenset(["circle", "square", "social", "brand", "logo"])
# A name is a brand's when BRAND logo sets draw it and few families use it within longer names, at
# most WITHIN as many as draw it alone: apple, wechat, but not target (0.6), link (0.8), box (1.3)
BRAND, WITHIN = 5, 0.55

# Sets by the same hands, or redrawn from one another. Any other set is a family of its own.
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
MAX_SET_BYTES = 200 << 20  # the largest takes 25 MB


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
    """The icons of the package, an npm tgz or its unpacked folder, by set and name."""
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
    """set -> its title, author, licence and where they are to be found."""
    return {content["prefix"]: content["info"] for _, content in _sets(root)}


def _sets(root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, text in sorted(_files(root)):
        try:
            yield name, json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ShardError(f"{root}: {name} is not an icon set: {error!r}") from None


def _files(root: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of every json/*.json. Nothing is unpacked to the disk."""
    if root.is_dir():
        folder = root / "package" if (root / "package").is_dir() else root
        yield from ((path.name, path.read_bytes()) for path in folder.glob("json/*.json"))
        return
    try:
        with tarfile.open(root) as tar:
            for member in tar:
                if member.isfile() and PurePosixPath(member.name).match("json/*.json"):
                    if member.size > MAX_SET_BYTES:
                        raise ShardError(f"{root}: {member.name} has {member.size:,} bytes")
                    file = tar.extractfile(member)
                    assert file is not None  # for a regular file there is one
                    yield PurePosixPath(member.name).name, file.read()
    except (OSError, EOFError, tarfile.TarError) as error:
        raise ShardError(f"{root}: not the package @iconify/json: {error}") from None


def _wanted(info: Mapping[str, Any]) -> bool:
    return (
        info["license"].get("spdx") in LICENCES.split()
        and not info.get("palette")
        and info.get("category") != "Emoji"
        and "Contains Animations" not in info.get("tags", ())
    )


def _icons(content: Mapping[str, Any]) -> Iterator[Icon]:
    """Aliases are left out: they are second names for drawings that are there already."""
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
    alone: defaultdict[str, set[str]] = defaultdict(set)  # by these families
    within: defaultdict[str, set[str]] = defaultdict(set)
    for icon in icons:
        words = _bare(icon.words)
        for word in known.intersection(words):
            (within if len(words) > 1 else alone)[word].add(icon.family)
    return {word for word in known if len(within[word]) <= WITHIN * len(alone[word])}


def _logo(words: Words, brands: set[str]) -> bool:
    return "-".join(_bare(words)) in brands or not LOGO_WORDS.isdisjoint(words)
