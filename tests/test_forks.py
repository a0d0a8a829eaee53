"""Forks in place of new interpreters: to those who look, they are the same."""

import json
import os
import signal
import sys
import time
from contextlib import suppress

import psutil
import pytest
from fleet import WORKERS, environment
from forks import Forked

pytestmark = pytest.mark.processes

# tells what it is, and then waits
CHILD = """
import json, os, sys, time
import hooked
print(json.dumps({
    "argv": sys.argv[1:], "mark": os.environ["MARK"], "hook": hooked.found, "cwd": os.getcwd(),
    "session": os.getsid(0), "said": os.read(int(sys.argv[1]), 9).decode(),
}), flush=True)
time.sleep(60)
"""
# starts it with a file, a folder, an environment and a session of its own, and passes its end on
LAUNCHER = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: child.terminate())
read, write = os.pipe()
os.write(write, b"some text")
env = {**os.environ, "MARK": "of the child"}
command = [sys.executable, "-u", os.environ["CHILD"], str(read), "a word"]
child = subprocess.Popen(command, env=env, cwd="below", pass_fds=[read], start_new_session=True)
sys.exit(-child.wait())
"""


@pytest.fixture
def started(tmp_path):
    """A launcher, its child, and what the child says of itself."""
    (tmp_path / "below").mkdir()
    for name, text in {
        "child.py": CHILD,
        "launcher.py": LAUNCHER,
        "hooked.py": "found = None",
        "sitecustomize.py": "import hooked\nhooked.found = 'of the child'",
    }.items():
        (tmp_path / name).write_text(text)
    env = environment(CHILD=str(tmp_path / "child.py"), MARK="of the launcher")
    env["PYTHONPATH"] = f"{tmp_path}:{env['PYTHONPATH']}"
    out, err = tmp_path / "out", tmp_path / "err"
    command = [WORKERS / "launching.py", tmp_path / "launcher.py"]
    launcher = Forked(command, tmp_path, env, out, err)
    deadline = time.monotonic() + 100
    while not (out.exists() and out.read_text().endswith("\n")):
        assert launcher.poll() is None, err.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (child,) = psutil.Process(launcher.pid).children()
    yield launcher, child, json.loads(out.read_text())
    launcher.kill()
    with suppress(psutil.NoSuchProcess):
        child.kill()


def test_a_child_of_a_fork_has_what_it_was_given(started, tmp_path):
    _, child, told = started
    assert told["argv"][1:] == ["a word"]
    assert (told["mark"], told["hook"], told["said"]) == (
        "of the child",
        "of the child",
        "some text",
    )
    assert told["cwd"] == str(tmp_path / "below")
    assert told["session"] == child.pid


def test_a_fork_shows_its_command_and_its_environment(started, tmp_path):
    launcher, child, _ = started
    top = psutil.Process(launcher.pid)
    assert top.cmdline()[:3] == [
        *(sys.executable, str(WORKERS / "launching.py")),
        str(tmp_path / "launcher.py"),
    ]
    assert child.cmdline()[:2] == [sys.executable, str(tmp_path / "child.py")]
    assert (top.environ()["MARK"], child.environ()["MARK"]) == ("of the launcher", "of the child")
    assert "ROOM" not in child.environ()


def test_a_signal_ends_a_child_of_a_fork_and_its_code_is_passed_on(started):
    launcher, child, _ = started
    os.kill(launcher.pid, signal.SIGTERM)
    assert launcher.wait(100) == signal.SIGTERM
    assert not child.is_running()


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('a sentence')", 1, "a sentence\n"),
        ("import os; os._exit(4)", 4, ""),
        ("import atexit, sys; atexit.register(sys.stderr.write, 'late')", 0, "late"),
        (
            "import sys, threading\nthreading.Timer(0.1, sys.stderr.write, ['later']).start()",
            *(0, "later"),
        ),
        ("raise KeyError(3)", 1, "KeyError: 3\n"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
    ],
)
def test_a_fork_ends_as_a_script_does(text, code, said, tmp_path):
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(text)
    assert Forked([script], tmp_path, environment(), os.devnull, out).wait(100) == code
    assert out.read_text().endswith(said)
    assert bool(out.read_text()) == bool(said)
