"""Trains, and is killed (kill -9) before the n-th time that it syncs a file to disk.

python dying.py N --config ...
"""

import os
import signal
import sys

from dml.train import main

left = int(sys.argv[1])
fsync = os.fsync


def deadly(descriptor):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(descriptor)


os.fsync = deadly
os._exit(main(sys.argv[2:]))
