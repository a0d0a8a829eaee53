"""Round trip and bandwidth between two nodes, with plain sockets.

`python dml/cli/network.py` waits for one visitor: it prints the node's name and a port, answers PINGS
single bytes, takes BYTES bytes and ends. It ends after WAIT_SECONDS in any case.
"""

import os
import socket
import time
from dataclasses import dataclass

PINGS, BYTES, CHUNK = 20, 2**26, 2**20
WAIT_SECONDS = 60


@dataclass(frozen=True)
class Link:
    """seconds: of a round trip, the fastest. bits_per_second: of BYTES in one direction."""

    seconds: float
    bits_per_second: float


def serve() -> None:
    with socket.create_server(("", 0)) as server:
        server.settimeout(WAIT_SECONDS)
        name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        print(name, server.getsockname()[1], flush=True)
        visitor, _ = server.accept()
        with visitor:
            visitor.settimeout(WAIT_SECONDS)
            visitor.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(PINGS):
                visitor.sendall(visitor.recv(1))
            left = BYTES
            while left and (got := len(visitor.recv(CHUNK))):
                left -= got
            visitor.sendall(b"!")


def measure(host: str, port: int) -> Link:
    """Visit a server; OSError if it cannot be reached."""
    with socket.create_connection((host, port), timeout=WAIT_SECONDS) as server:
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(PINGS):
            start = time.perf_counter()
            server.sendall(b".")
            server.recv(1)
            trips.append(time.perf_counter() - start)
        chunk, start = bytes(CHUNK), time.perf_counter()
        for _ in range(BYTES // CHUNK):
            server.sendall(chunk)
        server.recv(1)
        return Link(min(trips), 8 * BYTES / (time.perf_counter() - start))


if __name__ == "__main__":
    serve()
