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
        for block in re.findall(r"^```bash\n(.*?)^```", doc.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.splitlines():
                command = line.split("#")[0].strip()
                if command:
                    yield pytest.param(command, id=f"{doc.name}: {command}")


@pytest.mark.parametrize("command", list(commands()))
def test_command(command):
    words = shlex.split(command)
    if words[0] == "make":  # the tests are themselves run by make, so no deeper than the dry run
        words.insert(1, "-n")
    elif words[0] in ("python", ".venv/bin/python"):
        words[0] = sys.executable
    else:
        pytest.fail(f"a command no test can run: {command}")
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
