"""Every command in the docs is run, or for make is shown to be a target."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands():
    for doc in DOCS:
        for block in re.findall(r"^```bash\n(.*?)^```", doc.read_text(), re.M | re.S):
            for line in block.splitlines():
                command = line.split("#")[0].strip()
                if command:
                    yield pytest.param(command, id=f"{doc.name}: {command}")


@pytest.mark.parametrize("command", commands())
def test_command(command):
    words = shlex.split(command)
    if words[0] == "make":  # the tests are themselves run by make, so no deeper than the dry run
        assert words[1] != "demo", "not there yet: the docs may not promise it"
        run = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
    elif words[0] in ("python", ".venv/bin/python"):
        run = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True)
    else:
        pytest.fail(f"a command no test can run: {command}")
    assert run.returncode == 0, run.stderr
