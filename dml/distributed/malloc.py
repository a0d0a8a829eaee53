"""Settings of the C library's allocator (Linux with glibc), for programs that compute on a CPU."""

import ctypes
import sys

# <malloc.h>
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for the next allocation. By default it returns large blocks
    to the system, and every step then waits for the same pages again, for up to a quarter of its time,
    and every batch that is embedded for up to half of it (docs/log.md)."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
