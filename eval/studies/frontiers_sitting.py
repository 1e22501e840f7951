"""Sittings of the study of frontiers: a training command runs until its steps or its processor time are spent."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from mezzotint.data.errors import InputError
from mezzotint.data.files import write_bytes

VOCABULARY, HELDOUT = 2048, 0.03  # of the corpus of `make demo`
STOPPED = 85  # exit code of a trainer that was asked to stop and has saved
POLL = 2.0  # seconds
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class Place:
    """Where the study keeps what it makes; with dry_run commands are printed only."""

    root: Path
    dry_run: bool = False

    @property
    def data(self) -> Path:
        return self.root / "data"

    def run(self, name: str) -> Path:
        return self.root / "runs" / name


def prepare(place: Place) -> None:
    """Tokenizer and shards of the standard library, a held-out part apart, as the demo makes them."""
    tokenizer, share = place.root / "tokenizer", ["--corpus", "stdlib", "--heldout", str(HELDOUT)]
    if not (tokenizer / "tokenizer.model").exists():
        size = ["--vocab-size", str(VOCABULARY), "--out", str(tokenizer)]
        ask(place, ["mezzotint.data", "train-tokenizer", *share, *size], show=True)
    if not (place.data / "heldout" / "manifest.json").exists():
        where = ["--tokenizer", str(tokenizer), "--out", str(place.data)]
        ask(place, ["mezzotint.data", "prepare", *share, *where], show=True)


def ask(place: Place, module_and_arguments: list[str], *, show: bool = False) -> str:
    """What `python -m ...` says on its standard output; InputError where it fails. show: print the command."""
    if show or place.dry_run:
        print("$ python -m " + shlex.join(module_and_arguments), flush=True)
    if place.dry_run:
        return ""
    done = subprocess.run(
        [sys.executable, "-m", *module_and_arguments], env=environment(), stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise InputError(f"{' '.join(module_and_arguments[:2])} ended with code {done.returncode}: see above")
    return done.stdout


def train(place: Place, name: str, command: list[str], *, minutes: float | None = None) -> None:
    """Run the training command, its words in a log, until it ends or the run has spent `minutes` core-minutes in all.

    Processor time counts all of the process, its start and its bounds; it is written down every few seconds.
    """
    print("$ python -m " + shlex.join(command), flush=True)
    if place.dry_run:
        return
    before = core_minutes(place, name)
    if minutes is not None and before >= minutes:
        return
    log = place.root / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", encoding="utf-8") as written:
        child = psutil.Popen(
            [sys.executable, "-m", *command], env=environment(), stdout=written, stderr=written, preexec_fn=end_with_us
        )
        try:
            spent = _watch(place, name, child, before, minutes)
        finally:
            if child.poll() is None:  # an error, or Ctrl-C: what is trained is kept
                child.terminate()
                child.wait()
    stopped = minutes is not None and spent >= minutes and child.returncode == STOPPED
    if child.returncode and not stopped:
        raise InputError(f"{name} ended with code {child.returncode}: see {log}")


def _watch(place: Place, name: str, child: psutil.Popen, before: float, minutes: float | None) -> float:
    """Core-minutes of the run when its process has ended, which is asked to stop once they are spent."""
    spent, asked = before, False
    while child.poll() is None:
        try:
            times = child.cpu_times()
        except psutil.Error:  # it has ended just now
            break
        spent = before + (times.user + times.system) / 60
        path = _minutes(place, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, json.dumps({"core_minutes": round(spent, 3)}).encode())
        if minutes is not None and spent >= minutes and not asked:
            child.terminate()  # it finishes its step and saves
            asked = True
        time.sleep(POLL)
    child.wait()
    return spent


def core_minutes(place: Place, name: str) -> float:
    """Processor time of a run so far, all sittings."""
    path = _minutes(place, name)
    return json.loads(path.read_text(encoding="utf-8"))["core_minutes"] if path.exists() else 0.0


def _minutes(place: Place, name: str) -> Path:
    return place.root / "minutes" / f"{name}.json"


def end_with_us() -> None:
    """A study that is killed leaves no endless trainer behind: it is asked to stop (Linux; nothing elsewhere)."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
