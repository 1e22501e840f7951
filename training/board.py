"""Where curves are looked at beside the run's own JSONL: TensorBoard, and wandb for those who have it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any, Protocol

from mezzotint.models.errors import InputError
from mezzotint.training.append import Appended, warn

Record = dict[str, Any]
FINISH_SECONDS = 30  # that wandb may take at the end of a start to send what it holds: a cluster waits no longer


class Board(Protocol):
    """Takes records in the order of the JSONL; a step is never shown twice, whatever was killed and resumed."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in `folder/tb`, one a start; it hides what an interrupted start wrote for steps after `first_step`.

    Written here and not by torch's SummaryWriter: that one leaves two minutes of curves in memory, where a kill loses
    them, and dies in a thread when the disk is full.
    """

    def __init__(self, folder: Path, *, first_step: int) -> None:
        (folder / "tb").mkdir(exist_ok=True)
        # readers take files in the order of their names; a nanosecond keeps starts of one second apart
        now = time.time_ns()
        name = f"events.out.tfevents.{now // 10**9:010d}.{now % 10**9:09d}.{socket.gethostname()}.{os.getpid()}"
        self._file = Appended(folder / "tb" / name)
        moment = {"wall_time": time.time()}
        self._file.add(_event(file_version="brain.Event:2", **moment))
        purge = {"status": "START"}  # readers forget steps from this one on that earlier files hold
        self._file.add(_event(step=first_step + 1, session_log=purge, **moment))

    def write(self, record: Record) -> None:
        values = [{"tag": f"{record['kind']}/{name}", "simple_value": x} for name, x in numbers(record).items()]
        self._file.add(_event(step=record["step"], wall_time=record["time"], summary={"value": values}))

    def close(self) -> None:
        self._file.close()


def _event(**fields: Any) -> bytes:
    """One event in the framing of an event file: length and content, each with its checksum."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    framed = io.BytesIO()
    RecordWriter(framed).write(Event(**fields).SerializeToString())
    return framed.getvalue()


class Wandb:
    """One wandb run over all starts of a run folder; `folder/wandb.json` keeps its id.

    A row of wandb is a step, and it is sent whole: once a record of a later step comes, or at the end. `before` are the
    records of earlier starts. A server says which steps it has: the others of `before` are sent first, and what it has
    is never sent again (a resumed run repeats it to the bit). Offline nobody knows what a killed start still wrote: there
    every start writes the whole curve, and removes the folders it replaces.
    """

    def __init__(self, folder: Path, project: str, *, recipe: Record, before: list[Record]) -> None:
        wandb = import_wandb()
        known = _known(folder / "wandb.json")
        sha = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
        if known.get("project") != project or (not before and known.get("recipe") != sha):
            known = {}  # another project, or a start from nothing with another recipe: not the same curve
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", str(FINISH_SECONDS))
        older = set(folder.glob(f"wandb/offline-run-*-{known['id']}")) if known else set()
        options = {"id": known["id"], "resume": "allow"} if known else {}
        self._run: Any = None
        self._row: dict[str, float] = {}
        self._step = self._sent = -1
        try:
            self._run = wandb.init(project=project, name=folder.name, dir=str(folder), config=recipe, **options)
            self._sent = self._run.starting_step - 1 if self._run.resumed else -1
        except Exception as error:  # wandb raises classes of its own, and those of its parts
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            if not known:
                raise InputError(
                    f"log.wandb: wandb does not start ({reason}): run `wandb login`, or set WANDB_MODE=offline, or leave "
                    "out log.wandb"
                ) from None
            self._give_up(reason)
            return
        _write(folder / "wandb.json", {"id": self._run.id, "project": project, "recipe": sha})
        if self._run.offline:
            for path in older:
                shutil.rmtree(path, ignore_errors=True)
        for record in before:
            self.write(record)

    def write(self, record: Record) -> None:
        if record["step"] <= self._sent:
            return
        if record["step"] != self._step:
            self._send()
            self._step = record["step"]
        self._row |= {f"{record['kind']}/{name}": value for name, value in numbers(record).items()}

    def close(self) -> None:
        self._send()
        if self._run is not None:
            try:
                self._run.finish()
            except Exception as error:
                self._give_up(str(error) or type(error).__name__)

    def _send(self) -> None:
        """The row of the step so far."""
        if self._run is not None and self._row:
            try:
                self._run.log(self._row, step=self._step)
            except Exception as error:  # its process may have been killed: no reason to end a run
                self._give_up(str(error) or type(error).__name__)
        self._row = {}

    def _give_up(self, reason: str) -> None:
        warn(f"wandb is gone ({reason}): training goes on, the next start catches it up")
        self._run = None
        with contextlib.suppress(Exception):  # else wandb tries the same at the end of the process, with a traceback
            import_wandb().teardown()


def _known(place: Path) -> Record:
    """What an earlier start has left; nothing when there is none or it is damaged."""
    try:
        known = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) and "id" in known else {}


def _write(place: Path, known: Record) -> None:
    beside = place.with_suffix(".json.tmp")
    beside.write_text(json.dumps(known), encoding="utf-8")
    os.replace(beside, place)


def numbers(record: Record) -> dict[str, float]:
    """What can be drawn: all numbers of a record but its step and time."""
    return {
        name: value
        for name, value in record.items()
        if name not in ("step", "time") and isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def import_wandb() -> Any:
    """The package, or InputError."""
    try:
        import wandb
    except ImportError as error:
        raise InputError(
            f"log.wandb needs the package wandb ({error}): pip install 'mezzotint[watch]', or leave out log.wandb"
        ) from None
    return wandb
