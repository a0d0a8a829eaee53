"""Trains, and is killed (kill -9) before the N-th time that it syncs a file or folder to disk.

python dying.py N --config ...

The last line on standard error names what was not synced any more.
"""

import os
import signal
import sys
from pathlib import Path

from dml.train import main


def deadly(left, fsync):
    calls = iter(range(left))

    def call(descriptor):
        if next(calls, None) is None:
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            print(f"killed before the sync of {path.name}", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)

    return call


if __name__ == "__main__":
    os.fsync = deadly(int(sys.argv[1]), os.fsync)
    os._exit(main(sys.argv[2:]))
