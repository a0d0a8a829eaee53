"""The page with a field for a photo: a small server that finds the neighbours of a photo.

On loopback anyone on this machine may ask. At any other address a request needs the token of the printed
link, which becomes a cookie. A photo is read into memory, bounded in bytes and pixels, and never written.
A request needs a header that other sites' pages cannot send, and a Host that is this machine, so that a page
open in the same browser cannot use the server.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import torch

from dml.data.preprocessing import Input, eval_image
from dml.errors import RunError
from dml.inference.neighbours import Vectors, nearest
from dml.look.findings import NEIGHBOURS
from dml.models import Embedder
from shards.photo import open_photo

LARGEST, MOST_PIXELS = 20 * 2**20, 50_000_000  # bytes, pixels of a photo
PATIENCE = 20.0  # seconds for a photo to arrive
IN_QUEUE = 20.0  # seconds until one that waits for others is refused
LINGERS = 5.0  # seconds in which the rest of a refused photo is discarded
AT_A_TIME = 4  # photos in memory
COOKIE, HEADER = "dml_look", "X-Dml-Look"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".webp": "image/webp",
}


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT, or a port of this machine."""
    host, _, port = text.rpartition(":")
    host = (host or "127.0.0.1").strip("[]")
    if not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise RunError(f"--serve {text} is no address: give HOST:PORT, such as 127.0.0.1:8000")
    return host, int(port)


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_name(header: str) -> str:
    """The name in a Host header, without the port."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


class Refused(Exception):
    """A request that is answered with a status and a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.sentence = status, sentence


class Server(ThreadingHTTPServer):
    """It takes its address when it is made, before the long work on the page; a browser that asks early
    waits for `show`."""

    daemon_threads = True
    request_queue_size = 128
    page: Path
    files: set[str]
    model: Embedder
    X: Vectors
    first: int

    def __init__(self, address: tuple[str, int]) -> None:
        self.token = None if is_loopback(address[0]) else secrets.token_urlsafe(24)
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.places, self.turn = threading.Semaphore(AT_A_TIME), threading.Lock()
        try:
            super().__init__(address, Handler)
        except OSError as error:
            raise RunError(
                f"--serve {address[0]}:{address[1]} cannot be used: {error.strerror}; give another "
                "address"
            ) from None

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's would ask the network for this machine's name

    def show(self, page: Path, model: Embedder, X: Vectors, first: int) -> None:
        """X: embeddings of the images that are searched; the first of them has the number `first`."""
        self.page, self.model, self.X, self.first = page, model, X, first
        assert isinstance(model.spec, Input)  # a page shows images
        self.spec, self.device = model.spec, next(model.parameters()).device
        self.files = {
            path.relative_to(page).as_posix() for path in page.rglob("*") if path.is_file()
        }

    @property
    def url(self) -> str:
        host, port = str(self.server_address[0]), self.server_address[1]
        host = socket.gethostname() if host in ("0.0.0.0", "::") else host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{port}/" + (f"?token={self.token}" if self.token else "")

    def find(self, photo: bytes) -> list[tuple[int, float]]:
        """The nearest images of a photo: their numbers and similarities."""
        with self.turn:  # decoding and embedding use all cores and much memory
            try:
                w, h = open_photo(photo).size
                if w * h > MOST_PIXELS:
                    raise Refused(413, f"The photo has {w:,} x {h:,} pixels: give a smaller one.")
                image = eval_image(photo, self.spec)
            except Refused:
                raise
            except Exception:  # noqa: BLE001  decoders raise almost any exception on damaged bytes
                raise Refused(415, "This is not a photo that can be read.") from None
            with torch.inference_mode():
                pixels = torch.from_numpy(np.asarray(image)[None].copy())
                q = self.model(pixels.to(self.device)).float().cpu().numpy()
            S, places = nearest(q, self.X, NEIGHBOURS)
        found = zip((places[0] + self.first).tolist(), S[0].tolist(), strict=True)
        return [(i, round(s, 4)) for i, s in found]


class Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "dml", ""
    timeout = PATIENCE

    def do_GET(self) -> None:
        self.answer(self.get)

    def do_POST(self) -> None:
        self.answer(self.post)

    def answer(self, act: Any) -> None:
        self.close_connection = True  # what is left of a refused body is not read as a request
        try:
            try:
                self.admit()
                act()
            except Refused as refusal:
                self.reply_json(refusal.status, {"error": refusal.sentence})
                self.linger()
        except (ConnectionError, TimeoutError):
            pass  # the reader has left

    def linger(self) -> None:
        """Discard what is still being sent, for a while: if the connection were closed at once, many
        programs would see an error instead of the answer."""
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.settimeout(LINGERS)
        end = time.monotonic() + LINGERS
        while time.monotonic() < end and self.rfile.read1(2**16):
            pass

    def admit(self) -> None:
        """Refuse whoever has no token, or was led here by another site."""
        token = self.server.token
        if token is None:
            if not is_loopback(host_name(self.headers.get("Host", ""))):
                raise Refused(403, "This server is for this machine only.")
            return
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(COOKIE)
        except CookieError:
            cookie = None
        given = [cookie.value] if cookie else []
        given += parse_qs(urlsplit(self.path).query).get("token", [])
        if not any(hmac.compare_digest(each.encode(), token.encode()) for each in given):
            raise Refused(
                403, "The token is missing or wrong: open the link that dml look printed."
            )

    def get(self) -> None:
        path = urlsplit(self.path).path.lstrip("/") or "index.html"
        if path not in self.server.files:
            raise Refused(404, "There is no such page.")
        body = (self.server.page / path).read_bytes()
        headers = {}
        if path == "index.html":
            body = body.replace(b"<body>", b'<body data-serve="yes">')
            if self.server.token:
                cookie = f"{COOKIE}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
                headers["Set-Cookie"] = cookie
        self.reply(200, TYPES[Path(path).suffix], body, headers)

    def post(self) -> None:
        if urlsplit(self.path).path != "/search":
            raise Refused(404, "There is no such page.")
        if self.headers.get(HEADER) is None:
            raise Refused(403, f"The header {HEADER} is missing.")
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdecimal():
            raise Refused(411, "The length of the photo is missing.")
        if int(length) > LARGEST:
            raise Refused(413, f"The photo is larger than {LARGEST / 2**20:.0f} MB.")
        if not self.server.places.acquire(timeout=IN_QUEUE):
            raise Refused(503, "Too many photos at a time: try again.")
        try:
            found = self.server.find(self.body(int(length)))
        finally:
            self.server.places.release()
        self.reply_json(200, {"found": found})

    def body(self, length: int) -> bytes:
        parts, end = [], time.monotonic() + PATIENCE
        while length > 0:
            part = self.rfile.read1(min(length, 2**16))
            if not part or time.monotonic() > end:
                raise Refused(408, "The photo did not arrive.")
            parts.append(part)
            length -= len(part)
        return b"".join(parts)

    def reply_json(self, status: int, content: Mapping[str, Any]) -> None:
        self.reply(status, "application/json", json.dumps(content).encode(), {})

    def reply(self, status: int, kind: str, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "X-Frame-Options": "DENY",
            **headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a line per thumbnail sheet would hide the link."""
