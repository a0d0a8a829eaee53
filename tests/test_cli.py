"""The command `dml`: one door to the programs, and the launcher of a training on one machine."""

import fcntl
import os
import pty
import resource
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import psutil
import pytest
from fleet import ROOT, WORKERS, environment
from forks import Forked
from runs import BASE, ICONS, checkpoints, content, losses, train

from dml.cli import main as door
from dml.cli import train as command
from dml.cli.main import COMMANDS
from dml.cli.ranks import conclude
from dml.train import CRASHED, DIVERGED, FINISHED, INTERRUPTED, MISTAKE

DML = [sys.executable, "-m", "dml.cli"]
KILLED = -signal.SIGKILL


@pytest.fixture(autouse=True)
def same_ctrl_c():
    """`dml train` changes what Ctrl-C does in its process; here that is the process of all tests."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def dml(*words, **options):
    return subprocess.run(
        [*DML, *map(str, words)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        **options,
    )


# ---- the door --------------------------------------------------------------------------------------


def test_help_lists_every_command_with_a_line(capsys):
    assert door.main(["--help"]) == 0
    said = capsys.readouterr().out
    for name, each in COMMANDS.items():
        assert f"  {name} " in said
        assert each.about in said
    assert door.main([]) == 0
    assert capsys.readouterr().out == said


def test_shards_alone_lists_its_commands(capsys):
    assert door.main(["shards"]) == 0
    said = capsys.readouterr().out
    assert "shards build" in said
    assert "search" not in said


@pytest.mark.parametrize(
    ("words", "close"),
    [
        (["trian"], "; did you mean train?"),
        (["shards", "biuld"], "; did you mean shards build?"),
        (["--hlep"], "; choose one of these"),
    ],
)
def test_an_unknown_command_is_refused_by_name(words, close, capsys):
    assert door.main(words) == 2
    assert f"dml: there is no command {' '.join(words)}{close}" in capsys.readouterr().err


def test_the_version_is_that_of_the_package(capsys):
    import dml as package

    assert door.main(["--version"]) == 0
    assert capsys.readouterr().out == f"dml {package.__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_is_that_of_its_program(name):
    """By the name that was typed, and without torch."""
    without = "import sys; sys.modules['torch'] = None; from dml.cli.main import main; "
    code = f"{without} main([*{name.split()}, '--help'])"
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(f"usage: dml {name} ")
    assert ended.stderr == ""


@pytest.mark.parametrize(
    "words", [["--help"], ["plan", "--config", "sop", "--processes", "8"], ["train", "--help"]]
)
def test_what_needs_no_torch_is_quick(words, tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert dml(*words, cwd=tmp_path).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3


def test_a_program_complains_by_the_name_that_was_typed(tmp_path):
    assert dml("report", "nowhere", "--out", "x", cwd=tmp_path).stderr.startswith("dml report: ")
    said = dml("sweep", "--sweep", "nowhere.yaml", cwd=tmp_path).stderr
    assert said.startswith("dml sweep: ")
    assert str(tmp_path / "nowhere.yaml") in said


# ---- checked before anything is started ------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "sentence"),
    [
        (["batch.classes=15"], "45 images are not divisible by 2 processes"),
        (["loss.betta=1"], "did you mean beta?"),
        (["data.shards=none"], "data.shards = none (HERE/none): there are no shards"),
        (
            ["model.weights=w.pth"],
            "model.weights = w.pth (HERE/w.pth): there is no such file; fix the path",
        ),
    ],
)
def test_a_mistake_is_a_sentence_before_any_process(sets, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "launch", lambda *_: pytest.fail("processes were started"))
    assert command.main([*BASE, *sets, "--processes", "2"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("dml/train.py: ")
    assert sentence.replace("HERE", str(tmp_path)) in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["0", "-1", "two", "1e3", "1001", ""])
def test_a_number_of_processes_that_is_none(text, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main([*BASE, "--processes", text])
    assert ended.value.code == 2
    assert "is neither a number from 1 to 1000 nor auto" in capsys.readouterr().err


@pytest.mark.parametrize(("gpus", "expected"), [(8, 8), (2, 2)])
def test_auto_is_one_process_per_gpu(gpus, expected, monkeypatch):
    started = []
    monkeypatch.setattr("dml.plan.count_gpus", lambda: gpus)
    monkeypatch.setattr(command, "launch", lambda argv, *more: started.append(more) or 0)
    assert command.main([*BASE, "--processes", "auto"]) == 0
    assert started == [(expected, {})]


@pytest.mark.parametrize("words", [[], ["--processes", "1"], ["--processes", "auto"]])
def test_one_process_is_this_one(words, monkeypatch):
    monkeypatch.setattr("dml.plan.count_gpus", lambda: 0)
    monkeypatch.setattr(command, "launch", lambda *_: pytest.fail("a process was started"))
    monkeypatch.setattr(command, "run", lambda arguments: 42)
    assert command.main([*BASE, *words]) == 42


def test_deepspeed_that_is_not_installed_is_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert command.main([*BASE, "--processes", "2", "--deepspeed", "zero2"]) == 2
    assert (
        "deepspeed is not installed; pip install deepspeed transformers ninja"
        in capsys.readouterr().err
    )


# ---- how it ended ----------------------------------------------------------------------------------

TRACE = "Traceback (most recent call last)\n  ...\n"
LOST = f"{TRACE}RuntimeError: Connection closed by peer [127.0.0.1]:1234"


@pytest.mark.parametrize(
    ("codes", "accounts", "asked", "expected"),
    [
        ({0: 0, 1: 0}, ["", ""], None, (FINISHED, None)),
        ({1: 2, 0: 2}, ["", ""], None, (MISTAKE, None)),
        ({1: 3, 0: 3}, ["", ""], None, (DIVERGED, None)),
        ({1: 75, 0: 75}, ["", ""], signal.SIGTERM, (INTERRUPTED, None)),
        # a process that fails is the reason, not those that lose it, whoever is seen first
        ({1: KILLED, 0: 1}, [LOST, ""], None, (CRASHED, "process 1 was ended by SIGKILL")),
        ({0: 1, 1: KILLED}, [LOST, ""], None, (CRASHED, "process 1 was ended by SIGKILL")),
        ({0: 1, 1: 1}, [LOST, f"{TRACE}KeyError: 3"], None, (CRASHED, "process 1 failed:\nTraceb")),
        ({1: 1, 0: 1}, [f"{TRACE}KeyError: 3", LOST], None, (CRASHED, "process 0 failed:\nTraceb")),
        ({0: -6, 1: 1}, ["", f"noise\n{TRACE}KeyError: 3"], None, (CRASHED, "process 0 was ended")),
        # the others had to be killed
        ({1: 1}, ["", f"noise\n{TRACE}KeyError: 3"], None, (CRASHED, "process 1 failed:\nTraceb")),
        # its own sentence, which the first process has written to the terminal
        (
            {1: 1, 0: 1},
            [LOST, "x\ndml train: too little"],
            None,
            (CRASHED, "process 1: too little"),
        ),
        ({0: 1, 1: 1}, ["", LOST], None, (CRASHED, None)),
        ({1: 2}, ["", "sentence"], None, (MISTAKE, "process 1 ended with code 2\nsentence")),
        # before there is a handler the signal itself ends a process
        ({1: -2, 0: 1}, [LOST, ""], signal.SIGINT, (INTERRUPTED, "stopped by SIGINT before the")),
        ({1: -15, 0: 75}, ["", ""], signal.SIGTERM, (INTERRUPTED, "stopped by SIGTERM before")),
        ({1: 0, 0: 75}, ["", ""], signal.SIGTERM, (INTERRUPTED, None)),
        # a checkpoint that could not be written after the signal
        ({1: 2, 0: 2}, ["", ""], signal.SIGTERM, (MISTAKE, None)),
    ],
)
def test_how_the_processes_ended(codes, accounts, asked, expected):
    code, text = conclude(codes, accounts, asked)
    assert code == expected[0]
    assert (text or "").startswith(expected[1] or "")
    assert (text is None) == (expected[1] is None)


# ---- real processes --------------------------------------------------------------------------------


class Training:
    """`dml train --processes 2`, in a process group of its own as in a terminal."""

    def __init__(self, folder, *sets, rank=None, code="", words=(), forked=True):
        """code: Python that the process of rank `rank` runs before all else. forked: False if the
        imports matter."""
        folder.mkdir(exist_ok=True)
        hooks = folder / "hooks"
        hooks.mkdir(exist_ok=True)
        indented = "\n    ".join(code.splitlines())
        (hooks / "sitecustomize.py").write_text(
            f"import os\nif os.environ.get('RANK') == {rank!r}:\n    {indented or 'pass'}\n"
        )
        variables = environment()
        variables["PYTHONPATH"] = f"{hooks}:{variables['PYTHONPATH']}"
        self.run, self.out, self.err = folder / "icons_mini", folder / "out", folder / "err"
        words = ["train", "--processes", "2", *words, *BASE, f"run.dir={folder}", *sets]
        for path in (self.out, self.err):
            path.write_text("")
        if forked:
            program = [WORKERS / "launching.py", ROOT / "dml/cli/__main__.py", *words]
            self.process = Forked(program, folder, variables, self.out, self.err)
        else:
            with self.out.open("a") as out, self.err.open("a") as err:
                self.process = subprocess.Popen(
                    [*DML, *words],
                    cwd=folder,
                    env=variables,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
        self.top = psutil.Process(self.process.pid)

    @property
    def ranks(self):
        """The processes, by rank."""
        found = {each.environ().get("RANK"): each for each in self.top.children()}
        return [found[rank] for rank in ("0", "1") if rank in found]

    def until(self, ready, seconds=100):
        deadline = time.monotonic() + seconds
        while not ready():
            assert self.process.poll() is None, self.err.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return self

    def until_step(self, step):
        return self.until(
            lambda: (self.run / "metrics.jsonl").exists() and len(losses(self.run)) >= step
        )

    def end(self, family=(), timeout=100):
        """The exit code; nothing of the family is left."""
        try:
            code = self.process.wait(timeout)
        finally:
            if self.process.poll() is None:
                self.process.kill()
        _, alive = psutil.wait_procs(family, timeout=10)
        for each in alive:
            each.kill()
        assert not alive
        return code

    @property
    def said(self):
        return self.err.read_text()


training = pytest.mark.training


@training
def test_two_processes_train_as_two_of_any_launcher(tmp_path):
    run = Training(tmp_path / "cli", "length.steps=6")
    assert run.end() == 0, run.said
    assert "processes                  2" in run.out.read_text()
    assert content(run.run) == content(train(2, tmp_path / "plain", "length.steps=6"))


@training
def test_a_mistake_of_one_process_is_its_sentence_and_nothing_else(tmp_path):
    """The shards are missing where the second process looks for them."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "shards").symlink_to(ICONS)
    away = f"os.chdir({str(tmp_path)!r})"
    run = Training(folder, "data.shards=shards", rank="1", code=away)
    assert run.end() == 2
    assert run.said == f"dml train: {tmp_path}/shards is not there: make it with shards/build.py\n"
    assert run.out.read_text() == ""


CRASH = """import dml.training
def crash(*_):
    {error}
dml.training.learning_rate = crash"""


@training
@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_unexpected_error_is_one_traceback(rank, tmp_path):
    code = CRASH.format(error='raise RuntimeError("nobody foresaw this")')
    run = Training(tmp_path, rank=rank, code=code)
    assert run.end() == 1
    assert run.said.startswith(f"dml train: process {rank} failed:\nTraceback")
    assert run.said.count("Traceback") == 1
    assert run.said.endswith("RuntimeError: nobody foresaw this\n")


@training
def test_too_little_memory_of_one_process_is_its_sentence(tmp_path):
    run = Training(tmp_path, rank="1", code=CRASH.format(error="raise MemoryError"))
    assert run.end() == 1
    assert run.said == (
        "dml train: process 1: the machine's memory is full (MemoryError: ); set "
        "engine.micro_batch or data.workers to less\n"
    )


@training
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_the_other_and_is_named(rank, tmp_path):
    run = Training(tmp_path, "length.steps=100000").until_step(2)
    family = run.ranks
    family[rank].kill()
    assert run.end(family) == 1
    assert run.said == (
        f"dml train: process {rank} was ended by SIGKILL, most often because the machine's memory is "
        "full; the same command resumes\n"
    )


def interrupted(run, family, name):
    assert run.end(family) == 75, run.said
    assert run.said.startswith(f"dml train: stopped by {name} after step ")
    assert run.said.endswith("the same command resumes\n")
    assert run.said.count("\n") == 1
    assert len(checkpoints(run.run)) == 1


@training
def test_ctrl_c_in_the_terminal_saves_once_and_the_same_command_resumes(tmp_path):
    run = Training(tmp_path / "run", "save.every_minutes=60").until_step(5)
    family = run.ranks
    os.killpg(run.process.pid, signal.SIGINT)
    interrupted(run, family, "SIGINT")
    again = Training(tmp_path / "run", "save.every_minutes=60")
    assert again.end() == 0, again.said
    assert content(again.run) == content(train(2, tmp_path / "whole"))


@training
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR2"])
def test_a_signal_to_the_launcher_is_passed_on(name, tmp_path):
    run = Training(tmp_path, "save.every_minutes=60", "length.steps=100000").until_step(5)
    family = run.ranks
    run.process.send_signal(signal.Signals[name])
    interrupted(run, family, name)


@training
def test_ctrl_c_before_there_is_anything_to_save(tmp_path):
    run = Training(tmp_path, forked=False)
    run.until(lambda: len(run.ranks) == 2)
    family = run.ranks
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.end(family, timeout=20) == 75
    assert run.said == (
        "dml train: stopped by SIGINT before the first step; the same command starts again\n"
    )


@training
def test_a_second_ctrl_c_ends_all_at_once(tmp_path):
    """While a process does not answer."""
    run = Training(tmp_path, "length.steps=100000").until_step(2)
    family = run.ranks
    family[1].suspend()
    run.process.send_signal(signal.SIGINT)
    time.sleep(1.2)
    run.process.send_signal(signal.SIGINT)
    assert run.end(family, timeout=20) == 130
    assert run.said == "dml train: ended by a second Ctrl-C; the same command resumes\n"


@training
@pytest.mark.parametrize("when", ["at the start", "after step 3"])
def test_processes_without_their_launcher_leave(when, tmp_path):
    sets = ["save.every_minutes=60", "length.steps=100000"]
    run = Training(tmp_path, *sets, forked=when != "at the start")
    run.until(lambda: len(run.ranks) == 2)
    if when == "after step 3":
        run.until_step(3)
    family = run.ranks
    run.process.kill()
    assert run.end(family, timeout=60) == -signal.SIGKILL
    if when == "after step 3":
        assert "dml train: stopped by the end of its launcher after step" in run.said


@training
def test_the_first_process_has_the_terminal(tmp_path):
    """Its progress bar included, and only its. The processes are new interpreters, as they are for users."""
    mine, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    words = ["train", "--processes", "2", *BASE, f"run.dir={tmp_path}", "length.steps=6"]
    process = subprocess.Popen([*DML, *words], env=environment(), stdout=theirs, stderr=theirs)
    os.close(theirs)
    said = b""
    while True:
        try:
            part = os.read(mine, 4096)
        except OSError:  # Linux: the other end is closed
            break
        if not part:
            break
        said += part
    os.close(mine)
    assert process.wait() == 0, said.decode()
    assert b"6/6" in said
    assert said.count(b"batch size") == 1


@training
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_deepspeed_trains(stage, tmp_path):
    run = Training(tmp_path, "length.steps=3", words=["--deepspeed", stage])
    assert run.end(timeout=270) == 0, run.said
    assert len(losses(run.run)) == 3


# ---- in a folder that has nothing ------------------------------------------------------------------


def test_a_packaged_config_is_found_by_its_name(tmp_path):
    found = {
        name: dml("plan", "--config", name, cwd=tmp_path).stdout
        for name in ("configs/icons_mini.yaml", "icons_mini.yaml", "icons_mini")
    }
    assert len(set(found.values())) == 1
    assert "training classes           500" in found["icons_mini"]  # read from the bundled shards


def test_a_file_of_the_working_folder_goes_first(tmp_path):
    Path(tmp_path, "icons_mini").write_text("run: {nome: x}")
    assert "run.nome" in dml("plan", "--config", "icons_mini", cwd=tmp_path).stderr


def test_a_config_extends_a_packaged_preset(tmp_path):
    Path(tmp_path, "mine.yaml").write_text(
        "extends: presets/authors.yaml\nrun: {name: mine}\nlength: {steps: 3}\n"
        "data: {dataset: icons, shards: none}\nbatch: {classes: 2}\n"
    )
    ended = dml("plan", "--config", "mine.yaml", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("name", ["../icons_mini", "no_such_config", "configs/none.yaml"])
def test_a_config_that_is_nowhere_is_named_in_full(name, tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    ended = dml("plan", "--config", name, cwd=here)
    assert ended.returncode == 2
    assert f"{here / name}: No such file or directory; " in ended.stderr
    assert ended.stderr.endswith("check the path\n")
