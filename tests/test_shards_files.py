"""Files that are written whole or not at all, and read only if they fit."""

import os

import pytest

from shards.files import MEMORY, check_size, read_bounded, write_whole


def test_a_full_disk_leaves_the_old_file_and_nothing_else(small_disk):
    place = small_disk("64k")
    write_whole(place / "a.json", b"old")
    with pytest.raises(OSError, match="No space left on device"):
        write_whole(place / "a.json", bytes(2**17))
    assert os.listdir(place) == ["a.json"]
    assert (place / "a.json").read_bytes() == b"old"
    (place / "full").write_bytes(bytes(14 * 4096))
    with pytest.raises(OSError, match="No space left on device"):
        write_whole(place / "b.json", bytes(2**13))
    assert sorted(os.listdir(place)) == ["a.json", "full"]


def test_reading_is_bounded(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert read_bounded(path, 5) == b"12345"
    with pytest.raises(OSError, match="it has 5 bytes, more than the 4 that may be read") as error:
        read_bounded(path, 4)
    assert error.value.filename == str(path)
    os.truncate(path, MEMORY)
    with pytest.raises(OSError, match="more than the"):
        check_size(path)
    (tmp_path / "zero").symlink_to("/dev/zero")
    with pytest.raises(OSError, match="it is a device"):
        read_bounded(tmp_path / "zero")
