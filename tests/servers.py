"""Real servers on loopback: HTTP with ranges, which counts, throttles, damages and dies; and S3 (moto)."""

import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fleet import free_port


class Files(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps connections open

    def do_GET(self):
        http = self.server.owner
        path = http.root / self.path.lstrip("/")
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        if self.path == http.damaged:
            data = data[:700] + bytes([data[700] ^ 1]) + data[701:]
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, end = 0, len(data)
        if wanted and http.ranges:
            start = int(wanted[1])
            end = min(int(wanted[2]) + 1 if wanted[2] else end, end)
        http.requests[self.path] += 1
        if http.breaks_now(self.path):
            self.close_connection = True
            return
        http.asked.append((self.path, start))
        self.send_response(206 if wanted and http.ranges else 200)
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        for place in range(start, end, 2**16):
            if http.dying(self.path, place - start):
                self.close_connection = True
                return
            part = data[place : min(place + 2**16, end)]
            self.wfile.write(part)
            http.sent += len(part)
            if http.rate:
                time.sleep(len(part) / http.rate)

    def log_message(self, *_):
        pass


class Quiet(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class HTTP:
    """A folder on a port. requests: how often each path was asked for. rate: bytes per second and
    connection. cut: breaks the connection after so many bytes of a tar, once. breaks: (beginning
    of a path, requests, seconds): is away for so long, after so many requests. damaged: a path whose byte 700 is flipped."""

    def __init__(self, root):
        self.root, self.port = Path(root), free_port()
        self.requests, self.asked, self.sent = Counter(), [], 0
        self.ranges, self.rate, self.cut, self.damaged = True, None, None, None
        self.breaks, self.outages = None, 0
        self.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def dying(self, path, sent):
        if self.cut is None or not path.endswith(".tar") or sent < self.cut:
            return False
        self.cut = None
        return True

    def breaks_now(self, path):
        if self.breaks is None or not path.startswith(self.breaks[0]):
            return False
        before = sum(n for each, n in self.requests.items() if each.startswith(self.breaks[0]))
        if before <= self.breaks[1]:
            return False
        seconds, self.breaks = self.breaks[2], None

        def pause():
            self.stop()
            time.sleep(seconds)
            self.start()
            self.outages += 1

        threading.Thread(target=pause, daemon=True).start()
        return True

    def start(self):
        self.server = Quiet(("127.0.0.1", self.port), Files)
        self.server.daemon_threads, self.server.owner = True, self
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self):
        self.server.shutdown()
        self.server.server_close()


@contextmanager
def http(root):
    server = HTTP(root)
    yield server
    server.stop()


def put(url, data=None):
    """Into a bucket that everybody may read."""
    # a form, as is the default, would be parsed
    headers = {"Content-Type": "application/octet-stream", "x-amz-acl": "public-read"}
    request = urllib.request.Request(url, data, headers, method="PUT")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read()


@contextmanager
def s3(folder, bucket="shards"):
    """A bucket with the files of a folder: the variables that a client needs."""
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", url.rpartition(":")[2]]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet) as process:
        try:
            for _ in range(600):
                try:
                    put(f"{url}/{bucket}")
                    break
                except urllib.error.URLError:
                    assert process.poll() is None, "moto's server ended"
                    time.sleep(0.2)
            for path in sorted(Path(folder).iterdir()):
                put(f"{url}/{bucket}/data/{path.name}", path.read_bytes())
            yield {
                "AWS_ENDPOINT_URL": url,
                "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": "test",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
        finally:
            process.kill()
