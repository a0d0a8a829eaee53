"""How many cores there are."""

import os
import sys


def available_cores() -> int:
    """The cores this process may use: a job or a container may have only some of the machine's."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
