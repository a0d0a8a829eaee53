"""Inputs made to do harm, each drawn from random numbers: configs, shards, weights, images, embeddings.

Each function writes into a folder and returns what it made and a word about it.
"""

import hashlib
import io
import json
import os
import pickle
import random
import shutil
import struct
from pathlib import Path

import numpy as np
import torch
import yaml
from pictures import encode
from safetensors.torch import save

from chaos.faults import damage
from dml.config.sections import KEYS
from shards.index import manifest_sha256

NUMBERS = (0, -1, 1, 2**31, 2**63, 10**30, 0.5, -0.0, 1e-300, 1e300, float("nan"), float("inf"))
WORDS = (
    "",
    " ",
    ".",
    "..",
    "/",
    "../../x",
    "a\0b",
    "\ud800",
    "é" * 300,
    "x" * 100_000,
    "~",
    "-",
    "null",
)
WORDS += (
    "[",
    "{",
    "!!python/object/apply:os.system ['true']",
    "&a [*a]",
    "2020-01-01",
    "0x1f",
    "1_0",
)
DIGITS = "9" * 5000


def value(rng: random.Random) -> object:
    plain = [rng.choice(NUMBERS), rng.choice(WORDS), None, True, rng.randrange(-5, 5)]
    return rng.choice([*plain, [rng.choice(NUMBERS)], [rng.choice(WORDS)] * 3, {"a": {"b": []}}])


# ---- configs --------------------------------------------------------------------------------------


def config(folder: Path, rng: random.Random, base: Path) -> tuple[list[str], str]:
    """The arguments of a program that takes a config."""
    path = folder / "hostile.yaml"
    ways = [laughing, wide, deep, doubling, noise, by_set, one_value, one_value, one_value]
    way = rng.choice(ways)
    way(path, rng, base)
    key = rng.choice([*KEYS, "x.y", "", "run", "=", "a.b.c"])
    sets = [f"{key}={text(rng)}"] if way is by_set else []
    words = ["--config", str(path), *(["--set", *sets] if sets else [])]
    return words, f"{way.__name__} {' '.join(sets)[:80]!r}"


def text(rng: random.Random) -> str:
    """As a shell can pass it: without NUL, with bytes that are not UTF-8."""
    found = rng.choice([str(value(rng)), DIGITS, "\udcff\udc80", "[" * 3000, "*a", "{a: &b [*b]}"])
    return found.replace("\0", "").replace("\ud800", "\udcff")


def by_set(path: Path, rng: random.Random, base: Path) -> None:
    """The harm is done by --set."""
    path.write_text(f"extends: {base}\n")


def setting(rng: random.Random) -> str:
    """A value of a key: mostly a number, which may even be in order."""
    number = rng.choice([*NUMBERS, *range(2, 40), 10**5, 10**7])
    return text(rng) if rng.random() < 0.2 else str(number)


def laughing(path: Path, rng: random.Random, base: Path) -> None:
    """Ten aliases of ten aliases of ..."""
    key, lines = rng.choice(KEYS), ["a0: &a0 [lol, lol]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    section, name = key.split(".")
    path.write_text("\n".join([*lines, f"{section}: {{{name}: *a11}}"]))


def wide(path: Path, rng: random.Random, base: Path) -> None:
    count = rng.choice([1000, 20_000])
    path.write_text(f"extends: {base}\nrun: {{{', '.join(f'k{n}: {n}' for n in range(count))}}}\n")


def deep(path: Path, rng: random.Random, base: Path) -> None:
    count, (left, right) = rng.choice([100, 2000, 50_000]), rng.choice(["[]", ("{a: ", "}")])
    path.write_text(f"run: {left * count}{right * count}\n")


def doubling(path: Path, rng: random.Random, base: Path) -> None:
    """Every file extends the next one twice."""
    count = rng.choice([5, 30])
    for n in range(count):
        following = path.name if rng.random() < 0.05 else f"{n + 1}.yaml"
        (path.parent / f"{n}.yaml").write_text(f"extends: [{following}, {following}]\n")
    (path.parent / f"{count}.yaml").write_text(f"extends: {base}\n")
    path.write_text("extends: 0.yaml\n")


def noise(path: Path, rng: random.Random, base: Path) -> None:
    text = base.read_text().replace("extends: ", f"extends: {base.parent}/")
    path.write_text(text)
    damage(path, rng)
    if not path.exists():
        path.write_bytes(rng.randbytes(rng.randrange(5000)))


def one_value(path: Path, rng: random.Random, base: Path) -> None:
    section, name = rng.choice([*KEYS, "loss.name", "loss.alpha"]).split(".")
    given = value(rng)
    if rng.random() < 0.2:
        path.write_text(f"extends: {base}\n{section}: {{{name}: {DIGITS}}}\n")
    else:
        tree = {"extends": str(base), section: {name: given}}
        path.write_text(yaml.safe_dump(tree), errors="surrogatepass")


# ---- shards ---------------------------------------------------------------------------------------


def shards(folder: Path, rng: random.Random, good: Path) -> str:
    """Shards whose manifest, index or tars lie, with true checksums: only the content is wrong."""
    shutil.copytree(good, folder)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    rows = np.load(folder / "index.npy")
    way = rng.choice(["manifest", "manifest", "rows", "header", "sparse", "link", "nested"])
    if way == "manifest":
        place = rng.choice([manifest, manifest["splits"]["train"], manifest["shards"][0]])
        key = rng.choice(sorted(place))
        place[key] = value(rng)
        way = f"{key} = {str(place[key])[:60]!r}"
    elif way == "rows":
        rows[rng.choice(["split", "label", "shard", "offset", "size"])][
            rng.randrange(len(rows))
        ] = rng.choice([0, 1, 100, 2**7 - 1])
    elif way == "sparse":
        os.truncate(folder / manifest["shards"][0]["name"], rng.choice([2**40, 2**33]))
    elif way == "link":
        tar = folder / manifest["shards"][0]["name"]
        tar.unlink()
        tar.symlink_to(rng.choice(["/dev/zero", "/dev/null", "/proc/self/mem", tar.name, "/"]))
    data = as_npy(rows)
    if way == "header":
        data = huge_header(rng)
    manifest["index"] = {"sha256": hashlib.sha256(data).hexdigest()}
    (folder / "index.npy").write_bytes(data)
    manifest["sha256"] = manifest_sha256(manifest)
    tree = json.dumps(manifest)
    if way == "nested":
        tree = tree.replace('"notes"', f'"x": {"[" * 100_000}, "notes"')
    (folder / "manifest.json").write_text(tree, errors="surrogatepass")
    return way


def as_npy(x: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, x, allow_pickle=True)
    return file.getvalue()


def huge_header(rng: random.Random) -> bytes:
    """An npy file that promises too much, or whose header is a program."""
    shape = rng.choice(
        ["(10**12,)", "(1000000000000,)", "(-1,)", "(" + "9" * 5000 + ",)", "x" * 60_000]
    )
    kind = rng.choice(["<f4", "|O", "<f8", "<U999999999"])
    head = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(head)) + head + bytes(64)


# ---- weights --------------------------------------------------------------------------------------


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


def weights(folder: Path, rng: random.Random, good: Path, trap: Path) -> tuple[Path, str]:
    """A file for model.weights. trap: exists afterwards if the file was unpickled."""
    state = {k: v.clone() for k, v in torch_load(good).items()}
    key = rng.choice(sorted(state))
    way = rng.choice(
        ["evil", "evil torch", "shape", "type", "nan", "name", "header", "noise", "sparse"]
    )
    path = folder / ("hostile.pth" if way.startswith("evil") else "hostile.safetensors")
    if way == "evil":
        path.write_bytes(pickle.dumps({key: Evil(trap)}))
    elif way == "evil torch":
        torch.save({**state, key: Evil(trap)}, path)
    elif way == "noise":
        path.write_bytes(good.read_bytes())
        damage(path, rng)
    elif way == "header":
        path.write_bytes(struct.pack("<Q", rng.choice([0, 7, 10**9, 2**63])) + rng.randbytes(200))
    elif way == "sparse":
        path.touch()
        os.truncate(path, 2**40)
    else:
        if way == "shape":
            state[key] = torch.zeros(rng.choice([(0,), (1,), (3, 3, 3, 3)]))
        elif way == "type":
            state[key] = state[key].to(rng.choice([torch.int8, torch.float16, torch.bool]))
        elif way == "nan":
            state[key] = torch.full_like(
                state[key].float(), rng.choice([float("nan"), float("inf")])
            )
        else:
            state[rng.choice(["x" * 10_000, "", "\0", "backbone."])] = state.pop(key)
        path.write_bytes(save(state))
    return path, f"{way} {key}"


def torch_load(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


# ---- images and embeddings ------------------------------------------------------------------------


def images(folder: Path, rng: random.Random, count: int = 20) -> str:
    """Images of which most are damaged, lie about their size, or have odd names."""
    for n in range(count):
        kind = rng.choice(["JPEG", "PNG"])
        data = bytearray(encode(rng.randrange(10**6), kind, rng.choice(["RGB", "L"])))
        way = rng.choice(["good", "bits", "cut", "bomb", "noise", "empty", "fifo"])
        if way == "bits":
            for _ in range(rng.randrange(1, 30)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif way == "cut":
            del data[rng.randrange(len(data)) :]
        elif way == "bomb" and kind == "PNG":
            data[16:24] = struct.pack(">II", rng.choice([2**31 - 1, 50_000]), 50_000)
        elif way == "noise":
            data = bytearray(rng.randbytes(500))
        elif way == "empty":
            data = bytearray()
        name = rng.choice([f"{n}", f"{n} é", f"{n}\udcff", f"{n}\n", f"-{n}", f"{n}{'x' * 200}"])
        label = f"class{rng.randrange(3)}"
        path = folder / label / f"{name}.{rng.choice(['jpg', 'png'])}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if way == "fifo" and rng.random() < 0.3:
            path.symlink_to(rng.choice([path.name, "/dev/zero", "missing", ".."]))
        else:
            path.write_bytes(data)
    return f"{count} images"


def embeddings(folder: Path, rng: random.Random, good: Path) -> str:
    """A folder of embeddings of which one file is hostile."""
    shutil.copytree(good, folder)
    way = rng.choice(["noise", "header", "nan", "nested", "lines", "info"])
    if way == "noise":
        return damage(folder / rng.choice(["embeddings.npy", "index.jsonl", "info.json"]), rng)
    if way == "header":
        (folder / "embeddings.npy").write_bytes(huge_header(rng))
    elif way == "nan":
        X = np.load(folder / "embeddings.npy")
        X[rng.randrange(len(X)), 0] = rng.choice([np.nan, np.inf, 1e30])
        np.save(folder / "embeddings.npy", X)
    elif way == "info":
        info = json.loads((folder / "info.json").read_bytes())
        key = rng.choice(sorted(info))
        info[key] = value(rng)
        (folder / "info.json").write_text(json.dumps(info))
        way = f"info.json: {key} = {str(info[key])[:60]!r}"
    else:
        lines = (folder / "index.jsonl").read_text().splitlines()
        image = rng.choice(["../../secret", "/etc/passwd", "a\0b", "\ud800", "x" * 5000, ""])
        odd = json.dumps({"image": rng.choice([image, 7, None]), "class": value(rng)})
        lines[rng.randrange(len(lines))] = "[" * 100_000 if way == "nested" else odd
        (folder / "index.jsonl").write_text("\n".join(lines))
    return way
