"""Saving beside training: copy to host memory, write in a thread, and put in place when every rank has written."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from mezzotint.training import checkpoint
from mezzotint.training.append import warn
from mezzotint.training.checkpoint import CheckpointConfig, RunState
from mezzotint.training.distributed import Ranks
from mezzotint.training.fragments import WEIGHTS
from mezzotint.training.pieces import Piece, write_pieces

SPARE = 1 << 26  # bytes beside the tensors that a checkpoint may need
WRITTEN, FAILED, SPOILED = range(3)  # what became of a rank's share


class Saver:
    """The checkpoints of a run, one at a time; every method is called by all ranks at the same point of the loop.

    A checkpoint is written in the shadow of the step after it, and is in place before that step counts as done (`wait`).
    So a kill at any moment costs checkpoint.every steps at the most, and a disk holds training up only by what it takes
    longer than a step.

    A crash at any moment leaves, under a final name, complete checkpoints only. A save that fails (a full disk) is told
    and leaves the one before; training goes on.
    """

    def __init__(self, run: Path, config: CheckpointConfig, ranks: Ranks) -> None:
        self._run, self._config, self._ranks = run, config, ranks
        self._thread: threading.Thread | None = None
        self._step = -1  # the newest that was asked for here, in place or not; -1 before the first
        self._begun = self._blocked = 0.0
        self._share: int | None = None  # what became of this rank's share; None while it is being written
        self.spoiled = False  # weights that are not finite came up: nothing may go on from them

    def begin(self, state: RunState, pieces: Sequence[Piece]) -> bool:
        """Copy and start to write; collective. False, told on the main rank, when it cannot be begun.

        pieces: views; the ranks' pieces together are everything. Waits for a save that is still being written.
        """
        self.finish()
        self._step, begun = state.step, time.perf_counter()
        beside = self._beside(state.step)
        fault = self._prepare(beside, pieces) if self._ranks.main else ""
        if self._ranks.total(float(bool(fault))):
            self._tell(state.step, fault)
            return False
        copies = [Piece(p.kind, p.name, p.start, p.values.detach().to("cpu", copy=True)) for p in pieces]
        self._share, self._begun = None, begun
        self._thread = threading.Thread(
            target=self._write, args=(beside, state, copies), name="checkpoint", daemon=True
        )
        self._thread.start()
        self._blocked = time.perf_counter() - begun
        return True

    def shares(self) -> list[float]:
        """This rank's entries (written, failed, spoiled) of the sum that each step makes anyway."""
        return [float(self._share == kind) for kind in (WRITTEN, FAILED, SPOILED)]

    def settle(self, totals: Sequence[float]) -> None:
        """Put a checkpoint in place, or drop it, once all ranks are through; `totals` are the sums of `shares`."""
        if self._thread is None or sum(totals) < self._ranks.world:
            return
        self._thread.join()
        self._thread, self._share = None, None
        self.spoiled = totals[SPOILED] > 0
        if not self._ranks.main:
            return
        beside, fault = self._beside(self._step), ""
        if totals[WRITTEN] == self._ranks.world:
            try:
                self._put_in_place(beside)
            except OSError as error:
                fault = _words(error)
            else:
                self._tidy()
        elif self.spoiled:
            fault = "weights are not finite"
        else:
            fault = "a rank could not write its share"
        if fault:
            shutil.rmtree(beside, ignore_errors=True)
            self._tell(self._step, fault)

    def wait(self) -> None:
        """Wait for the save that is being written, if one is, and settle it; collective."""
        if self._thread is not None:
            began = time.perf_counter()
            self._thread.join()
            totals = self._ranks.sum(torch.tensor(self.shares())).tolist()
            self._blocked += time.perf_counter() - began
            self.settle(totals)

    def finish(self) -> bool:
        """`wait`; whether the newest checkpoint that was asked for is in place."""
        if self._step < 0:
            return True
        self.wait()
        there = (self._run / "checkpoints" / f"step-{self._step}" / checkpoint.MANIFEST).is_file()
        return bool(self._ranks.total(float(self._ranks.main and there)))

    def _beside(self, step: int) -> Path:
        return self._run / "checkpoints" / f"step-{step}.tmp"

    def _prepare(self, beside: Path, pieces: Sequence[Piece]) -> str:
        """An empty folder beside the final name; what is in the way, in words, or nothing."""
        try:
            checkpoint.sweep(self._run)
            beside.mkdir(parents=True)
            needed = self._ranks.world * 4 * sum(piece.values.numel() for piece in pieces) + SPARE  # shares are equal
            free = shutil.disk_usage(beside).free
        except OSError as error:
            return _words(error)
        if free < needed:
            shutil.rmtree(beside, ignore_errors=True)
            return f"the disk has {free / 2**20:,.0f} MiB free and {needed / 2**20:,.0f} MiB are needed"
        return ""

    def _write(self, beside: Path, state: RunState, pieces: list[Piece]) -> None:
        """The thread: this rank's file and a note of its size and hash; the main rank writes the state too."""
        rank, world = self._ranks.rank, self._ranks.world
        name = f"rank-{rank:05d}-of-{world:05d}"
        try:
            if not all(bool(torch.isfinite(piece.values).all()) for piece in pieces if piece.kind == WEIGHTS):
                self._share = SPOILED
                return
            entries = {f"{name}.safetensors": write_pieces(beside / f"{name}.safetensors", pieces)}
            if self._ranks.main:
                content = json.dumps(asdict(state), indent=1).encode()
                entries[checkpoint.STATE] = checkpoint.write_synced(beside / checkpoint.STATE, content)
            checkpoint.write_synced(beside / f"{name}.json", json.dumps(entries).encode())
            self._share = WRITTEN
        except Exception as error:  # whatever it is, the loop must hear of it: nobody looks at this thread
            warn(f"rank {rank} could not write {beside} ({_words(error)})")
            self._share = FAILED

    def _put_in_place(self, beside: Path) -> None:
        entries: dict[str, dict] = {}
        notes = sorted(beside.glob("rank-*.json"))
        if len(notes) != self._ranks.world:
            raise OSError(f"{beside} has the notes of {len(notes)} ranks, not of {self._ranks.world}")
        for note in notes:
            entries |= json.loads(note.read_text(encoding="utf-8"))
            note.unlink()
        for name, entry in entries.items():
            if (beside / name).stat().st_size != entry["bytes"]:
                raise OSError(f"{beside / name} has another size than was written")
        checkpoint.seal(beside, entries, self._run / "checkpoints" / f"step-{self._step}")
        took = time.perf_counter() - self._begun
        self._ranks.say(f"checkpoint step-{self._step}: {took:.1f} s, of which training waited {self._blocked:.2f} s")

    def _tidy(self) -> None:
        """The pointer and what is old; without them the new checkpoint is there all the same."""
        try:
            checkpoint.point(self._run, f"step-{self._step}")
            checkpoint.prune(self._run, self._config)
        except OSError as error:
            warn(f"checkpoint step-{self._step} is complete, but {self._run} could not be tidied ({_words(error)})")

    def _tell(self, step: int, fault: str) -> None:
        self._ranks.say(
            f"warning: no checkpoint of step {step} ({fault}); the one before stays the newest: free some space or mend "
            f"{self._run}"
        )


def _words(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
