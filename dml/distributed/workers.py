"""How many loader processes each training process has."""

import os

from dml.config import Data
from dml.config.sections import MOST_WORKERS
from dml.distributed.processes import own_cores


def loader_workers(data: Data) -> int:
    """data.workers, or else as many as the training process has cores beside its own: more would only
    wait for each other."""
    if data.workers is not None:
        return data.workers
    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    return min(MOST_WORKERS, max(1, own_cores(local) - 1))
