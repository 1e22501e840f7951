"""Owns the record beside an unfinished prepare or adopt: its settings and which parts are whole, so that it resumes."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mezzotint.data.errors import InputError
from mezzotint.data.files import PARTIAL, read_json, write_json
from mezzotint.data.manifest import NAME as MANIFEST
from mezzotint.data.shards import ShardInfo, shard_info
from mezzotint.data.sources import Position

FORMAT = 1
PROGRESS = "progress"  # one file a finished part; removed when the work is done


@dataclass(frozen=True)
class Part:
    """A finished part: documents read (empty ones included) and the shard of each split that got any."""

    documents: int
    position: Position  # in the source, behind the part
    shards: dict[str, ShardInfo]


class Workspace:
    """The output folder of one prepare or adopt, with one sub-folder a split, or none when there is one split.

    `maker` names the command and its record of settings, which stays when the work is done: running again is a no-op.
    """

    def __init__(self, out: Path, splits: tuple[str, ...], settings: dict[str, Any], *, maker: str = "prepare") -> None:
        self.out, self._maker = out, maker
        self._record = out / f"{maker}.json"
        self.folders = {split: out if len(splits) == 1 else out / split for split in splits}
        self._settings = settings

    def finished(self) -> bool:
        """Whether every split has its manifest, the last file written."""
        return all((folder / MANIFEST).is_file() for folder in self.folders.values())

    def open(self) -> list[Part]:
        """Start or take up the work; the parts that are whole, in order.

        Raises InputError when the folder holds other files, or work done with other settings or on other text.
        """
        if not self._record.is_file():
            if self.out.exists() and (not self.out.is_dir() or _holds_files(self.out)):
                raise InputError(f"{self.out} exists and was not made by {self._maker}: choose another --out")
            write_json(self._record, {"format": FORMAT, "settings": self._settings})
            return []
        parts = self._parts()
        different = self._difference(read_json(self._record))
        if different and not parts and not self.finished():
            self.discard()  # nothing of the earlier try is worth keeping
            return self.open()
        if different:
            done = {"prepare": "prepared", "adopt": "adopted"}.get(self._maker, "made")
            raise InputError(f"{self.out} was {done} with {different}: choose another --out, or remove it first")
        return parts

    def add(self, number: int, part: Part) -> None:
        """Record part `number` as whole, once its shards are in place."""
        shards = {split: info.as_dict() for split, info in part.shards.items()}
        content = {"documents": part.documents, "position": list(part.position), "shards": shards}
        write_json(self._part_path(number), content)

    def close(self) -> None:
        """Drop the record of parts, once the manifests are written."""
        shutil.rmtree(self.out / PROGRESS, ignore_errors=True)

    def discard(self) -> None:
        """Remove all that prepare wrote, after work that led to nothing."""
        self.close()
        for folder in self.folders.values():
            for pattern in ("part-*", "tokenizer.*", MANIFEST):
                for path in folder.glob(pattern):
                    path.unlink()
        self._record.unlink(missing_ok=True)
        for folder in (*self.folders.values(), self.out):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def discard_if_useless(self) -> None:
        """After a failure: remove what was written unless some part is whole, from which the work can go on."""
        if self.out.is_dir() and not self._part_path(0).is_file():
            self.discard()

    def _parts(self) -> list[Part]:
        parts: list[Part] = []
        while (path := self._part_path(len(parts))).is_file():
            content = read_json(path)
            if "position" not in content:
                break  # written by a version that kept none: this part and all later ones are made again
            shards = {split: shard_info(info) for split, info in content["shards"].items()}
            parts.append(Part(content["documents"], Position(*content["position"]), shards))
        return parts

    def _part_path(self, number: int) -> Path:
        return self.out / PROGRESS / f"part-{number:05d}.json"

    def _difference(self, record: dict[str, Any]) -> str:
        """What differs between the record and these settings, in words; empty when nothing does."""
        if record.get("format") != FORMAT:
            return f"another version (format {record.get('format')})"
        before = record["settings"]
        for name, value in self._settings.items():
            if before.get(name) != value:
                if name == "files":
                    return "other files, or ones that have changed since"
                if name in ("text", "tokenizer"):
                    return f"another {name}, or one that has changed since"
                return f"{name} = {before.get(name)!r}, not {value!r}"
        return ""


def _holds_files(folder: Path) -> bool:
    """Whether a folder holds more than what a prepare killed in its first moment leaves."""
    return any(not path.name.endswith(PARTIAL) for path in folder.iterdir())
