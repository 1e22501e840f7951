"""What a run folder says about its run, at one glance: where it is, how it goes, how it ended; several as a table."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from mezzotint.models.errors import InputError
from mezzotint.training import checkpoint, lock, outcome, strict
from mezzotint.training.metrics import duration, read_records

RECENT = 20  # training records whose losses are averaged
READ: dict[str, set[str]] = {  # what is read of records, by kind
    "start": set(),
    "train": {"loss", "lr", "gradient_norm", "tokens", "unique_tokens_per_second", "utilization", "seconds"},
    "validation": {"nats_per_token", "nats_per_token_error", "bits_per_byte", "bits_per_byte_error"},
    "event": {"event"},
}
COLUMNS = ("run", "state", "step", "tokens", "loss", "bits/byte", "tokens/s", "checkpoint", "left", "skipped", "spikes")


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


def status(folders: list[Path]) -> tuple[str, list[str]]:
    """Text for the user, and a sentence for every folder that is no run."""
    found, faults = [], []
    for folder in folders:
        try:
            found.append(glance(folder))
        except InputError as error:
            faults.append(str(error))
    if len(folders) == 1:
        return "\n".join(lines(found[0])) if found else "", faults
    return table(found) if found else "", faults


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


def lines(run: Glance) -> list[str]:
    """One run, a line a subject; subjects that it has nothing to say about are left out."""
    seen = f", last record {ago(run.silent)}" if run.running and run.silent is not None else ""
    found = [("", f"{run.folder}: {run.state}{seen}")]
    share = f" of {run.steps:,} ({run.step / run.steps:.1%})" if run.steps else ""
    found.append(("step", f"{run.step:,}{share}"))
    if run.train is not None:
        t = run.train
        left = f", {duration(t.get('seconds_left'))} left" if run.step < (run.steps or 0) else ""
        starts = f" in {run.starts} start(s)" if run.starts else ""
        found.append(("time", f"{duration(t['seconds'])} of training{starts}{left}"))
        found.append(("tokens", f"{t['tokens']:,}"))
        loss = f"{_number(run.loss)} nats/token, mean of the last {run.averaged} record(s)"
        found.append(("loss", f"{loss}; gradient norm {_number(t['gradient_norm'])}, rate {t['lr']:.2e}"))
    if run.bound is not None:
        b = run.bound
        units = (("nats_per_token", "nats/token"), ("bits_per_byte", "bits/byte"))
        both = ", ".join(f"{_number(b[name])} ± {_number(b[name + '_error'])} {unit}" for name, unit in units)
        found.append(("bound", f"{both} (step {b['step']:,})"))
    if run.train is not None:
        found.append(("rate", _rate(run.train)))
        if "memory_bytes" in run.train:
            found.append(("memory", f"{size(run.train['memory_bytes'])} at most on a rank"))
    newest = "none" if run.checkpoint is None else f"{run.checkpoint.name}, written {ago(run.checkpoint_age)}"
    found += [("checkpoint", newest), ("disk", size(run.bytes))]
    for name, steps in (("skipped", run.skipped), ("spikes", run.spikes)):
        if steps:
            found.append((name, f"{len(steps)}, the last at step {steps[-1]:,}"))
    return [text if not name else f"  {name:<11} {text}" for name, text in found]


def table(runs: list[Glance]) -> str:
    """A line a run."""
    cells = [COLUMNS, *(_row(run) for run in runs)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(COLUMNS))]
    padded = ([c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))] for row in cells)
    return "\n".join("  ".join(row).rstrip() for row in padded)


def ago(seconds: float | None) -> str:
    """How long something is past, to one figure's use."""
    if seconds is None:
        return "some time ago"
    for unit, length, limit in (("s", 1, 100), ("min", 60, 100), ("h", 3600, 48)):
        if seconds < limit * length:
            return f"{max(0.0, seconds) / length:.0f} {unit} ago"
    return f"{seconds / 86_400:.0f} days ago"


def size(count: int) -> str:
    """Bytes in the unit that suits; 1 GB is 10^9."""
    for unit, length in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= length:
            return f"{count / length:.2f} {unit}"
    return f"{count / 1e3:.1f} kB"


def _row(run: Glance) -> tuple[str, ...]:
    train = run.train or {}
    left = duration(train.get("seconds_left")) if run.step < (run.steps or 0) else "-"
    newest = "-" if run.checkpoint is None else f"{run.checkpoint.name} {ago(run.checkpoint_age)}"
    return (
        str(run.folder),
        run.state.partition(":")[0],
        f"{run.step:,}/{run.steps:,}" if run.steps else f"{run.step:,}",
        f"{train['tokens']:,}" if train else "-",
        _number(run.loss),
        _number(run.bound["bits_per_byte"]) if run.bound else "-",
        f"{train['unique_tokens_per_second']:,.0f}" if train else "-",
        newest,
        left,
        str(len(run.skipped)),
        str(len(run.spikes)),
    )


def _rate(train: dict) -> str:
    parts = [
        (name, train[f"seconds_{name}"])
        for name in ("data", "forward", "backward", "step")
        if f"seconds_{name}" in train
    ]
    split = ": " + ", ".join(f"{name} {seconds:.3g}" for name, seconds in parts) if parts else ""
    step = f", {train['seconds_per_step']:.3g} s a step{split}" if "seconds_per_step" in train else ""
    return f"{train['unique_tokens_per_second']:,.0f} tokens/s, {train['utilization']:.1%} of peak{step}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _state(folder: Path, end: outcome.Outcome | None, *, started: bool) -> str:
    holder = _holder(folder)
    if holder is not None:
        return f"running as {holder}"
    if end is not None:
        return f"{end.word} {ago(time.time() - end.time)}: {end.reason or 'no reason given'}"
    return "died without a word: start it again to go on" if started else "not started"


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
        try:
            values = json.loads((folder / lock.NAME).read_text(encoding="utf-8"))
            return f"process {values['pid']} on {values['host']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"
    finally:
        os.close(descriptor)


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
