"""One process of a team that meets again and again; the others say how it went.

python team.py OUT
"""

import json
import os
import signal
import sys
from pathlib import Path

from dml.distributed.processes import leave_group, make_accelerator
from dml.distributed.signals import Interrupt, Interrupted
from dml.distributed.team import Team
from dml.errors import RunError
from shards.item import ShardError


def batches(team):
    """The last process cannot read its second batch."""
    yield 1, 2
    if team.rank == team.size - 1:
        raise ShardError("image 7 is damaged")
    yield 3, 4


def outcome(action):
    try:
        return action()
    except (RunError, ShardError, Interrupted) as error:
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
        found["noted"] = outcome(lambda: noted(team))
        team.problem = None
        found["signalled"] = outcome(lambda: signalled(team))
        found["received"] = interrupt.received
        team.say("said by the first process")
        Path(out, f"{team.rank}.json").write_text(json.dumps(found))
        leave_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
