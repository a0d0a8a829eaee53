"""Oracle: what every process of a real gloo group says of the same meetings."""

import json
import signal
from types import SimpleNamespace

import pytest
import torch
from fleet import run

from dml.distributed.signals import Interrupt, Interrupted
from dml.distributed.team import Team
from dml.errors import RunError
from shards.item import ShardError

PROCESSES = 3


@pytest.fixture(scope="module")
def met(tmp_path_factory):
    out = tmp_path_factory.mktemp("team")
    ended = run("team.py", PROCESSES, out)
    found = [json.loads((out / f"{rank}.json").read_text()) for rank in range(PROCESSES)]
    return found, [process.stdout for process in ended]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("from_first", "of 0"),
        ("together", "RunError: the folder is missing here"),
        ("nobody_wants_to_save", False),
        ("one_wants_to_save", True),
        ("first_batch", 1),
        ("second_batch", "ShardError: image 7 is damaged"),
        ("noted", "RunError: the disk is full"),
        ("begun", [True, "RunError: noted too late"]),
        ("own_gpus", None),
        (
            "shared_gpu",
            (
                "LaunchError: the processes 0, 2 would share one GPU (GPU-a); start one process per GPU, or "
                "see to CUDA_VISIBLE_DEVICES and the job's GPUs"
            ),
        ),
    ],
)
def test_all_processes_see_the_same(met, what, expected):
    found, _ = met
    assert [each[what] for each in found] == [expected] * PROCESSES


@pytest.mark.processes
def test_a_meeting_begins_without_those_who_are_late(met):
    found, _ = met
    assert [each["answers_later"] for each in found] == [[True, True], [True, True], True]


@pytest.mark.processes
def test_only_one_received_the_signal(met):
    found, _ = met
    assert [each["received"] for each in found] == [None, "SIGTERM", None]
    other = "Interrupted: stopped by a signal to another process"
    assert [each["signalled"] for each in found] == [
        other,
        "Interrupted: stopped by SIGTERM",
        other,
    ]


@pytest.mark.processes
def test_only_the_first_speaks(met):
    _, said = met
    assert ["said by the first process" in text for text in said] == [True, False, False]


@pytest.fixture
def alone():
    here = SimpleNamespace(
        process_index=0, num_processes=1, is_main_process=True, device=torch.device("cpu")
    )
    return Team(here, Interrupt())


def test_alone_it_is_the_same(alone):
    assert alone.from_first("mine") == "mine"
    assert alone.meet(save=True)
    assert not alone.meet()
    with pytest.raises(RunError, match="missing"), alone.together():
        raise RunError("missing")
    with pytest.raises(KeyError), alone.together():  # no mistake: it ends the process
        raise KeyError("a bug")


def test_a_loaders_traceback_is_left_out(alone):
    def coming():
        raise ShardError(
            "Caught ShardError in worker 0.\n  Traceback ...\nShardError: it is cut short"
        )
        yield

    images, labels = alone.fetch(coming())
    assert len(images) == len(labels) == 0
    with pytest.raises(ShardError, match=r"^it is cut short$"):
        alone.meet()


def test_a_signal_counts_less_than_a_problem(alone):
    with alone.interrupt:
        signal.raise_signal(signal.SIGUSR2)
        with pytest.raises(Interrupted):
            alone.meet()
        alone.note(RunError("the disk is full"))
        with pytest.raises(RunError, match="full"):
            alone.meet()
