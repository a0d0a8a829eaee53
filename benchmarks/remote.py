"""Shards from a server: a cache that is full against the disk, and a download against its link.

    python benchmarks/remote.py SHARDS [--size 32] [--images 3200] [--rate 1000]

The server is on loopback and sends RATE Mbit per second in all, over any number of connections. The loader
reads the same batches from the folder and from the cache, in turns, without worker processes. The download
is of eight files of random bytes, with their checksums; the limit is their size divided by the rate.
"""

import argparse
import hashlib
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from measure import Row, finish, interleaved, parser, timed

from dml.data.batches import Batches, TrainBatches
from dml.data.loader import loader
from dml.data.preprocessing import Input
from shards.cache import Cache, File
from shards.fetcher import Fetcher
from shards.index import Index, load_index

AT_MOST = "<= 1.05"  # cached against local
OF_LINK = "<= 1.1"  # download against its link
CLASSES, PER_CLASS = 16, 5
FILES = 8
PIECE = 2**16  # bytes sent at a time


class Link:
    """Lets all connections together send so many bytes per second."""

    def __init__(self, rate: float) -> None:
        self.rate, self.free_at, self.lock = rate, 0.0, threading.Lock()

    def pass_on(self, size: int) -> None:
        with self.lock:
            self.free_at = max(self.free_at, time.perf_counter()) + size / self.rate
            wait = self.free_at - time.perf_counter()
        if wait > 0:
            time.sleep(wait)


def serve(root: Path, rate: float, answer: Connection) -> None:
    link = Link(rate)

    class Files(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            data = memoryview((root / self.path.lstrip("/")).read_bytes())
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            for start in range(0, len(data), PIECE):
                part = data[start : start + PIECE]
                link.pass_on(len(part))
                self.wfile.write(part)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        answer.send(server.server_port)
        server.serve_forever()


def started(root: Path, rate: float) -> tuple[multiprocessing.Process, str]:
    """The server's process, and its address."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=serve, args=(root, rate, there), daemon=True)
    process.start()
    return process, f"http://127.0.0.1:{here.recv()}"


def load(index: Index, size: int, steps: int) -> None:
    rows, labels = index.positions("train"), index.labels("train")
    batches = Batches(rows, labels, CLASSES, PER_CLASS, seed=0)
    for _ in loader(TrainBatches(index, batches, Input(size=size, resize=size)), range(steps)):
        pass


def download(cache: Cache, fetcher: Fetcher, files: list[File]) -> None:
    """Download the files anew."""
    for file in files:
        cache.path(file).unlink(missing_ok=True)
    fetcher.want(files)
    while not all(map(cache.has, files)):
        time.sleep(0.01)


def rows_of(args: argparse.Namespace, folder: Path) -> list[Row]:
    rate, steps = args.rate * 1e6 / 8, args.images // (CLASSES * PER_CLASS)
    local = load_index(args.shards)
    cache = Cache(folder / "cache")
    cached = load_index(args.shards.absolute().as_uri(), cache)
    data = [os.urandom(args.megabytes * 10**6 // FILES) for _ in range(FILES)]
    for n, each in enumerate(data):
        (folder / f"{n}.tar").write_bytes(each)
    server, address = started(folder, rate)
    files = [
        File(f"{address}/{n}.tar", len(each), hashlib.sha256(each).hexdigest())
        for n, each in enumerate(data)
    ]
    work = {
        "local": lambda: load(local, args.size, steps),
        "cached": lambda: load(cached, args.size, steps),
        "download": lambda: download(cache, fetcher, files),
    }
    fetcher = Fetcher(cache)
    seconds = interleaved(work, args.repeats)
    fetcher.close()
    server.kill()
    link = [sum(map(len, data)) / rate] * args.repeats
    batches = f"batches from the cache, {local.manifest['source']} at {args.size} px"
    downloads = f"download of {args.megabytes} MB at {args.rate} Mbit/s"
    return [
        timed("remote", batches, seconds["cached"], "the folder", seconds["local"], AT_MOST),
        timed("remote", downloads, seconds["download"], "the link", link, OF_LINK),
    ]


def arguments() -> argparse.Namespace:
    parse = parser(__doc__)
    parse.add_argument("shards", type=Path, help="a folder made by shards/build.py")
    parse.add_argument("--size", type=int, default=32, help="pixels (default: %(default)s)")
    parse.add_argument("--images", type=int, default=3200, help="default: %(default)s")
    parse.add_argument("--rate", type=int, default=1000, help="Mbit/s (default: %(default)s)")
    parse.add_argument("--megabytes", type=int, default=512, help="default: %(default)s")
    parse.add_argument("--repeats", type=int, default=7, help="default: %(default)s")
    return parse.parse_args()


def main() -> int:
    args = arguments()
    torch.set_num_threads(1)
    os.environ.setdefault("no_proxy", "127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        return finish(rows_of(args, Path(folder)), args.json)


if __name__ == "__main__":
    sys.exit(main())
