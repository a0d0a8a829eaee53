"""The memory that the C library hands out (Linux with glibc), for programs that compute on a CPU."""

import ctypes
import sys

# <malloc.h>
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Let the C library keep what is freed, for what is allocated next. By itself it returns large
    pieces to the system, and a step then waits for the same pages again and again, up to a quarter of
    its time (docs/log.md)."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
