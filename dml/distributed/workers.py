"""How many processes a machine has: of the training, and loaders for each of them."""

import os

from dml.config import Config
from dml.config.sections import MOST_WORKERS
from dml.distributed.processes import own_cores


def loader_workers(config: Config) -> int:
    """data.workers, or else as many as the training process has cores beside its own: more would only
    wait for each other. Features need none, since there is nothing to decode."""
    if config.data.workers is not None:
        return config.data.workers
    if config.model.backbone == "none":
        return 0
    return min(MOST_WORKERS, max(1, own_cores(local_processes()) - 1))


def local_processes() -> int:
    """The number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def ranks_of_machine(rank: int, size: int) -> range:
    """The processes, of `size`, on the machine of this one. Launchers number them machine by machine."""
    first = max(0, rank - int(os.environ.get("LOCAL_RANK", rank)))
    return range(first, min(size, first + local_processes()))
