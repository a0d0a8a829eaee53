"""Workers that hang in os.fork are forked again. Oracle: what workers that do not hang give."""

import gc
import os
import signal
import time

import pytest
from torch.utils.data import DataLoader

from dml.data import forking
from shards.item import ShardError


def hang_in_fork(monkeypatch, some):
    """The children of these forks, by number, hang before they return from os.fork. Returns what was
    forked."""
    fork, children = os.fork, []

    def hanging():
        number = len(children)
        pid = fork()
        if pid == 0 and number in some:
            signal.pause()
        children.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", hanging)
    monkeypatch.setattr(forking, "PATIENCE", (0.3, 5))
    return children


def loaded(workers):
    loader = DataLoader(
        range(8), None, num_workers=workers, multiprocessing_context=forking.fork_context()
    )
    return list(loader)


@pytest.fixture
def only_own_garbage():
    """A collection looks only at what the test itself makes. To look at all that pytest holds takes
    half a second."""
    gc.freeze()
    yield
    gc.unfreeze()


def open_files():
    """How many are open once that no longer changes: queues close their pipes when they are collected, and
    their threads when they end, a moment later."""
    number, same = -1, 0
    while same < 10:
        gc.collect()
        last, number = number, len(os.listdir("/proc/self/fd"))
        same = same + 1 if number == last else 0
        time.sleep(0.05)
    return number


def has_ended(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.usefixtures("only_own_garbage")
@pytest.mark.parametrize("some", [(), (0,), (0, 2)])
def test_a_worker_that_hangs_is_forked_again(monkeypatch, some):
    loaded(workers=1)  # the first workers of a process open what stays open
    children = hang_in_fork(monkeypatch, some)
    descriptors = open_files()
    assert loaded(workers=2) == [*range(8)]
    assert len(children) == 2 + len(some)
    assert all(has_ended(pid) for pid in children)
    assert open_files() == descriptors


def test_it_gives_up_with_a_sentence(monkeypatch):
    children = hang_in_fork(monkeypatch, range(9))
    monkeypatch.setattr(forking, "PATIENCE", (0.1, 0.1))
    with pytest.raises(ShardError, match=r"did not begin in 2 attempts.*data\.workers=0"):
        loaded(workers=1)
    assert len(children) == 2
    assert all(has_ended(pid) for pid in children)
