"""Owns the hashes of a file: SHA-256 of all of it, and a CRC-32 of every MiB, which tells where a damaged one differs."""

import hashlib
import zlib
from collections.abc import Callable
from pathlib import Path

BLOCK = 1 << 20  # bytes under one CRC: 8 hexadecimal digits a MiB, so that 1 TB adds 8 MB to manifests


class Digest:
    """Both hashes of bytes that come in pieces of any size."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()
        self._crcs: list[str] = []
        self._crc = self._filled = 0  # of the block that is not full yet

    def update(self, raw: bytes | memoryview) -> None:
        self._sha.update(raw)
        view = memoryview(raw)
        while len(view):
            piece = view[: BLOCK - self._filled]
            self._crc = zlib.crc32(piece, self._crc)
            self._filled += len(piece)
            view = view[len(piece) :]
            if self._filled == BLOCK:
                self._crcs.append(f"{self._crc:08x}")
                self._crc = self._filled = 0

    @property
    def sha256(self) -> str:
        return self._sha.hexdigest()

    @property
    def blocks(self) -> str:
        """The CRCs of all blocks one after the other, the last block's (which may be short) included."""
        return "".join(self._crcs) + (f"{self._crc:08x}" if self._filled else "")


def digest_of(path: Path, read: Callable[[int], object] = lambda _: None) -> Digest:
    """The digest of a file; `read` is told the bytes of each piece."""
    digest = Digest()
    with open(path, "rb") as file:
        while piece := file.read(BLOCK):
            digest.update(piece)
            read(len(piece))
    return digest


def first_difference(present: str, recorded: str) -> int | None:
    """Byte at which the first block differs, from the `blocks` of two digests; None when none does."""
    count = max(len(present), len(recorded)) // 8
    for n in range(count):
        if present[8 * n : 8 * n + 8] != recorded[8 * n : 8 * n + 8]:
            return n * BLOCK
    return None
