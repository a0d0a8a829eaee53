"""The server that finds the neighbours of a photo. Oracle: eval_image, the model and a dot product."""

import io
import json
import socket
import struct
import sys
import threading
import time
import urllib.error
import urllib.request
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from pictures import encode
from PIL import Image
from test_look import page, photos, runs  # noqa: F401  fixtures
from test_search import refused, unit

from dml.data.preprocessing import eval_image
from dml.errors import RunError
from dml.inference.trained import load_trained
from dml.look import program, serve
from dml.look.serve import LARGEST, Server, is_loopback, parse_address

PHOTO = encode(5, "PNG", size=(60, 40))


@pytest.fixture(scope="module")
def model(runs):  # noqa: F811
    return load_trained(runs[0])


def served(page, model, address=("127.0.0.1", 0)):  # noqa: F811
    server = Server(address)
    server.show(page, model, unit(25, 16, 1), 3)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture
def server(page, model):  # noqa: F811
    with served(page, model) as server:
        yield server
        server.shutdown()


def ask(server, path, data=None, headers=()):
    """The status, the headers and the body of an answer."""
    host, port = server.server_address[:2]
    request = urllib.request.Request(f"http://{host}:{port}{path}", data, dict(headers))
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.headers, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def search(server, data, **more):
    status, _, body = ask(server, "/search", data, {"X-Dml-Look": "1", **more})
    return status, json.loads(body)


def test_a_photo_finds_its_neighbours(server, model):
    status, said = search(server, PHOTO)
    assert status == 200
    image = torch.from_numpy(np.asarray(eval_image(PHOTO, model.spec))[None].copy())
    with torch.no_grad():
        S = unit(25, 16, 1) @ model(image)[0].numpy()
    order = np.argsort(-S)[:10]
    assert [i for i, _ in said["found"]] == (order + 3).tolist()
    assert [s for _, s in said["found"]] == pytest.approx(S[order].tolist(), abs=1e-4)


def bomb():
    """A PNG of 30,000 x 30,000 pixels in a few bytes."""

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 10_000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def large():
    """Within Pillow's own bound, beyond ours."""
    file = io.BytesIO()
    Image.new("1", (9000, 9000)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "status", "words"),
    [
        (bomb(), 415, "not a photo"),
        (large(), 413, "9,000 x 9,000 pixels"),
        (b"just text", 415, "not a photo"),
        (b"", 415, "not a photo"),
        (PHOTO[:200], 415, "not a photo"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", 415, "not a photo"),
    ],
    ids=["bomb", "large", "text", "empty", "cut", "svg"],
)
def test_what_is_no_photo_is_refused(server, data, status, words):
    found, said = search(server, data)
    assert found == status
    assert words in said["error"]
    assert search(server, PHOTO)[0] == 200


def raw(server, text, then=b""):
    """What the server answers to bytes."""
    with socket.create_connection(server.server_address[:2], timeout=30) as link:
        link.sendall(text.replace("\n", "\r\n").encode() + b"\r\n" + then)
        link.shutdown(socket.SHUT_WR)
        parts = []
        while part := link.recv(2**16):
            parts.append(part)
    return b"".join(parts).decode()


HEAD = "POST /search HTTP/1.1\nHost: localhost:1\nX-Dml-Look: 1\n"


def test_100_megabytes_are_refused_before_they_are_read(server):
    """Even a client that sends all of them before it reads gets the answer."""
    assert LARGEST < 100 * 2**20
    status, said = search(server, bytes(100 * 2**20))
    assert (status, said["error"]) == (413, "The photo is larger than 20 MB.")
    assert " 413 " in raw(server, f"{HEAD}Content-Length: {100 * 2**20}\n")
    for length in ("", "Content-Length: -5\n", "Content-Length: ²\n", "Content-Length: x\n"):
        assert " 411 " in raw(server, HEAD + length)


def test_a_photo_that_does_not_arrive_gives_its_place_back(server, monkeypatch):
    for _ in range(2 * serve.AT_A_TIME):
        assert " 408 " in raw(server, f"{HEAD}Content-Length: 1000\n", b"half")
    assert search(server, PHOTO)[0] == 200


def test_50_requests_at_a_time(server, monkeypatch):
    monkeypatch.setattr(serve, "IN_QUEUE", 200)  # on a busy machine all of them take a while
    photos = [encode(i, size=(30 + i, 40)) for i in range(50)]  # noqa: F811
    with ThreadPoolExecutor(50) as pool:
        together = list(pool.map(lambda photo: search(server, photo), photos))
    assert [status for status, _ in together] == [200] * 50
    for photo, answer in list(zip(photos, together, strict=True))[::10]:
        assert search(server, photo) == answer


def test_more_than_can_wait_are_told_so(server, monkeypatch):
    monkeypatch.setattr(serve, "IN_QUEUE", 0.2)
    server.turn.acquire()  # the model is busy
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(search, server, PHOTO) for _ in range(serve.AT_A_TIME)]
        while server.places.acquire(blocking=False):
            server.places.release()
            time.sleep(0.01)
        status, said = search(server, PHOTO)
        server.turn.release()
        assert (status, said["error"][:8]) == (503, "Too many")
        assert [each.result()[0] for each in waiting] == [200] * serve.AT_A_TIME


def test_nothing_is_written_to_disk(server):
    written = []

    def audit(event, arguments):
        if event == "open" and recording and isinstance(arguments[2], int) and arguments[2] & 3:
            written.append(arguments[0])
        if event in ("os.mkdir", "os.rename", "tempfile.mkstemp", "os.truncate") and recording:
            written.append(event)

    recording = True
    sys.addaudithook(audit)  # it cannot be removed, only be told to ignore
    try:
        assert search(server, PHOTO)[0] == 200
        assert search(server, b"text" * 10**6)[0] == 415
        assert ask(server, "/")[0] == 200
    finally:
        recording = False
    assert written == []


def test_only_the_files_of_the_page_are_served(server):
    status, headers, body = ask(server, "/")
    assert status == 200
    assert b'data-serve="yes"' in body
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert ask(server, "/sheets/0.webp")[1]["Content-Type"] == "image/webp"
    for path in ("/../data.js", "/%2e%2e/x", "//etc/passwd", "/sheets", "/etc/passwd", "/data.js/"):
        assert ask(server, path)[0] == 404, path
    assert ask(server, "/other", b"x", {"X-Dml-Look": "1"})[0] == 404


def test_another_site_cannot_use_the_server(server):
    assert ask(server, "/search", PHOTO)[0] == 403  # the header needs the consent that nobody gives
    assert ask(server, "/", headers={"Host": "evil.example"})[0] == 403
    assert ask(server, "/", headers={"Host": "evil.example:80"})[0] == 403
    assert ask(server, "/", headers={"Host": "[::1"})[0] == 403
    assert ask(server, "/", headers={"Host": "localhost"})[0] == 200
    assert ask(server, "/", headers={"Host": "localhost:8000"})[0] == 200
    assert ask(server, "/", headers={"Host": "[::1]:8000"})[0] == 200


def test_beyond_loopback_a_token_is_needed(page, model):  # noqa: F811
    with served(page, model, ("0.0.0.0", 0)) as server:
        token = server.url.partition("?token=")[2]
        assert len(token) > 20
        look = {"X-Dml-Look": "1"}
        for path in ("/", "/data.js", "/?token=", "/?token=wrong", f"/?token={token[:-1]}"):
            assert ask(server, path)[0] == 403, path
        assert ask(server, "/search", PHOTO, look)[0] == 403
        assert ask(server, "/", headers={"Cookie": "dml_look=wrong"})[0] == 403
        assert ask(server, "/", headers={"Cookie": "=;;=\x01"})[0] == 403
        status, headers, _ = ask(server, f"/?token={token}")
        assert status == 200
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        mine = {"Cookie": cookie.partition(";")[0]}
        assert ask(server, "/data.js", headers=mine)[0] == 200
        assert ask(server, "/search", PHOTO, {**look, **mine})[0] == 200
        server.shutdown()


def test_an_address_that_is_taken_is_refused_before_the_work(
    server,
    runs,  # noqa: F811
    photos,  # noqa: F811
    tmp_path,
    capsys,
    monkeypatch,
):
    monkeypatch.setattr(program, "write", lambda *work: pytest.fail("the page was made"))
    host, port = server.server_address[:2]
    words = (runs[0], "--images", photos, "--out", tmp_path / "out", "--serve", f"{host}:{port}")
    sentence = refused(capsys, program, *words)
    assert f"--serve {host}:{port} cannot be used: Address already in use" in sentence
    assert list(tmp_path.iterdir()) == []


def test_addresses():
    assert parse_address("8000") == ("127.0.0.1", 8000)
    assert parse_address("[::1]:80") == ("::1", 80)
    assert parse_address("0.0.0.0:1") == ("0.0.0.0", 1)
    assert [is_loopback(h) for h in ("127.0.0.2", "::1", "localhost", "0.0.0.0", "host")] == [
        *(True, True, True, False, False)
    ]
    for wrong in ("x", "h:", "1:99999", "a:²"):
        with pytest.raises(RunError, match="is no address"):
            parse_address(wrong)
