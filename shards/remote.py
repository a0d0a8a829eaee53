"""Reads files by their address: https://, http://, s3:// and file://.

    content(url, most)                   the whole of a small file
    read_range(url, start, size)         some bytes of a file
    with open_range(url, start) as file  the rest of a file, as a stream

A server that does not answer is asked again, after longer and longer pauses, until it has been silent for
PATIENCE seconds; what cannot get better (no such file, no permission) is refused at once. Credentials come
from the usual environment alone: for s3:// all that botocore knows (variables, profiles, roles,
AWS_ENDPOINT_URL); without any, the request is not signed.
"""

from __future__ import annotations

import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from shards.item import ShardError

SCHEMES = ("https", "http", "s3", "file")
PATIENCE = 300.0  # seconds of silence; less than the processes of a run wait for each other
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 15.0  # seconds before a server is asked again
CONNECT, SILENT = 10.0, 30.0  # seconds until a request counts as failed
CONNECTIONS = 32  # that are kept open, per process and server
TRANSIENT = (408, 425, 429)  # and 500 to 599: the server may answer later
HINTS = {
    401: "check the credentials",
    403: "check the credentials",
    416: "it is shorter than its manifest says",
}
EXTRA = "pip install 'dml[remote]'"

Value = TypeVar("Value")


class Stream(Protocol):
    def read(self, size: int) -> bytes: ...


class Unreachable(Exception):
    """No answer, or half of one: worth another try."""


class Silent(ShardError):
    """No answer for too long."""


def is_remote(place: str | Path) -> bool:
    """Whether a place is an address and not a path; ShardError if it is one that nothing here reads."""
    found = re.match("([a-z][a-z0-9+.-]*):", str(place)) if "://" in str(place) else None
    if str(place).startswith("pipe:"):
        raise ShardError(
            f"{place}: the output of a command has no offsets, so single images cannot be read: store "
            "it as a file"
        )
    if found and found[1] not in SCHEMES:
        raise ShardError(f"{place}: {found[1]}:// is not read, only {'://, '.join(SCHEMES)}://")
    return found is not None


def content(url: str, most: int) -> bytes:
    """The whole of a file of at most `most` bytes."""

    def whole() -> bytes:
        with open_range(url) as stream:
            data = bytearray()
            while block := stream.read(2**20):
                data += block
                if len(data) > most:
                    raise ShardError(f"{url} has more than the {most:,} bytes that may be read")
        return bytes(data)

    return patiently(url, whole)


def read_range(url: str, start: int, size: int) -> bytes:
    """`size` bytes from `start` on."""

    def some() -> bytes:
        with open_range(url, start, size) as stream:
            data = bytearray()
            while len(data) < size and (block := stream.read(size - len(data))):
                data += block
        if len(data) != size:
            raise ShardError(f"{url} is cut short: copy or build the shards again")
        return bytes(data)

    return patiently(url, some)


def patiently(url: str, attempt: Callable[[], Value]) -> Value:
    """What `attempt` returns, which is repeated while it is Unreachable."""
    patience = Patience(url)
    while True:
        try:
            return attempt()
        except Unreachable as error:
            patience.wait(error)


class Patience:
    """Pauses between attempts, each twice as long as the one before; ShardError after too many."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.heard()

    def heard(self) -> None:
        """The server has sent something."""
        self.since, self.pause, self.told = time.monotonic(), FIRST_PAUSE, False

    def wait(self, error: Unreachable) -> None:
        silent = time.monotonic() - self.since
        if silent > PATIENCE:
            raise Silent(
                f"{self.url} could not be read for {silent:,.0f} seconds ({error}): check the server "
                "and the network; the same command continues"
            ) from None
        if not self.told and self.pause > 1:
            self.told = True
            print(f"note: {self.url} does not answer ({error}); trying again", file=sys.stderr)
        time.sleep(self.pause * random.uniform(0.5, 1))
        self.pause = min(2 * self.pause, LONGEST_PAUSE)


@contextmanager
def open_range(url: str, start: int = 0, size: int | None = None) -> Iterator[Stream]:
    """A stream of a file from `start` on, to its end or for `size` bytes; Unreachable if it breaks."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        opened = _open_file(url, unquote(parts.path), start)
    elif parts.scheme == "s3":
        opened = _open_s3(url, parts.netloc, parts.path.lstrip("/"), _range(start, size))
    else:
        opened = _open_http(url, start, _range(start, size))
    with opened as stream:
        yield stream


def _range(start: int, size: int | None) -> str | None:
    if not start and size is None:
        return None
    return f"bytes={start}-{'' if size is None else start + size - 1}"


def _refuse(url: str, status: int, reason: str) -> None:
    """Raise what an HTTP status means, if it is no success."""
    if status in TRANSIENT or status >= 500:
        raise Unreachable(f"HTTP {status} {reason}".strip())
    if status >= 400:
        fix = HINTS.get(status, "check the address")
        raise ShardError(
            f"{url} cannot be read (HTTP {' '.join([str(status), reason]).strip()}): {fix}"
        )


@contextmanager
def _open_file(url: str, path: str, start: int) -> Iterator[Stream]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ShardError(f"{url} cannot be read: {error.strerror}") from None
    with open(descriptor, "rb") as file:
        file.seek(start)
        yield _Checked(file, OSError)


@contextmanager
def _open_http(url: str, start: int, wanted: str | None) -> Iterator[Stream]:
    try:
        import urllib3
    except ImportError:
        raise ShardError(f"{url}: to read from a server, {EXTRA}") from None
    headers = {"Range": wanted} if wanted else {}
    try:
        answer = _pool(os.getpid(), _proxy(url)).request(
            "GET", url, headers=headers, preload_content=False, redirect=True
        )
    except urllib3.exceptions.HTTPError as error:
        raise _unreachable(url, error) from None
    except ValueError as error:  # an address that is none
        raise ShardError(f"{url} is not an address ({error})") from None
    try:
        _refuse(url, answer.status, answer.reason or "")
        stream = _Checked(answer, urllib3.exceptions.HTTPError)
        if wanted and answer.status != 206:
            # A server without ranges sends the file from its start.
            _skip(stream, start)
        yield stream
    finally:
        # A connection with unread bytes cannot be used again.
        answer.close() if answer.length_remaining else answer.release_conn()


@contextmanager
def _open_s3(url: str, bucket: str, key: str, wanted: str | None) -> Iterator[Stream]:
    try:
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise ShardError(f"{url}: to read from S3, {EXTRA}") from None
    more = {"Range": wanted} if wanted else {}
    try:
        body = _s3(os.getpid()).get_object(Bucket=bucket, Key=key, **more)["Body"]
    except ClientError as error:
        answer = error.response
        found = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 400)
        _refuse(url, found, str(answer.get("Error", {}).get("Code", "")))
        raise
    except BotoCoreError as error:
        if type(error).__name__ in ("ParamValidationError", "InvalidRegionError"):
            raise ShardError(f"{url} cannot be read: {_reason(error)}") from None
        raise _unreachable(url, error) from None
    try:
        yield _Checked(body, BotoCoreError)
    finally:
        body.close()


class _Checked:
    """A stream whose errors are Unreachable."""

    def __init__(self, stream: Any, errors: type[Exception]) -> None:
        self._stream, self._errors = stream, errors

    def read(self, size: int) -> bytes:
        try:
            data: bytes = self._stream.read(size)
        except (self._errors, OSError) as error:
            raise Unreachable(_reason(error)) from None
        return data


def _skip(stream: Stream, start: int) -> None:
    while start and (block := stream.read(min(start, 2**20))):
        start -= len(block)


def _unreachable(url: str, error: Exception) -> Exception:
    """What a failed request means: only a certificate that is not trusted cannot get better."""
    reason = _reason(error)
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        return ShardError(
            f"{url} cannot be read ({reason}): check the address; SSL_CERT_FILE names certificates of "
            "your own"
        )
    return Unreachable(reason)


def _reason(error: Exception) -> str:
    """The innermost reason of an error, in a line."""
    while isinstance(inner := getattr(error, "reason", None), Exception):
        error = inner
    return " ".join(str(error).split())[-200:] or type(error).__name__


def _proxy(url: str) -> str | None:
    """The proxy that the environment names for an address."""
    parts = urlsplit(url)
    if proxy_bypass(parts.hostname or ""):
        return None
    return getproxies().get(parts.scheme)


# Connections must not be shared after a fork, so the process is a part of the key.
@lru_cache
def _pool(process: int, proxy: str | None) -> Any:
    import urllib3

    options: dict[str, Any] = {
        "maxsize": CONNECTIONS,
        "timeout": urllib3.Timeout(connect=CONNECT, read=SILENT),
        "retries": urllib3.Retry(connect=0, read=0, status=0, other=0, redirect=5),
    }
    return urllib3.ProxyManager(proxy, **options) if proxy else urllib3.PoolManager(**options)


@lru_cache
def _s3(process: int) -> Any:
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.session import Session

    session = Session()
    options = Config(
        connect_timeout=CONNECT,
        read_timeout=SILENT,
        max_pool_connections=CONNECTIONS,
        retries={"total_max_attempts": 1},
        signature_version=None if session.get_credentials() else UNSIGNED,
    )
    region = session.get_config_variable("region") or "us-east-1"
    return session.create_client("s3", region_name=region, config=options)
