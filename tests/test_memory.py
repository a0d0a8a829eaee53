"""The streaming engine never holds the m x m matrix: its memory, measured in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "loss_memory.py"
MIB = 2**20


def extra_bytes(m, loss):
    command = [sys.executable, str(BENCHMARK), "--m", str(m), "--d", "128", "--loss", loss]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return json.loads(out)["extra_bytes"]


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_forward_and_backward_at_16384_take_less_than_300_mib():
    assert extra_bytes(16_384, "multi_similarity") < 300 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize("loss", ["triplet", "histogram", "bin_lifted", "nca"])
def test_other_losses_take_no_more(loss):
    """At m = 8,192 the dense matrix is 256 MiB, and an engine that holds it needs several."""
    assert extra_bytes(8_192, loss) < 150 * MIB
