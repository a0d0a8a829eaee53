"""Trains, and is killed (kill -9) before the n-th time that it syncs a file to disk.

python dying.py N --config ...
"""

import os
import signal
import sys

from dml.train import main


def deadly(left, fsync):
    calls = iter(range(left))

    def call(descriptor):
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)

    return call


if __name__ == "__main__":
    os.fsync = deadly(int(sys.argv[1]), os.fsync)
    os._exit(main(sys.argv[2:]))
