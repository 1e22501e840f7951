"""What a run folder holds, read without touching it: its last records, its newest complete checkpoint, who runs it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname

from mezzotint.models.errors import InputError
from mezzotint.training import checkpoint, lock, outcome, strict
from mezzotint.training.metrics import read_records

RECENT = 20  # training records whose losses are averaged
READ: dict[str, set[str]] = {  # what is read of records, by kind
    "start": set(),
    "train": {"loss", "lr", "gradient_norm", "tokens", "unique_tokens_per_second", "utilization", "seconds"},
    "validation": {"nats_per_token", "nats_per_token_error", "bits_per_byte", "bits_per_byte_error"},
    "event": {"event"},
}


@dataclass(frozen=True, kw_only=True)
class Glance:
    """A run folder as it is now; None for what it does not hold."""

    folder: Path
    state: str  # in words
    steps: int | None  # of the whole run
    step: int  # steps done, as far as it is known
    starts: int
    train: dict | None  # the last record of each kind
    bound: dict | None
    silent: float | None  # seconds since the last record
    loss: float | None  # mean of the last training records that have one
    averaged: int  # how many
    skipped: list[int]  # steps
    spikes: list[int]
    checkpoint: Path | None  # the newest whose files all have their sizes
    checkpoint_age: float | None
    bytes: int

    @property
    def running(self) -> bool:
        return self.state.startswith("running")


def glance(folder: Path) -> Glance:
    """Read a run folder without touching it. Raises InputError when it holds no run."""
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder: give a run folder, the one that `run:` in the recipe names")
    metrics = folder / "metrics.jsonl"
    records = read_records(metrics) if metrics.is_file() else []
    steps = _steps(folder / "config.yaml")
    if steps is None and not records:
        raise InputError(
            f"{folder} holds neither a readable config.yaml nor records in metrics.jsonl: it is no run folder"
        )
    of_kind = {kind: [r for r in records if r["kind"] == kind and keys <= r.keys()] for kind, keys in READ.items()}
    events = {name: [r["step"] for r in of_kind["event"] if r["event"] == name] for name in ("skipped", "spike")}
    losses = [r["loss"] for r in of_kind["train"][-RECENT:] if r["loss"] is not None]
    newest = _newest(folder)
    end = outcome.read(folder)
    known = [r["step"] for r in records[-1:]] + ([checkpoint.step_of(newest)] if newest is not None else [])
    return Glance(
        folder=folder,
        state=_state(folder, end, started=bool(records) or newest is not None),
        steps=steps,
        step=max([*known, end.step if end is not None else 0]),
        starts=len(of_kind["start"]),
        train=of_kind["train"][-1] if of_kind["train"] else None,
        bound=of_kind["validation"][-1] if of_kind["validation"] else None,
        silent=time.time() - records[-1]["time"] if records and "time" in records[-1] else None,
        loss=sum(losses) / len(losses) if losses else None,
        averaged=len(losses),
        skipped=events["skipped"],
        spikes=events["spike"],
        checkpoint=newest,
        checkpoint_age=time.time() - newest.stat().st_mtime if newest is not None else None,
        bytes=_bytes(folder),
    )


def ago(seconds: float | None) -> str:
    """How long something is past, to one figure's use."""
    if seconds is None:
        return "some time ago"
    for unit, length, limit in (("s", 1, 100), ("min", 60, 100), ("h", 3600, 48)):
        if seconds < limit * length:
            return f"{max(0.0, seconds) / length:.0f} {unit} ago"
    return f"{seconds / 86_400:.0f} days ago"


def _state(folder: Path, end: outcome.Outcome | None, *, started: bool) -> str:
    holder = _holder(folder)
    if holder is not None:
        return f"running as {holder}"
    if end is not None:
        return f"{end.word} {ago(time.time() - end.time)}: {end.reason or 'no reason given'}"
    if not started:
        return "not started"
    host = _lock_values(folder).get("host", "")
    elsewhere = (
        f", unless it runs on {host} and its lock does not reach here" if host not in ("", gethostname()) else ""
    )
    return f"died without a word{elsewhere}: start it again to go on"


def _holder(folder: Path) -> str | None:
    """Who holds the run, None when nobody does. Asks for a shared lock, and lets go of it at once."""
    try:
        descriptor = os.open(folder / lock.NAME, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):  # no locks on this file system: nobody can tell
            return None
        values = _lock_values(folder)
        return f"process {values['pid']} on {values['host']}" if values else "another process"
    finally:
        os.close(descriptor)


def _lock_values(folder: Path) -> dict:
    """Host and process of the last start; empty where they cannot be read."""
    try:
        values = json.loads((folder / lock.NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) and {"host", "pid"} <= values.keys() else {}


def _newest(folder: Path) -> Path | None:
    """By the sizes of its files: their contents, many gigabytes, are read when a run goes on from them."""
    for found in checkpoint.candidates(folder):
        if checkpoint.damage(found, share=(-1, 1)) is None:  # rank -1 reads no file's contents
            return found
    return None


def _steps(path: Path) -> int | None:
    try:
        values = strict.parse_yaml(path.read_text(encoding="utf-8"), source=str(path))
        return int(values["steps"])
    except (OSError, ValueError, KeyError, TypeError, InputError):
        return None


def _bytes(folder: Path) -> int:
    """Bytes of all files, as far as they stay where they are: a run may remove some meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:
                continue
    return total
