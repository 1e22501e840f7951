"""Owns which token files `adopt` takes from what it was given: pairs, parquet, arrow, saved datasets; in which order."""

from pathlib import Path

from mezzotint.data.errors import InputError
from mezzotint.data.files import read_json

KINDS = {".bin": "megatron", ".parquet": "parquet", ".arrow": "arrow"}


def token_files(inputs: tuple[str, ...], *, pattern: str, split: str) -> tuple[list[Path], str]:
    """Absolute paths of the token files and their one kind; folders give theirs sorted by name.

    A pair is named by its `.bin`, its `.idx` or the name without either. Raises InputError in one sentence.
    """
    found: list[Path] = []
    for name in inputs:
        path = Path(name).expanduser()
        found += _in_folder(path, pattern, split) if path.is_dir() else [_one_file(path)]
    files = [path.absolute() for path in found]  # links stay: a hub's cache keeps contents under names without suffix
    kinds = sorted({KINDS[path.suffix] for path in files})
    if len(kinds) > 1:
        raise InputError(f"{' and '.join(inputs)} hold both {' and '.join(kinds)} files: choose with --pattern")
    contents = [path.resolve() for path in files]
    if len(set(contents)) < len(contents):
        twice = next(path for path, content in zip(files, contents) if contents.count(content) > 1)
        raise InputError(f"{twice} is named twice: its documents would come twice in every epoch")
    return files, kinds[0]


def _one_file(path: Path) -> Path:
    if path.suffix == ".idx":
        path = path.with_suffix(".bin")
    if path.suffix not in KINDS and path.with_name(path.name + ".bin").is_file():
        path = path.with_name(path.name + ".bin")
    if not path.is_file():
        raise InputError(f"there is no file or folder {path}: check the path")
    if path.suffix not in KINDS:
        raise InputError(f"{path} is no token file: give a Megatron .bin/.idx pair, .parquet, .arrow or a folder")
    if path.suffix == ".bin" and not path.with_suffix(".idx").is_file():
        raise InputError(f"{path.with_suffix('.idx')} is missing: a Megatron .bin is read by its .idx")
    return path


def _in_folder(path: Path, pattern: str, split: str) -> list[Path]:
    if (path / "dataset_dict.json").is_file():
        splits = read_json(path / "dataset_dict.json").get("splits", [])
        if split not in splits:
            raise InputError(f"{path} has no split {split!r}: its splits are {', '.join(splits)}; use --split")
        path = path / split
    if (path / "state.json").is_file():
        return _saved_dataset(path)
    there = sorted(file for file in path.rglob(pattern) if file.is_file() and file.suffix in KINDS)
    files = [file for file in there if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    if not files:
        matching = "" if pattern == "*" else f" in files named {pattern}"
        raise InputError(
            f"there are no token files in {path}{matching}: give .bin/.idx pairs, .parquet or .arrow files"
        )
    return [_one_file(file) for file in files]


def _saved_dataset(path: Path) -> list[Path]:
    """The files of a folder that `datasets` saved, in its order."""
    state = read_json(path / "state.json")
    if state.get("_indices_data_files"):
        raise InputError(f"{path} is a selection of other rows: save it again after flatten_indices()")
    files = [path / entry["filename"] for entry in state.get("_data_files", [])]
    if not files:
        raise InputError(f"{path} lists no data files in state.json: save the dataset again")
    return [_one_file(file) for file in files]
