"""Every phase of a save at which a rank can die, as a function that a forked rank calls before it trains."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kill_support import at_call, die

from mezzotint.training import checkpoint, pieces, saver
from mezzotint.training.meter import Meter


class Deadly(list):
    """Views to copy; the rank dies when `at` of them have been taken, the `time`-th time they are gone through."""

    def __init__(self, values: list, at: int, time: int) -> None:
        super().__init__(values)
        self.at, self.time = at, time

    def __iter__(self) -> Iterator:
        self.time -= 1
        for place, value in enumerate(super().__iter__()):
            if self.time == 0 and place == self.at:
                die()
            yield value


def die_while_copying(rank: int, save: int, *, share: float) -> None:
    """Before (share 0) or in the midst of copying the views of the `save`-th checkpoint to the host."""
    begin, seen = saver.Saver.begin, []

    def wrapped(self, state, views):
        seen.append(state.step)
        if len(seen) == save:
            views = Deadly(views, int(share * len(views)), 2 if rank == 0 else 1)  # the main rank measures them first
        return begin(self, state, views)

    saver.Saver.begin = wrapped  # type: ignore[method-assign]


def die_while_writing(save: int) -> None:
    """In the midst of a tensor file: some pieces are written, others not."""
    files: list[int] = []

    class Digest:
        def __init__(self) -> None:
            files.append(0)
            self.true = hashlib.sha256()

        def update(self, part) -> None:
            self.true.update(part)
            files[-1] += 1
            if len(files) == save and files[-1] == 9:
                die()

        def hexdigest(self) -> str:
            return self.true.hexdigest()

    pieces.hashlib = SimpleNamespace(sha256=Digest, file_digest=hashlib.file_digest)  # type: ignore[assignment]


def die_with_half_a_manifest(save: int) -> None:
    def half(path: Path, content: bytes) -> None:
        path.write_bytes(content[: len(content) // 2])
        die()

    write, seen = checkpoint.write_synced, []

    def wrapped(path: Path, content: bytes) -> dict:
        if path.name == checkpoint.MANIFEST:
            seen.append(path)
            if len(seen) == save:
                half(path, content)
        return write(path, content)

    checkpoint.write_synced = wrapped


def die_while_removing(save: int) -> None:
    """A checkpoint that is no longer kept has lost its manifest and one more file."""
    remove, seen = shutil.rmtree, []

    def wrapped(folder, *arguments, **options):
        if re.fullmatch(r"step-\d+", Path(folder).name):
            seen.append(folder)
            if len(seen) == save:
                next(Path(folder).glob("*.safetensors")).unlink()
                die()
        return remove(folder, *arguments, **options)

    shutil.rmtree = wrapped  # type: ignore[assignment]


@dataclass(frozen=True)
class Call:
    """A call right before (or `after`) which a rank dies; `those` says by the arguments which calls are meant."""

    owner: Any
    name: str
    those: Callable[..., bool] = lambda *_: True
    after: bool = False

    def arm(self, rank: int, save: int) -> None:
        at_call(self.owner, self.name, die, count=save, after=self.after, when=self.those)


def to_final_name(_: object, target: object) -> bool:
    return Path(str(target)).name.startswith("step-")


def to_pointer(_: object, target: object) -> bool:
    return Path(str(target)).name == "latest"


def of_note(path: Path, *_: object) -> bool:
    return path.name.startswith("rank-") and path.suffix == ".json"


def of_tensor_file(descriptor: int) -> bool:
    return os.readlink(f"/proc/self/fd/{descriptor}").endswith(".safetensors")


ANY_RANK: dict[str, Callable[[int, int], None]] = {  # points by name, in the order in which a save comes through them
    "before the copy": lambda rank, save: die_while_copying(rank, save, share=0),
    "while copying": lambda rank, save: die_while_copying(rank, save, share=0.5),
    "after the copy": Call(threading.Thread, "start", lambda thread: thread.name == "checkpoint").arm,
    "in the middle of a file": lambda _, save: die_while_writing(save),
    "file not synced": Call(os, "fsync", of_tensor_file).arm,
    "file not read back": Call(pieces, "sha256", lambda path: ".tmp" in str(path)).arm,
    "note written": Call(checkpoint, "write_synced", of_note, after=True).arm,
}
MAIN_RANK: dict[str, Callable[[int, int], None]] = {
    "state written": Call(checkpoint, "write_synced", lambda path, _: path.name == checkpoint.STATE, after=True).arm,
    "all written": Call(saver.Saver, "_put_in_place").arm,
    "among the notes": Call(Path, "unlink", of_note, after=True).arm,
    "half a manifest": lambda _, save: die_with_half_a_manifest(save),
    "manifest, not renamed": Call(os, "replace", to_final_name).arm,
    "renamed, not synced": Call(os, "replace", to_final_name, after=True).arm,
    "renamed, no pointer": Call(checkpoint, "point").arm,
    "half a pointer": Call(os, "replace", to_pointer).arm,
    "pointer, nothing removed": Call(checkpoint, "prune").arm,
    "old manifest removed": Call(Path, "unlink", lambda path, **_: path.name == checkpoint.MANIFEST, after=True).arm,
    "half removed": lambda _, save: die_while_removing(save),
}
POINTS = ANY_RANK | MAIN_RANK


def die_at_point(rank: int, *, point: str, save: int, victim: int) -> None:
    if rank == victim:
        POINTS[point](rank, save)


def die_after_steps(rank: int, *, steps: int, victim: int) -> None:
    if rank == victim:
        at_call(Meter, "add", die, count=steps, after=True)
