"""make setup with a Python that does not serve: one sentence, and the next attempt works."""

import shutil
import subprocess
import sys

import pytest
from fleet import ROOT

# What a command answers, by its arguments; {real} is this Python.
OLD = """case "$*" in --version) echo Python 3.8.10;; *) exit 1;; esac"""
WITHOUT_VENV = """case "$*" in
"-m venv .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python; echo no ensurepip; exit 1;;
*) exec {real} "$@";; esac"""
# its environment claims that everything is installed
GOOD = """case "$*" in
"-m venv .venv") mkdir -p .venv/bin; printf '#!/bin/sh\\n' > .venv/bin/python
  chmod +x .venv/bin/python; echo made >> made;;
*) exec {real} "$@";; esac"""


@pytest.fixture
def setup(tmp_path):
    """Runs make setup with a Python; returns its exit code and standard error."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)

    def run(script):
        python = tmp_path / "python3"
        python.write_text(f"#!/bin/sh\n{script.format(real=sys.executable)}\n")
        python.chmod(0o755)
        command = ["make", "setup", f"PYTHON={python}"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        said = [x for x in done.stderr.splitlines() if not x.startswith(("make: ", "make["))]
        return done.returncode, said

    run.folder = tmp_path
    return run


def test_an_old_python_is_named(setup):
    code, said = setup(OLD)
    assert code != 0
    (sentence,) = said
    assert "is Python 3.8.10, and dml needs Python 3.10 or newer; name another with" in sentence
    assert not (setup.folder / ".venv").exists()


def test_a_python_that_is_not_there(setup):
    code, said = setup("exit 127")
    assert code != 0
    assert "dml needs Python 3.10 or newer" in said[0]


def test_a_python_without_venv_leaves_nothing_behind(setup):
    code, said = setup(WITHOUT_VENV)
    assert code != 0
    (sentence,) = said
    assert "cannot make a virtual environment; on Debian, apt install python3-venv" in sentence
    assert not (setup.folder / ".venv").exists()


@pytest.mark.parametrize("half", ["", "#!/bin/sh\nexit 1\n"], ids=["without python", "without pip"])
def test_a_half_made_environment_is_made_anew(setup, half):
    left = setup.folder / ".venv" / "bin"
    left.mkdir(parents=True)
    if half:
        (left / "python").write_text(half)
        (left / "python").chmod(0o755)
    assert setup(GOOD) == (0, [])
    assert (setup.folder / ".venv" / ".ready").exists()
    (setup.folder / ".venv" / ".ready").unlink()
    assert setup(GOOD) == (0, [])
    assert (setup.folder / "made").read_text() == "made\n", "a whole one stays"
