"""Run folders: what a checkpoint is, which of them are complete, the newest complete one, and the weights inside."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mezzotint.models.config import ModelConfig
from mezzotint.models.errors import InputError
from mezzotint.training.fragments import WEIGHTS
from mezzotint.training.pieces import Pieces, sha256

FORMAT = 2
MANIFEST = "manifest.json"
STATE = "state.json"
EMA = "ema"  # kind of a piece, beside those of fragments
_NAME = re.compile(r"step-(0|[1-9][0-9]*)")  # as written here: nothing else is taken for a checkpoint
_ASIDE = re.compile(_NAME.pattern + r"\.damaged")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """every: steps between checkpoints (the last step always has one); at_start: one before the first step as well,
    which finds a full disk or a wrong permission at once; keep: newest ones that stay on the disk; keep_every: those
    of steps that are its multiples stay for good, 0 for none."""

    every: int = 1000
    at_start: bool = True
    keep: int = 2
    keep_every: int = 0

    def __post_init__(self) -> None:
        if self.every < 1 or self.keep < 1:
            raise InputError("checkpoint.every and checkpoint.keep must be at least 1")
        if self.keep_every < 0 or self.keep_every % self.every:
            raise InputError(
                f"checkpoint.keep_every is {self.keep_every}; it must be 0 or a multiple of checkpoint.every {self.every}"
            )


@dataclass(frozen=True, kw_only=True)
class RunState:
    """What a checkpoint says about itself, beside weights and moments. Nothing in it depends on the number of ranks."""

    format: int = FORMAT
    step: int  # steps done, skipped ones too
    next_row: int  # of the data order; the whole position in the data
    seed: int  # of the noise, whose draws are functions of it and the step
    ema_updates: int
    validation_due: bool  # the bound of this step was interrupted and is still to be taken
    history: dict  # of guard.History: updates, skipped steps, recent losses and norms
    data_hash: str
    tokenizer_hash: str
    arms_hash: str
    recipe: str  # resolved, as YAML
    model: dict  # fields of the ModelConfig
    shapes: dict[str, list[int]]  # of every parameter
    world: int  # ranks that wrote it; any other number may read it
    zero_stage: int


def newest(run: Path, say: Callable[[str], None]) -> Path | None:
    """The newest complete checkpoint of a run folder; None if the run never had one.

    Damaged ones are named through `say` and passed over. Raises InputError when checkpoints are there but none is
    complete: a run never silently starts again from nothing.
    """
    folders = candidates(run)
    for folder in folders:
        fault = damage(folder)
        if fault is None:
            return folder
        say(passed_over(folder, fault))
    require_none(run, folders)
    return None


def candidates(run: Path) -> list[Path]:
    """Checkpoint folders under their final names, newest first."""
    found = [path for path in (run / "checkpoints").glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """Of a checkpoint, set aside or not."""
    return int(folder.name.removeprefix("step-").removesuffix(".damaged"))


def passed_over(folder: Path, fault: str) -> str:
    return f"warning: checkpoint {folder} is damaged ({fault}); trying the one before"


def require_none(run: Path, folders: list[Path]) -> None:
    """InputError unless the run never had a checkpoint; called when none of `folders` is complete."""
    if folders or (run / "latest").exists():
        raise InputError(f"{run} has checkpoints but none is complete: restore one, or give the run another folder")


def damage(folder: Path, *, share: tuple[int, int] = (0, 1)) -> str | None:
    """What is wrong with a checkpoint, by size and hash of every file; None if it is whole.

    share (r, n): rank r of n looks at the contents of every n-th file only, so that n ranks together see all;
    (-1, 1) looks into none.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files, listed = dict(manifest["files"]), manifest["files_sha256"]
        sizes = {name: int(entry["bytes"]) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MANIFEST} is missing or unreadable"
    if _listing_hash(files) != listed:
        return f"{MANIFEST} has changed"
    for place, (name, size) in enumerate(sizes.items()):
        path = folder / name
        try:
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes, not {size}"
            if place % share[1] == share[0] and sha256(path) != files[name]["sha256"]:
                return f"{name} has changed"
        except OSError as error:  # a bad sector, a file server that is not well
            return f"{name} cannot be read ({error.strerror})"
    return None


def seal(beside: Path, entries: dict[str, dict], final: Path) -> None:
    """Make a complete checkpoint of the folder `beside`, whose files are `entries`, all written and synced."""
    content = {"format": FORMAT, "files_sha256": _listing_hash(entries), "files": entries}
    write_synced(beside / MANIFEST, json.dumps(content, indent=1).encode())
    sync(beside)
    if final.exists():  # a damaged one of the same step
        shutil.rmtree(final)
    os.replace(beside, final)
    sync(final.parent)


def point(run: Path, name: str) -> None:
    """The pointer for people and scripts; `newest` looks for itself, and wants it only to know that there was one.

    One that says so already is left alone: its time is that of the checkpoint, by which an export is known to be older.
    """
    pointer, content = run / "latest", (name + "\n").encode()
    with contextlib.suppress(OSError):
        if pointer.read_bytes() == content:
            return
    write_synced(run / "latest.tmp", content)
    os.replace(run / "latest.tmp", pointer)
    sync(run)


def prune(run: Path, config: CheckpointConfig) -> None:
    """Remove what is neither new nor to be kept; the manifest goes first, so that no half looks whole."""
    for old in candidates(run)[config.keep :]:
        if not (config.keep_every and step_of(old) and step_of(old) % config.keep_every == 0):
            (old / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(old, ignore_errors=True)


def sweep(run: Path) -> None:
    """Remove what interrupted saves left; only while no save is under way."""
    for stale in (run / "checkpoints").glob("step-*.tmp"):
        shutil.rmtree(stale, ignore_errors=True)


def set_aside(run: Path, step: int, say: Callable[[str], None]) -> None:
    """Rename checkpoints newer than `step` to `*.damaged`: `newest` passed them over, so they are not ones to keep.

    The newest of all that were ever set aside stays, to be looked at; those before it are removed. Both are said.
    """
    for folder in candidates(run):
        if step_of(folder) > step:
            aside = folder.with_name(folder.name + ".damaged")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
    kept = sorted(damaged(run), key=step_of, reverse=True)
    for folder in kept[1:]:
        say(f"removing {folder} ({_megabytes(folder)}), damaged and older than {kept[0].name}")
        shutil.rmtree(folder, ignore_errors=True)
    if kept:
        say(f"{kept[0]} ({_megabytes(kept[0])}) is damaged and stays only to be looked at: remove it when you like")


def damaged(run: Path) -> list[Path]:
    """Checkpoints that were set aside, in no order."""
    return [path for path in (run / "checkpoints").glob("step-*.damaged") if _ASIDE.fullmatch(path.name)]


def _megabytes(folder: Path) -> str:
    return f"{sum(path.stat().st_size for path in folder.rglob('*') if path.is_file()) / 2**20:,.1f} MiB"


def read_state(folder: Path) -> RunState:
    """InputError for a format this version does not know."""
    values = json.loads((folder / STATE).read_text(encoding="utf-8"))
    if values["format"] != FORMAT:
        raise InputError(
            f"{folder} has checkpoint format {values['format']}; this version reads format {FORMAT}: use the version of "
            "mezzotint that wrote it, or start from its release with init_from"
        )
    return RunState(**values)


def load_weights(run_folder: str | Path, *, ema: bool) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Configuration and weights (or their average) of a run's newest complete checkpoint, by names in the Denoiser.

    Reads safetensors and JSON only. Raises InputError when the folder holds no complete checkpoint.
    """
    run = Path(run_folder)
    folder = newest(run, lambda sentence: print(sentence, flush=True))
    if folder is None:
        raise InputError(
            f"{run} holds no checkpoint: train first, or give the run folder that `run:` in the recipe names"
        )
    return read_weights(folder, ema=ema)


def read_weights(folder: Path, *, ema: bool) -> tuple[ModelConfig, dict[str, Tensor]]:
    """`load_weights` of one checkpoint, which is taken to be complete. InputError for an average that is not kept."""
    state, pieces = read_state(folder), Pieces(folder)
    if ema and not pieces.has(EMA):
        raise InputError(f"{folder} holds no averaged weights: the run had ema_decay 0")
    return ModelConfig.from_dict(state.model), pieces.whole(EMA if ema else WEIGHTS, state.shapes)


def write_synced(path: Path, content: bytes) -> dict:
    """Write a file and force it to the disk: {"bytes": ..., "sha256": ...}."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def sync(folder: Path) -> None:
    """Force a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _listing_hash(entries: dict) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
