"""Two nodes on one machine: network namespaces that a veth link joins. Needs root on Linux."""

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager


def missing():
    """Why there can be none here, in a sentence."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    return None if shutil.which("ip") else "no ip here; apt-get install iproute2"


def ip(*words):
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True, text=True)


@contextmanager
def two_nodes(subnet):
    """[(name, address)] of the two. subnet: such as 10.77.3."""
    names = [f"dml{os.getpid()}{letter}" for letter in "ab"]
    addresses = [f"{subnet}.{number}" for number in (1, 2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            "eth0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "eth0",
            "netns",
            names[1],
        )
        for name, address in zip(names, addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                ip("-n", name, "link", "set", link, "up")
        yield list(zip(names, addresses, strict=True))
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
