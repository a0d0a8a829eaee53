"""Trains in the network namespace that NAMESPACE names, as a node of a cluster would.

python in_namespace.py ARGUMENTS
"""

import ctypes
import os
import sys

from dml.train import main

CLONE_NEWNET = 0x40000000


def enter(name):
    """os.setns is new in Python 3.12."""
    descriptor = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"setns {name}")
    os.close(descriptor)


if __name__ == "__main__":
    enter(os.environ["NAMESPACE"])
    sys.stdout.flush()
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
