"""Counts cores."""

import os
import sys


def available_cores() -> int:
    """The number of cores this process may use: a job or container may have fewer than the machine."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
