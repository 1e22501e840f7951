"""Random numbers that depend on a key alone: the same on every machine, in every numpy, in any order of asking."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

FORMAT = 1  # part of every key: raised when generators change what they make


class Keyed:
    """Draws from one key, any strings and numbers.

    Only the raw 64-bit stream of Philox is used, which numpy promises to keep; what is made of it stands here.
    """

    def __init__(self, *key: object) -> None:
        self._key = key
        text = "\x1f".join(map(str, (FORMAT, *key))).encode()
        digest = hashlib.blake2b(text, digest_size=16).digest()
        self._bits = np.random.Philox(key=np.frombuffer(digest, dtype="<u8").astype(np.uint64))

    def part(self, name: str) -> Keyed:
        """A stream of its own, so that how much of one is used leaves the others as they are."""
        return Keyed(*self._key, name)

    def raw(self, count: int) -> np.ndarray:
        """(count,) uint64."""
        return self._bits.random_raw(count)

    def below(self, limit: int) -> int:
        """A whole number from 0 to limit - 1."""
        return int(self._bits.random_raw()) * limit >> 64

    def uniform(self) -> float:
        """A number in [0, 1)."""
        return (int(self._bits.random_raw()) >> 11) * 2.0**-53

    def many_below(self, limit: int, count: int) -> np.ndarray:
        """(count,) int64 from 0 to limit - 1, limit up to 2^40."""
        return ((self.raw(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53 * limit).astype(np.int64)

    def order(self, count: int) -> np.ndarray:
        """(count,) int64: a permutation."""
        return np.argsort(self.raw(count), kind="stable")

    def distinct(self, limit: int) -> Iterator[int]:
        """All numbers from 0 to limit - 1, each once, in random order; cheap for those that are taken."""
        seen: set[int] = set()
        while 2 * len(seen) < limit:
            for number in self.many_below(limit, min(limit, 64 + len(seen))).tolist():
                if number not in seen:
                    seen.add(number)
                    yield number
        rest = [number for number in range(limit) if number not in seen]
        yield from (rest[i] for i in self.order(len(rest)).tolist())

    def pick(self, items: Sequence[str]) -> str:
        return items[self.below(len(items))]
