"""A checkpoint is complete or absent, whatever happens while it is written."""

import errno
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from dml.errors import CheckpointError, NotFiniteError
from dml.run_folder import checkpoint
from dml.run_folder.checkpoint import read_last, write, write_step


def tensors(step):
    return {
        "model.safetensors": {"w": torch.full((3, 2), float(step)), "n": torch.tensor(step)},
        "optimizer.safetensors": {"w/exp_avg": torch.arange(6.0).view(3, 2).T},
    }


def state(step, best=None):
    return {"step": step, "best": best, "progress": {"step": step, "recall": 0.1 + 0.2}}


@pytest.fixture
def root(tmp_path):
    for step in (100, 200):
        write_step(tmp_path / "checkpoints", state(step), tensors(step))
    return tmp_path / "checkpoints"


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_what_was_written_is_read_back_to_the_bit(root):
    last, damaged = read_last(root)
    assert damaged == []
    assert last.state == state(200)
    for file, content in tensors(200).items():
        assert last.tensors[file].keys() == content.keys()
        assert all(torch.equal(last.tensors[file][k], x) for k, x in content.items())


def test_the_last_two_are_kept(root):
    write_step(root, state(300), tensors(300))
    assert names(root) == ["step-00000200", "step-00000300"]


def test_the_last_is_found_by_its_content_not_by_its_name(root):
    (root / "step-00000200").rename(root / "a-copy")
    (root / "step-00000100").rename(root / "step-00000999")
    assert read_last(root)[0].state["step"] == 200


def test_the_best_is_not_resumed_from_and_stays_while_a_checkpoint_needs_it(root):
    model = {"model.safetensors": tensors(0)["model.safetensors"]}
    write(root, "best-00000250", state(250), model)
    assert read_last(root)[0].state["step"] == 200
    write_step(root, state(300, best=250), tensors(300))
    write(root, "best-00000350", state(350), model)
    write(root, "best-00000350", state(350), model)  # again, after an attempt that was given up
    write_step(root, state(400, best=350), tensors(400))
    assert names(root) == ["best-00000250", "best-00000350", "step-00000300", "step-00000400"]
    write_step(root, state(500, best=350), tensors(500))
    assert names(root) == ["best-00000350", "step-00000400", "step-00000500"]


def test_a_damaged_later_one_does_not_push_out_the_good_ones(root):
    flip(root / "step-00000200" / "model.safetensors")
    for step in (120, 140):
        write_step(root, state(step), tensors(step))
    assert names(root) == ["step-00000120", "step-00000140"]


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("harm", [cut, flip, empty, Path.unlink])
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_damaged_one_is_skipped_and_named(root, harm, file):
    harm(root / "step-00000200" / file)
    last, damaged = read_last(root)
    assert last.state["step"] == 100
    if (file, harm) == ("state.json", Path.unlink):
        assert damaged == []  # without it a folder is no checkpoint
    else:
        (sentence,) = damaged
        assert "step-00000200" in sentence
        assert file in sentence


def test_a_state_that_was_edited_is_damaged(root):
    path = root / "step-00000200" / "state.json"
    content = json.loads(path.read_bytes())
    content["state"]["progress"]["recall"] = 1.0
    path.write_text(json.dumps(content))
    last, damaged = read_last(root)
    assert last.state["step"] == 100
    assert "state.json differs from its checksum" in damaged[0]


def test_one_of_another_version_is_not_read(root, monkeypatch):
    monkeypatch.setattr(checkpoint, "VERSION", 2)
    last, damaged = read_last(root)
    assert last is None
    assert "it is of version 1, this program reads 2" in damaged[0]


def test_a_damaged_one_is_replaced_when_its_step_comes_again(root):
    flip(root / "step-00000200" / "model.safetensors")
    write_step(root, state(200), tensors(200))
    assert read_last(root)[0].state["step"] == 200
    assert names(root) == ["step-00000100", "step-00000200"]


def test_nothing_that_is_not_finite_is_kept(root):
    bad = tensors(300)
    bad["model.safetensors"]["w"][1, 1] = torch.nan
    with pytest.raises(NotFiniteError, match=r"w of model\.safetensors holds NaN or infinity"):
        write_step(root, state(300), bad)
    assert read_last(root)[0].state["step"] == 200


def test_no_checkpoint_at_all(tmp_path):
    assert read_last(tmp_path / "nowhere") == (None, [])


def write_and_be_killed(root, left):
    """Write a checkpoint in a child process that is killed (kill -9) before call number `left` that
    changes the file system. Returns the child's exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    calls = iter(range(left))

    def deadly(original):
        def call(*args, **kwargs):
            if next(calls, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return call

    for owner, name in [
        (os, "fsync"),
        (Path, "rename"),
        (Path, "mkdir"),
        (Path, "open"),
        (shutil, "rmtree"),
    ]:
        setattr(owner, name, deadly(getattr(owner, name)))
    write_step(root, state(300), tensors(300))
    os._exit(0)


def test_killed_at_any_point_there_is_always_a_whole_one(root, tmp_path):
    """Kill -9 before the n-th call to the file system, for every n until it goes through."""
    found = []
    for n in range(40):
        copy = tmp_path / f"copy{n}"
        shutil.copytree(root, copy)
        ended = write_and_be_killed(copy, n)
        last, damaged = read_last(copy)
        assert damaged == []
        found.append(last.state["step"])
        # the next run writes as usual
        write_step(copy, state(400), tensors(400))
        assert read_last(copy)[0].state["step"] == 400
        assert ".writing" not in names(copy)
        assert len(names(copy)) == 2
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
    else:
        pytest.fail("it never went through")
    assert found == sorted(found)
    assert {200, 300} == set(found)
    assert n >= 8, "fewer fault points than files and folders to write"


def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_stays(small_disk):
    disk = small_disk("64k")
    write_step(disk, state(100), tensors(100))
    large = {"model.safetensors": {"w": torch.zeros(100_000)}}
    with pytest.raises(CheckpointError, match="cannot be written: No space left on device"):
        write_step(disk, state(200), large)
    assert read_last(disk)[0].state["step"] == 100
    assert not (disk / ".writing").exists()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/step-00000001 cannot be written"):
        write_step(tmp_path / "file", state(1), tensors(1))


@pytest.mark.parametrize("before", [True, False])
def test_a_full_disk_speaks_of_an_earlier_checkpoint_only_if_there_is_one(
    before, root, tmp_path, monkeypatch
):
    place = root if before else tmp_path / "first"

    def full(path, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "write_synced", full)
    with pytest.raises(CheckpointError) as error:
        write_step(place, state(300), tensors(300))
    kept = "the one before is kept, and the same command resumes from it"
    new = "there is none before it; make room, and the same command starts the run again"
    assert str(error.value).endswith(kept if before else new)
