"""One process of a team that meets again and again; the others say how it went.

python team.py OUT
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from dml.distributed import processes
from dml.distributed.processes import leave_group, make_accelerator
from dml.distributed.signals import Interrupt, Interrupted
from dml.distributed.team import Team
from dml.errors import LaunchError, RunError
from shards.item import ShardError

LATE = 2.0  # seconds


def batches(team):
    """The last process cannot read its second batch."""
    yield 1, 2
    if team.rank == team.size - 1:
        raise ShardError("image 7 is damaged")
    yield 3, 4


def outcome(action):
    try:
        return action()
    except (RunError, LaunchError, ShardError, Interrupted) as error:
        return f"{type(error).__name__}: {error}"


def together(team):
    with team.together():
        if team.rank == 1:
            raise RunError("the folder is missing here")


def fetch(team, coming):
    images, _ = team.fetch(coming)
    team.meet()
    return images


def noted(team):
    if team.rank == 1:
        team.note(RunError("the disk is full"))
        team.note(RunError("a later problem"))
    return team.meet(save=True)


def signalled(team):
    if team.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return team.meet(save=True)


def begun(team):
    """What is noted after a meeting has begun is raised by the next one."""
    meeting = team.begin_meeting(save=team.rank == 2)
    if team.rank == 1:
        team.note(RunError("noted too late"))
    return [meeting.end(), outcome(team.meet)]


def answers_later(team):
    """The last process is late: the others begin the meeting without it, and end it with it."""
    waited = time.monotonic()
    if team.rank == team.size - 1:
        time.sleep(LATE)
    meeting = team.begin_meeting()
    begun_after = time.monotonic() - waited
    meeting.end()
    ended_after = time.monotonic() - waited
    return team.rank == team.size - 1 or (begun_after < LATE / 2, ended_after > LATE / 2)


def shared_gpu(team, gpus):
    processes.gpu_id = lambda: gpus[team.rank]
    processes.refuse_shared_gpus(team.group)


def main(out):
    interrupt = Interrupt()
    with interrupt:
        team = Team(make_accelerator(), interrupt)
        coming = batches(team)
        found = {
            "from_first": team.from_first(f"of {team.rank}"),
            "together": outcome(lambda: together(team)),
            "nobody_wants_to_save": team.meet(),
            "one_wants_to_save": team.meet(save=team.rank == 1),
            "first_batch": outcome(lambda: fetch(team, coming)),
            "second_batch": outcome(lambda: fetch(team, coming)),
        }
        team.problem = None
        found["begun"] = begun(team)
        team.problem = None
        found["answers_later"] = answers_later(team)
        found["own_gpus"] = outcome(lambda: shared_gpu(team, ["GPU-a", "GPU-b", "GPU-c"]))
        found["shared_gpu"] = outcome(lambda: shared_gpu(team, ["GPU-a", "GPU-b", "GPU-a"]))
        found["noted"] = outcome(lambda: noted(team))
        team.problem = None
        found["signalled"] = outcome(lambda: signalled(team))
        found["received"] = interrupt.received
        team.say("said by the first process")
        Path(out, f"{team.rank}.json").write_text(json.dumps(found))
        leave_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
