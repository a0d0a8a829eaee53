"""Programs whose reader leaves early, as in `... | head`. Oracle: the exit code, and no traceback."""

import os
import subprocess
import sys

import pytest
from fleet import ROOT
from pictures import make_folder

ICONS = "shards/bundled/icons-mini"


def without_reader(*command):
    """Exit code and standard error of a program whose output goes to a pipe that is closed."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # buffered, so that the output of --help is written when the program flushes it at its end
    env = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    with subprocess.Popen([sys.executable, *command], cwd=ROOT, env=env, **pipes) as process:
        process.stdout.close()
        said = process.stderr.read()
    return process.returncode, said


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "dml.plan", "--config", "configs/icons_mini.yaml"],
        ["-m", "dml.plan", "--help"],
        ["shards/build.py", "--help"],
        ["shards/sheet.py", "--help"],
        ["shards/attribution.py", "--help"],
    ],
    ids=" ".join,
)
def test_a_closed_pipe_is_no_error(command):
    assert without_reader(*command) == (0, "")


def test_a_build_is_complete_all_the_same(tmp_path):
    root, out = make_folder(tmp_path / "in"), tmp_path / "out"
    command = ["shards/build.py", "folder", "--root", root, "--out", out, "--workers", "1"]
    assert without_reader(*command) == (0, "")
    assert (out / "manifest.json").exists()


def test_problems_that_nobody_read_are_not_a_success():
    assert without_reader("shards/verify.py", ICONS, "--workers", "1") == (1, "")


def test_an_error_keeps_its_exit_code():
    code, said = without_reader("-m", "dml.plan", "--config", "nowhere.yaml")
    assert code == 2
    assert "nowhere.yaml" in said
