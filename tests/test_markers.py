"""A test that starts what `make test-fast` leaves out must have the marker: tests/conftest.py."""

import subprocess
import sys

import pytest
from fleet import ROOT, ranks, start


@pytest.mark.parametrize(
    ("command", "env", "marker"),
    [
        (["python", "dml/train.py", "--config", "x.yaml"], None, "training"),
        (["bash", "-ec", "accelerate launch dml/train.py --config x.yaml"], None, "training"),
        (["accelerate", "launch", "who.py"], None, "processes"),
        (["python", "worker.py"], ranks(2)[1], "processes"),
        (["sbatch", "job.sh"], None, "slurm"),
    ],
)
def test_without_the_marker_nothing_starts(command, env, marker):
    with pytest.raises(pytest.fail.Exception, match=rf"give it @pytest\.mark\.{marker}"):
        subprocess.run(command, env=env, check=False)


def test_the_helpers_of_the_tests_are_no_exception():
    with pytest.raises(pytest.fail.Exception, match="test-fast"):
        start("team.py", 2)


def test_help_and_other_programs_may_start():
    for words in (["-c", "pass"], ["dml/train.py", "--help"]):
        command = [sys.executable, *words]
        assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0


@pytest.mark.processes
def test_with_a_marker_it_starts():
    assert (
        subprocess.run([sys.executable, "-c", "pass"], env=ranks(2)[0], check=False).returncode == 0
    )
