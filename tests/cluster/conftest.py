"""One Slurm for all tests here. In CI it must be there: nothing is skipped silently."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # fleet, whichever tests run

from two_nodes import TwoNodes, missing


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    reason = missing()
    if reason and os.environ.get("CI"):
        pytest.fail(f"CI must run these tests: {reason}")
    if reason:
        pytest.skip(reason)
    with TwoNodes(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
