"""Run folders: checkpoints that exist whole or not at all, the newest complete one, and the weights inside."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from mezzotint.models.config import ModelConfig
from mezzotint.models.errors import InputError
from mezzotint.training.distributed import Ranks
from mezzotint.training.ema import Ema
from mezzotint.training.engine import Engine

FORMAT = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """every: steps between checkpoints (the last step always has one); keep: newest ones that stay on the disk."""

    every: int = 1000
    keep: int = 2

    def __post_init__(self) -> None:
        if self.every < 1 or self.keep < 1:
            raise InputError("checkpoint.every and checkpoint.keep must be at least 1")


@dataclass(frozen=True, kw_only=True)
class RunState:
    """What a checkpoint says about itself, beside weights and optimizer."""

    format: int = FORMAT
    step: int  # optimizer steps done
    next_row: int  # of the data order; the whole position in the data
    seed: int
    world: int
    zero_stage: int
    ema_updates: int
    data_hash: str
    tokenizer_hash: str
    arms_hash: str
    recipe: str  # resolved, as YAML
    model: dict  # fields of the ModelConfig


def save(run: Path, *, state: RunState, engine: Engine, ema: Ema | None, ranks: Ranks, keep: int) -> Path:
    """Write `checkpoints/step-N`: beside, verified, synced, renamed, pointed to last; collective.

    A crash at any moment leaves either no folder of that name or a complete one. Replaces a damaged one.
    """
    final = run / "checkpoints" / f"step-{state.step}"
    beside = final.with_name(final.name + ".tmp")
    if ranks.main:
        for stale in (beside, final):
            shutil.rmtree(stale, ignore_errors=True)
        beside.mkdir(parents=True)
    ranks.barrier()
    try:
        engine.save(beside)
        if ranks.main:
            _save_tensors(beside / "weights.safetensors", _weights(engine))
            if ema is not None:
                _save_tensors(beside / "ema.safetensors", ema.weights)
            (beside / "state.json").write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):
            raise  # torch's writer of archives names its file in the message, whatever the disk said
        shutil.rmtree(beside, ignore_errors=True)
        raise InputError(
            f"{beside} cannot be written ({str(error).splitlines()[0]}): free some space; the same command goes on from "
            "the checkpoint before"
        ) from error
    ranks.barrier()  # DeepSpeed's files of all ranks are written only here
    if ranks.main:
        _seal(beside)
        os.replace(beside, final)
        _sync(final.parent)
        _point(run, final.name)
        _keep_newest(run, keep)
    ranks.barrier()
    return final


def newest(run: Path, say: Callable[[str], None]) -> Path | None:
    """The newest complete checkpoint of a run folder; None if the run never had one.

    Damaged ones are named through `say` and passed over. Raises InputError when checkpoints are there but none is
    complete: a run never silently starts again from nothing.
    """
    folders = _folders(run)
    for folder in reversed(folders):
        fault = damage(folder)
        if fault is None:
            return folder
        say(f"warning: checkpoint {folder} is damaged ({fault}); trying the one before")
    if folders or (run / "latest").exists():
        raise InputError(f"{run} has checkpoints but none is complete: restore one, or give the run another folder")
    return None


def set_aside(run: Path, step: int) -> None:
    """Rename checkpoints newer than `step` to `*.damaged`: `newest` passed them over, so they are not ones to keep."""
    for folder in _folders(run):
        if int(folder.name.removeprefix("step-")) > step:
            aside = folder.with_name(folder.name + ".damaged")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, by size and hash of every file; None if it is whole."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files, listed = manifest["files"], manifest["files_sha256"]
    except (OSError, ValueError, KeyError):
        return f"{MANIFEST} is missing or unreadable"
    if _listing_hash(files) != listed:
        return f"{MANIFEST} has changed"
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, not {entry['bytes']}"
        if _sha256(path) != entry["sha256"]:
            return f"{name} has changed"
    return None


def read_state(folder: Path) -> RunState:
    """InputError for a format this version does not know."""
    values = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    if values["format"] != FORMAT:
        raise InputError(f"{folder} has checkpoint format {values['format']}; this version reads format {FORMAT}")
    return RunState(**values)


def load_ema(folder: Path) -> dict[str, Tensor]:
    """Averaged weights; InputError if the run keeps none."""
    from safetensors.torch import load_file

    path = folder / "ema.safetensors"
    if not path.is_file():
        raise InputError(f"{folder} holds no averaged weights: the run had ema_decay 0")
    return load_file(path)


def load_weights(run_folder: str | Path, *, ema: bool) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Configuration and weights (or their average) of a run's newest complete checkpoint, by names in the Denoiser.

    Reads safetensors and JSON only. Raises InputError when the folder holds no complete checkpoint.
    """
    from safetensors.torch import load_file

    run = Path(run_folder)
    folder = newest(run, lambda sentence: print(sentence, flush=True))
    if folder is None:
        raise InputError(
            f"{run} holds no checkpoint: train first, or give the run folder that `run:` in the recipe names"
        )
    config = ModelConfig.from_dict(read_state(folder).model)
    return config, load_ema(folder) if ema else load_file(folder / "weights.safetensors")


def _weights(engine: Engine) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in engine.objective.model.named_parameters()}


def _save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    save_file({name: value.to("cpu").contiguous() for name, value in tensors.items()}, path)


def _seal(folder: Path) -> None:
    """Hash and sync every file; the manifest is written last."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    entries = {}
    for path in files:
        entries[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        _sync(path)
    manifest = folder / MANIFEST
    content = {"format": FORMAT, "files_sha256": _listing_hash(entries), "files": entries}
    manifest.write_text(json.dumps(content, indent=1), encoding="utf-8")
    _sync(manifest)
    for inner in (p for p in (folder, *folder.rglob("*")) if p.is_dir()):
        _sync(inner)


def _point(run: Path, name: str) -> None:
    beside = run / "latest.tmp"
    beside.write_text(name + "\n", encoding="utf-8")
    _sync(beside)
    os.replace(beside, run / "latest")
    _sync(run)


def _keep_newest(run: Path, keep: int) -> None:
    """Remove older checkpoints and what interrupted saves left; the manifest goes first: no half looks whole."""
    for old in _folders(run)[:-keep]:
        (old / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(old, ignore_errors=True)
    for stale in (run / "checkpoints").glob("step-*.tmp"):
        shutil.rmtree(stale, ignore_errors=True)


def _folders(run: Path) -> list[Path]:
    """Checkpoint folders under their final names, oldest first."""
    found = [p for p in (run / "checkpoints").glob("step-*") if p.name.removeprefix("step-").isdigit()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def _listing_hash(entries: dict) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Force a file's bytes, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
