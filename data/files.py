"""Owns how files appear on disk: written beside their name, flushed, then renamed, so nobody reads half of one."""

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from mezzotint.data.errors import InputError

PARTIAL = ".partial"  # suffix of a file that is still being written


def partial_path(path: Path) -> Path:
    """Where `path` lives until it is whole."""
    return path.with_name(path.name + PARTIAL)


def publish(path: Path) -> None:
    """Rename the finished `path`.partial to `path`."""
    os.replace(partial_path(path), path)


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically; the folder is made when missing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial_path(path), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        publish(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial_path(path).unlink()
        raise InputError(
            f"{path} cannot be written ({error.strerror}): choose another folder or free some space"
        ) from error


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` as indented JSON, atomically; the same value always gives the same bytes."""
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; InputError names the file when it is missing, damaged or no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} holds no JSON object")
    return value


def sha256_of(content: bytes) -> str:
    """Hexadecimal SHA-256 of `content`."""
    return hashlib.sha256(content).hexdigest()
