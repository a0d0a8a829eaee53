"""Real servers on loopback: HTTP with ranges, which counts, throttles, damages and dies; and S3 (moto).

python servers.py ROOT HOST PORT RATE LOG     an HTTP server; a line [client, path, start] per request
"""

import json
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
        http.asked.append((self.path, start))
        if http.log:
            with http.log.open("a") as log:
                log.write(json.dumps([self.client_address[0], self.path, start]) + "\n")
        self.send_response(206 if wanted and http.ranges else 200)
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        step = 2**12 if http.rate else 2**16
        for place in range(start, end, step):
            if http.dying(self.path, place - start):
                self.close_connection = True
                return
            part = data[place : min(place + step, end)]
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
    connection. cut: breaks the connection after so many bytes of a tar, once. damaged: a path whose
    byte 700 is flipped. log: a file for what is asked for. context: of TLS."""

    def __init__(self, root, host="127.0.0.1", port=None, rate=None, log=None, context=None):
        self.root, self.host, self.port, self.log = Path(root), host, port or free_port(), log
        self.context = context
        self.requests, self.asked, self.sent = Counter(), [], 0
        self.ranges, self.rate, self.cut, self.damaged = True, rate, None, None
        self.start()

    @property
    def url(self):
        return f"http://{self.host}:{self.port}"

    def dying(self, path, sent):
        if self.cut is None or not path.endswith(".tar") or sent < self.cut:
            return False
        self.cut = None
        return True

    def start(self):
        self.server = Quiet((self.host, self.port), Files)
        self.server.daemon_threads, self.server.owner = True, self
        if self.context:
            self.server.socket = self.context.wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self):
        self.server.shutdown()
        self.server.server_close()


class Killable:
    """An HTTP server in a process of its own. launcher: words before its command."""

    def __init__(self, root, log, host="127.0.0.1", rate=0, launcher=()):
        self.log, self.port = Path(log), free_port()
        words = [*launcher, sys.executable, __file__, root, host, self.port, rate, log]
        self.command, self.host = [*map(str, words)], host
        self.log.touch()
        self.start()

    @property
    def url(self):
        return f"http://{self.host}:{self.port}"

    @property
    def asked(self):
        """(client, path, start) of every request."""
        return [tuple(json.loads(line)) for line in self.log.read_text().splitlines()]

    def start(self):
        self.process = subprocess.Popen(self.command)

    def kill(self):
        self.process.kill()
        self.process.wait()


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


def main(root, host, port, rate, log):
    HTTP(root, host, int(port), float(rate) or None, Path(log))
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
