"""Print the authors and licences of the icons in a folder of shards, as Markdown:

python shards/attribution.py shards/bundled/icons-mini --root iconify-json-2.2.535.tgz
"""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file: Python put shards/ on the path, but imports start above it
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shards.index import Index, load_index
from shards.item import ShardError
from shards.output import exit_code
from shards.sources.icons_package import infos

HEAD = """\
# Attribution

{images:,} icons of {sets} sets, drawn in black at a small size; nothing else was changed. The json file of
each icon in the tars gives its set, name, author and licence. The icons come from the npm package
`@iconify/json`, which collects them from the sets' own repositories.

The authors hold the copyright. The texts of Apache-2.0 and ISC are in the files beside this one. The
text of MIT is in LICENSE at the root of the project, to be read with the author's name. CC0 gives up
all rights (https://spdx.org/licenses/CC0-1.0).

| set | author | licence | icons |
|---|---|---|--:|
"""


def sets_in(index: Index) -> Counter[str]:
    """The number of images of every icon set."""
    count = Counter[str]()
    for path in index.shards:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                if member.name.endswith(".json"):
                    file = tar.extractfile(member)
                    assert file is not None  # None only for members that are not regular files
                    count[json.load(file)["extra"]["set"]] += 1
    return count


def attribution(index: Index, root: Path) -> str:
    count, about = sets_in(index), infos(root)
    text = HEAD.format(images=sum(count.values()), sets=len(count))
    for prefix, images in sorted(count.items()):
        info = about[prefix]
        author, licence = info["author"], info["license"]
        text += f"| {info['name']} (`{prefix}`) | {link(author['name'], author.get('url'))} "
        text += f"| {link(licence['spdx'], licence.get('url'))} | {images} |\n"
    return text


def link(text: str, url: str | None) -> str:
    return f"[{text}]({url})" if url else text


def main(argv: Sequence[str] | None = None) -> int:
    about = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="shards/attribution.py", description=about)
    parser.add_argument("shards", type=Path, help="a folder made by shards/build.py from icons")
    parser.add_argument("--root", type=Path, required=True, help="the package they were built from")
    args = parser.parse_args(argv)
    try:
        print(attribution(load_index(args.shards), args.root), end="")
    except (ShardError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
