"""Owns the choice of files: which of a folder are read, as which format, and what says that they have changed."""

from pathlib import Path
from urllib.parse import urlsplit

from mezzotint.data.errors import InputError

TABLES = {"json": (".json", ".jsonl", ".ndjson"), "parquet": (".parquet",)}
PACKED = (".gz", ".zst", ".bz2", ".xz")


def files_of_one_kind(path: Path, pattern: str) -> tuple[list[Path], str]:
    """The files to read and the `datasets` builder that reads them; a folder with tables ignores its other files."""
    if path.is_file():
        files = [path]
    else:
        found = sorted(file for file in path.rglob(pattern) if file.is_file())
        files = [file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    files = [file for file in files if file.stat().st_size]
    if not files:
        matching = "" if pattern == "*" else f" in files named {pattern}"
        raise InputError(f"there is no text in {path}{matching}: give a file or folder that holds some")
    tables = {kind: [file for file in files if _bare_suffix(file) in ends] for kind, ends in TABLES.items()}
    kinds = [kind for kind, members in tables.items() if members]
    if len(kinds) > 1:
        raise InputError(f"{path} holds both json and parquet files: choose with --pattern, e.g. '*.parquet'")
    return (tables[kinds[0]], kinds[0]) if kinds else (files, "text")


def stamps(files: list[Path]) -> list[str]:
    """Name, size and time of change of each file."""
    return [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]


def is_address(name: str) -> bool:
    """Whether `name` is one or more web addresses, with spaces between them."""
    return all(part.startswith(("http://", "https://")) for part in name.split()) and bool(name.split())


def kind_of_addresses(addresses: list[str]) -> str:
    """The `datasets` builder that reads all of `addresses`; InputError when they are of several kinds."""
    files = [Path(urlsplit(address).path) for address in addresses]
    kinds = {next((kind for kind, ends in TABLES.items() if _bare_suffix(file) in ends), "text") for file in files}
    if len(kinds) > 1:
        raise InputError(f"{' '.join(addresses)} are of several kinds ({', '.join(sorted(kinds))}): give one at a time")
    return kinds.pop()


def _bare_suffix(file: Path) -> str:
    """The suffix that tells the format, with a packing suffix taken off."""
    return Path(file.stem).suffix if file.suffix in PACKED else file.suffix


def looks_like_path(name: str) -> bool:
    """Whether a name can only be a path: a hub name is `name` or `owner/name` without a known file suffix."""
    path = Path(name)
    known = (*PACKED, *sum(TABLES.values(), ()), ".txt", ".md", ".csv", ".py")
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or path.suffix in known or name.endswith("/")
