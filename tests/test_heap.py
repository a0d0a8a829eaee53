"""Freed memory is used again without a page fault."""

import subprocess
import sys

import pytest
from fleet import ROOT

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
