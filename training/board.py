"""Where curves are looked at beside the run's own JSONL: TensorBoard, and wandb for those who have it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import socket
import time
from pathlib import Path
from typing import Any, Protocol

from mezzotint.models.errors import InputError
from mezzotint.training.append import Appended

Record = dict[str, Any]


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
    """One wandb run over all starts of a run folder; its id and the last step sent are kept in `folder/wandb.json`.

    A row of wandb is a step, and it is sent whole: once a record of a later step comes, or at the end. Steps that an
    earlier start has sent are not sent again (a resumed run repeats them to the bit); records in `before` that it
    has not sent are sent first.
    """

    def __init__(self, folder: Path, project: str, *, recipe: Record, before: list[Record]) -> None:
        wandb = import_wandb()
        self._place = folder / "wandb.json"
        known = self._read()
        sha = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
        if known.get("project") != project or (not before and known.get("recipe") != sha):
            known = {}  # another project, or a start from nothing with another recipe: not the same curve
        options = {"id": known["id"], "resume": "allow"} if known else {}
        try:
            self._run = wandb.init(project=project, name=folder.name, dir=str(folder), config=recipe, **options)
        except Exception as error:  # wandb raises classes of its own, and those of its parts
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise InputError(
                f"log.wandb: wandb does not start ({reason}): run `wandb login`, or set WANDB_MODE=offline, or leave out "
                "log.wandb"
            ) from None
        self._known = {"id": self._run.id, "project": project, "recipe": sha, "step": known.get("step", -1)}
        # a server says itself which steps it has; offline, the last one sent
        self._sent = self._run.step - 1 if self._run.resumed else self._known["step"]
        self._row: dict[str, float] = {}
        self._step = -1
        self._save()
        for record in before:
            self.write(record)

    def write(self, record: Record) -> None:
        step = record["step"]
        if step <= self._sent:
            return
        if step != self._step:
            self._send()
            self._step = step
        self._row |= {f"{record['kind']}/{name}": value for name, value in numbers(record).items()}

    def close(self) -> None:
        self._send()
        self._run.finish()

    def _send(self) -> None:
        """The row of the step so far, then how far we are."""
        if self._row:
            self._run.log(self._row, step=self._step)
            self._sent, self._row = self._step, {}
            self._save()

    def _read(self) -> Record:
        try:
            known = json.loads(self._place.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) and {"id", "step"} <= known.keys() else {}

    def _save(self) -> None:
        beside = self._place.with_suffix(".json.tmp")
        beside.write_text(json.dumps(self._known | {"step": self._sent}), encoding="utf-8")
        os.replace(beside, self._place)


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
