"""Freed memory is used again without a page fault."""

import subprocess
import sys

import pytest
from fleet import ROOT, start_each
from PIL import Image

PROGRAM = """
import resource, sys
import numpy as np
from dml.distributed.malloc import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if sys.argv[1] == "keeping":
    keep_freed_memory()
for _ in range(3):
    before = faults()
    piece = np.ones(6_000_000)  # 48 MB, 11,719 pages
    del piece
    new = faults() - before
print(new)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_freed_memory_is_used_again():
    new = {}
    for how in ("keeping", "default"):
        command = [sys.executable, "-c", PROGRAM, how]
        new[how] = int(subprocess.run(command, cwd=ROOT, check=True, stdout=-1).stdout)
    assert new["keeping"] < 100
    assert new["default"] > 10 * new["keeping"], "the setting gains nothing here"


EMBED_TWICE = """
import resource, sys
from dml.embed import main

for out in ("first", "second"):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    options = ["--features", "--out", out, "--size", "64", "--batch", "32", "--workers", "0"]
    assert main(["efficientnet_lite0", "album", *options]) == 0
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_embedding_uses_freed_memory_again(tmp_path):
    """One layer of a batch of 32 images takes 12.6 MB, 3,072 pages; without the setting 20,000 and more are new."""
    (tmp_path / "album").mkdir()
    for i in range(64):
        Image.new("RGB", (64, 64), (i, 0, 0)).save(tmp_path / "album" / f"{i}.png")
    script = tmp_path / "embed_twice.py"
    script.write_text(EMBED_TWICE)
    (ended,) = start_each([script], [{}], 100, tmp_path)
    assert ended.returncode == 0, ended.stderr
    *_, second = (int(line) for line in ended.stdout.splitlines() if line.isdigit())
    assert second < 10_000
