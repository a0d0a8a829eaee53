"""Cars-196 in each of its published forms; classes 1 to 98 are for training.

cars_annos.mat           with car_ims/ (all images in one folder, as used for retrieval)
cars_train_annos.mat     with cars_train/, cars_test/ and cars_test_annos_withlabels.mat
                         (the devkit; its own split is for classification, and is ignored)
NNN.CLASS/*.jpg          one folder per class, or a plain tar of these
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from shards.item import LARGEST_IMAGE, Collection, FileItem, Item, ShardError
from shards.sources.layout import need, need_folder, relative

TRAIN_CLASSES = 98
LAYOUTS = "cars_annos.mat with car_ims/, the devkit with cars_train/ and cars_test/, or NNN.CLASS/ folders"


@dataclass(frozen=True, kw_only=True)
class TarItem(Item):
    """A member of an uncompressed tar, read at its offset."""

    tar: Path
    offset: int
    size: int

    def encoded(self) -> bytes:
        if self.size > LARGEST_IMAGE:
            raise ShardError(
                f"has {self.size:,} bytes, more than the {LARGEST_IMAGE:,} of an image"
            )
        with self.tar.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


def _split(number: int) -> str:
    return "train" if number <= TRAIN_CLASSES else "test"


def _read_mat(path: Path, field: str) -> Any:
    try:
        import numpy as np
        from scipy.io import loadmat
    except ImportError:
        raise ShardError(f"{path} needs scipy to be read: pip install scipy") from None
    try:
        return np.atleast_1d(loadmat(path, squeeze_me=True)[field])
    except KeyError:
        raise ShardError(f"{path} has no {field}") from None
    # scipy raises many kinds of errors on damaged files
    except Exception as error:  # noqa: BLE001
        raise ShardError(f"{path} cannot be read as a .mat file ({error})") from None


def _annotated(root: Path, mat: Path, field: str, folder: str, names: Any) -> Iterator[Item]:
    """The images of one annotation file; `names` are the class names, starting with class 1."""
    annotations = _read_mat(mat, "annotations")
    if not {field, "class"} <= set(annotations.dtype.names or ()):
        raise ShardError(f"{mat} does not give {field} and class of each image")
    for text, number in zip(annotations[field], annotations["class"], strict=True):
        path = relative(f"{folder}{text}", str(mat))
        if not 1 <= int(number) <= len(names):
            raise ShardError(
                f"{mat}: {path} has class {number}, but only {len(names)} classes have names"
            )
        yield FileItem(
            split=_split(int(number)),
            class_name=f"{int(number):03d}.{names[int(number) - 1]}",
            name=str(path),
            path=root / path,
        )


def _devkit(root: Path) -> Iterator[Item]:
    devkit = next(d for d in (root, root / "devkit") if (d / "cars_train_annos.mat").exists())
    names = _read_mat(need(devkit / "cars_meta.mat", LAYOUTS), "class_names")
    labelled = "cars_test_annos_withlabels.mat"  # published beside the devkit, not in it
    test = devkit / labelled if (devkit / labelled).exists() else root / labelled
    yield from _annotated(root, devkit / "cars_train_annos.mat", "fname", "cars_train/", names)
    yield from _annotated(root, need(test, LAYOUTS), "fname", "cars_test/", names)


def _class_folder(path: PurePosixPath) -> tuple[str, str] | None:
    """(split, class) of .../NNN.CLASS/FILE, or None."""
    match = re.fullmatch(r"([0-9]{3})\..+", path.parent.name)
    return (_split(int(match[1])), match[0]) if match else None


def _tar(path: Path) -> Iterator[Item]:
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                name = relative(member.name, str(path))
                if member.isdir():
                    continue
                kind = _class_folder(name)
                if kind is None or member.type != tarfile.REGTYPE:
                    raise ShardError(f"{path}: the member {member.name!r} is not NNN.CLASS/IMAGE")
                yield TarItem(
                    split=kind[0],
                    class_name=kind[1],
                    name=str(name),
                    tar=path,
                    offset=member.offset_data,
                    size=member.size,
                )
    except (tarfile.TarError, OSError) as error:
        raise ShardError(f"{path} cannot be read as a plain tar ({error})") from None


def _folders(root: Path) -> Iterator[Item]:
    for path in sorted(root.glob("[0-9][0-9][0-9].*/*")):
        kind = _class_folder(PurePosixPath(path))
        if kind and not path.name.startswith("."):
            name = f"{kind[1]}/{path.name}"
            yield FileItem(split=kind[0], class_name=kind[1], name=name, path=path)


def collect(root: Path) -> Collection:
    if root.is_file():
        items = list(_tar(root))
    else:
        need_folder(root)
        if (root / "cars_annos.mat").exists():
            names = _read_mat(root / "cars_annos.mat", "class_names")
            mat = root / "cars_annos.mat"
            items = list(_annotated(root, mat, "relative_im_path", "", names))
        elif any(root.glob("cars_train_annos.mat")) or any(
            root.glob("devkit/cars_train_annos.mat")
        ):
            items = list(_devkit(root))
        else:
            inner = root / "cars196"
            items = list(_folders(inner if inner.is_dir() else root))
    if not items:
        raise ShardError(f"--root {root} has none of the layouts of Cars-196: {LAYOUTS}")
    return Collection(items, expected={"train": (98, 8054), "test": (98, 8131)})
