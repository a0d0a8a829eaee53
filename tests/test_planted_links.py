"""Atomic writes and locks. Oracle: a symbolic link that somebody planted is not followed, so the file
it names is as before."""

import os
import subprocess
import sys

import pytest
import torch
from fleet import ROOT
from pictures import make_folder

from dml.errors import CheckpointError
from dml.run_folder import checkpoint
from dml.run_folder.files import Lines, write_json
from launch.local import open_log
from launch.report import main as report
from launch.slurm_commands import SlurmError
from launch.status import LOCAL_LOCK, hold_run, is_running_here
from launch.submission import LOCK_FILE, lock_sweep
from launch.sweep import SweepError
from shards.build import main as build
from shards.files import is_locked, open_lock, remove, try_lock, write_synced, write_whole


@pytest.fixture
def victim(tmp_path):
    """A file of somebody else; it must never change."""
    path = tmp_path / "elsewhere" / "victim"
    path.parent.mkdir()
    path.write_text("precious")
    yield path
    assert path.read_text() == "precious"
    assert [*path.parent.iterdir()] == [path]


def test_a_planted_temporary_file_is_replaced(tmp_path, victim):
    for plant in (os.symlink, os.link):
        plant(victim, tmp_path / ".x.json.writing")
        write_json(tmp_path / "x.json", {"a": 1})
        assert (tmp_path / "x.json").read_text() == '{\n "a": 1\n}\n'
        assert not (tmp_path / ".x.json.writing").exists()


def test_a_link_in_the_place_of_a_file_is_replaced(tmp_path, victim):
    (tmp_path / "x").symlink_to(victim)
    write_whole(tmp_path / "x", b"new")
    assert not (tmp_path / "x").is_symlink()
    assert (tmp_path / "x").read_bytes() == b"new"


def test_a_new_file_is_a_new_file(tmp_path, victim):
    (tmp_path / "x").symlink_to(victim)
    (tmp_path / "absent").symlink_to(victim.parent / "absent")
    for name in ("x", "absent"):
        with pytest.raises(FileExistsError):
            write_synced(tmp_path / name, b"new")


def test_a_lock_file_is_neither_followed_nor_truncated(tmp_path, victim):
    path = tmp_path / ".lock"
    for target in (victim, victim.parent / "absent"):
        path.symlink_to(target)
        with pytest.raises(OSError, match=r"a symbolic link, which is not followed.*\.lock"):
            open_lock(path)
        path.unlink()
    path.write_text("as it was")
    with open_lock(path) as file:
        assert try_lock(file)
        assert is_locked(path)
    assert not is_locked(path)
    assert path.read_text() == "as it was"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_lock_file_is_a_file(tmp_path, make):
    make(tmp_path / ".lock")
    with pytest.raises(OSError, match=r"\.lock"):
        open_lock(tmp_path / ".lock")
    with pytest.raises(OSError, match="not a regular file"):
        is_locked(tmp_path / ".lock")


def test_another_process_sees_the_lock(tmp_path):
    with open_lock(tmp_path / ".lock") as file:
        assert try_lock(file)
        code = f"from shards.files import *; print(is_locked(Path({str(tmp_path / '.lock')!r})))"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        )
    assert done.stdout == "True\n"


def test_the_locks_of_the_launcher(tmp_path, victim):
    (tmp_path / LOCK_FILE).symlink_to(victim)
    with (
        pytest.raises(SlurmError, match=r"\.lock cannot be written: a symbolic link"),
        lock_sweep(tmp_path),
    ):
        pass
    (tmp_path / LOCAL_LOCK).symlink_to(victim)
    with (
        pytest.raises(SweepError, match=r"\.local cannot be locked: a symbolic link"),
        hold_run(tmp_path),
    ):
        pass
    with pytest.raises(OSError, match="a symbolic link"):
        is_running_here(tmp_path)


def test_the_logs_of_the_launcher(tmp_path, victim):
    (tmp_path / "a_0.log").symlink_to(victim)
    with pytest.raises(SweepError, match=r"a_0\.log cannot be written: a symbolic link"):
        open_log(tmp_path / "a_0.log")
    for text in (b"one", b"two"):
        with open_log(tmp_path / "b_0.log") as log:
            log.write(text)
    assert (tmp_path / "b_0.log").read_bytes() == b"onetwo"


def test_the_journal(tmp_path, victim):
    (tmp_path / "metrics.jsonl").symlink_to(victim)
    with pytest.raises(OSError, match="a symbolic link"):
        Lines(tmp_path / "metrics.jsonl", 0)


def test_the_report(tmp_path, victim):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "failed.json").write_text('{"reason": "bad"}')
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "report.md").symlink_to(victim)
    assert report([str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    assert "bad" in (tmp_path / "out" / "report.md").read_text()


def test_remove_takes_the_link_alone(tmp_path, victim):
    for target in (victim, victim.parent, tmp_path / "absent"):
        (tmp_path / "x").symlink_to(target)
        remove(tmp_path / "x")
        assert not os.path.lexists(tmp_path / "x")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "inner").symlink_to(victim.parent)
    remove(tmp_path / "x")
    remove(tmp_path / "x")


# ---- checkpoints and shards ------------------------------------------------------------------------


def state(step):
    return {"step": step, "best": None}


WEIGHTS = {"model.safetensors": {"w": torch.ones(3)}}


@pytest.mark.parametrize("name", [".writing", "step-00000001"])
def test_a_link_in_the_place_of_a_checkpoint_is_removed(tmp_path, victim, name):
    root = tmp_path / "checkpoints"
    root.mkdir()
    for target in (victim.parent, victim, victim.parent / "absent"):
        (root / name).symlink_to(target)
        checkpoint.write_step(root, state(1), WEIGHTS)
        assert [path.name for path in root.iterdir()] == ["step-00000001"]
        assert not (root / "step-00000001").is_symlink()
        assert checkpoint.read_last(root)[0].state == state(1)
        remove(root / "step-00000001")


def test_a_full_disk_leaves_no_half_of_a_checkpoint(small_disk):
    disk = small_disk("64k")
    checkpoint.write_step(disk, state(1), WEIGHTS)
    large = {"model.safetensors": {"w": torch.zeros(100_000)}}
    with pytest.raises(CheckpointError, match="No space left on device"):
        checkpoint.write_step(disk, state(2), large)
    assert [path.name for path in disk.iterdir()] == ["step-00000001"]
    checkpoint.write_step(disk, state(2), WEIGHTS)


def test_a_planted_partial_folder_is_refused(tmp_path, victim, capsys):
    root, out = make_folder(tmp_path / "in"), tmp_path / "out"
    for target in (victim.parent, victim.parent / "absent", victim):
        (tmp_path / "out.partial").symlink_to(target)
        assert build(["folder", "--root", str(root), "--out", str(out), "--workers", "1"]) == 2
        assert f"{out}.partial is a symbolic link: remove it" in capsys.readouterr().err
        assert not out.exists()
        (tmp_path / "out.partial").unlink()
