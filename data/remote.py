"""Owns files on web servers as `datasets` reads them: a dropped connection is taken up where it broke, so many times."""

import http.client
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from mezzotint.data.errors import InputError

SCHEME = "resumed+"  # before http:// or https://: read through this file system, not fsspec's own
WAITS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # seconds before each new try; the count begins anew when bytes have come
TOLD = 8.0  # seconds of waiting from which on the user is told
TIMEOUT = 60.0  # seconds without a byte
PIECE = 1 << 16
RETRIED = {408, 429, 500, 502, 503, 504}
AGAIN = "run the same command again later to go on"


@dataclass(frozen=True)
class RemoteFile:
    """What a server says of a file: when `version` changes, so has the content."""

    url: str
    size: int
    version: str  # ETag or time of change; empty when the server gives neither


def describe(url: str) -> RemoteFile:
    """Ask for size and version; InputError when the file is not there or the server stays away."""

    def ask(_: int) -> RemoteFile:
        with _open(url, {"Range": "bytes=0-0"}) as answer:  # servers answer HEAD less reliably than this
            size = _whole_size(answer)
            if size is None:
                raise InputError(f"{url} comes without its size: download it, and name the file")
            return RemoteFile(url, size, answer.headers.get("ETag") or answer.headers.get("Last-Modified") or "")

    return _persistent(url, ask)


def fetch(file: RemoteFile, start: int, end: int) -> bytes:
    """Bytes start .. end - 1, over as many connections as it takes; InputError when WAITS tries in a row bring none."""
    got = bytearray()

    def more(_: int) -> bytes:
        _continue(file, got, start, end)
        return bytes(got)

    return _persistent(file.url, more, lambda: len(got))


def _continue(file: RemoteFile, got: bytearray, start: int, end: int) -> None:
    """Read on from where `got` ends; OSError when the connection breaks before `end`."""
    place = start + len(got)
    if place >= end:
        return
    with _open(file.url, {"Range": f"bytes={place}-{end - 1}"}) as answer:
        version = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
        if version != file.version or _whole_size(answer) != file.size:
            raise InputError(f"{file.url} has changed while it was read: start again with a new --out")
        if answer.status == 200:  # a server that knows no ranges: what is there already is read again
            _read(answer, place)
        while len(got) < end - start:
            piece = answer.read(min(PIECE, end - start - len(got)))
            if not piece:
                raise ConnectionError(f"the connection broke at byte {start + len(got)} of {file.size}")
            got += piece


def _read(answer: Any, count: int) -> None:
    while count > 0:
        piece = answer.read(min(PIECE, count))
        if not piece:
            raise ConnectionError("the connection broke")
        count -= len(piece)


def _persistent(url: str, attempt: Any, progress: Any = lambda: 0) -> Any:
    """`attempt(tries)` until it succeeds; tries are counted anew when `progress()` has grown."""
    tries, before = 0, progress()
    while True:
        try:
            return attempt(tries)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code not in RETRIED:
                raise InputError(f"{url} cannot be had ({error.code} {error.reason}): check the address") from error
            failure: Exception = error
        except (OSError, http.client.HTTPException) as error:
            failure = error
        if progress() > before:
            tries, before = 0, progress()
        if tries == len(WAITS):
            raise InputError(f"the server of {url} stays away ({_reason(failure)}): {AGAIN}") from failure
        if WAITS[tries] >= TOLD:
            print(f"{url}: {_reason(failure)}; trying again in {WAITS[tries]:.0f} s", file=sys.stderr)
        time.sleep(WAITS[tries])
        tries += 1


def _open(url: str, headers: dict[str, str]) -> Any:
    request = urllib.request.Request(url, headers=headers | {"Accept-Encoding": "identity"})
    return urllib.request.urlopen(request, timeout=TIMEOUT)


def _whole_size(answer: Any) -> int | None:
    """Bytes of the whole file, from the answer to a request for a range."""
    if answer.status == 206:
        total = (answer.headers.get("Content-Range") or "").rpartition("/")[2]
    else:
        total = answer.headers.get("Content-Length") or ""
    return int(total) if total.isdigit() else None


def _reason(error: Exception) -> str:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return (str(reason).splitlines() or [type(error).__name__])[0].rstrip(".")


class ResumedHttp(AbstractFileSystem):
    """Read-only files by their address, with SCHEME before it."""

    protocol = (f"{SCHEME}http", f"{SCHEME}https")
    known: ClassVar[dict[str, RemoteFile]] = {}  # as `register` was told: `datasets` makes instances as it likes

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        file = self.known[path]
        return {"name": path, "size": file.size, "type": "file", "ETag": file.version}

    def glob(self, path: str, maxdepth: Any = None, **options: Any) -> Any:
        """The file itself: addresses may hold characters that would be patterns elsewhere."""
        return {path: self.info(path)} if options.get("detail") else [path]

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **options: Any) -> "ResumedFile":
        file = self.known[path]
        return ResumedFile(self, path, mode, block_size or "default", size=file.size, remote=file)


class ResumedFile(AbstractBufferedFile):
    """A file that is read in blocks, each with `fetch`."""

    def __init__(self, *args: Any, remote: RemoteFile, **options: Any) -> None:
        super().__init__(*args, **options)
        self._remote = remote

    def _fetch_range(self, start: int, end: int) -> bytes:
        return fetch(self._remote, start, min(end, self._remote.size))


def register(files: list[RemoteFile]) -> None:
    """Make `files` known to fsspec, and with it to `datasets`, by their addresses with SCHEME before them."""
    ResumedHttp.known.update({SCHEME + file.url: file for file in files})
    for name in ResumedHttp.protocol:
        fsspec.register_implementation(name, ResumedHttp, clobber=True)
