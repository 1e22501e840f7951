"""Owns the taking over of token files made elsewhere: scanned once, checked, and listed in a manifest where they lie."""

from pathlib import Path
from typing import Any

from mezzotint.data.adopt_file import AdoptConfig, FileScan
from mezzotint.data.adopt_inputs import token_files
from mezzotint.data.errors import InputError
from mezzotint.data.files import sha256_of, write_bytes
from mezzotint.data.local_files import stamps
from mezzotint.data.manifest import Manifest, read_manifest
from mezzotint.data.parts import TRAIN
from mezzotint.data.prepare import tokenizer_name
from mezzotint.data.shards import token_dtype
from mezzotint.data.sources import Position
from mezzotint.data.tokenizer import Tokenizer, load_tokenizer
from mezzotint.data.workspace import Part, Workspace

EOS_RULES = ("auto", "keep", "add")


def adopt(config: AdoptConfig) -> Manifest:
    """Scan token files and write a manifest of them; a run that was killed goes on with the next file.

    Nothing is copied, and nothing but the manifest changes for who reads it. Raises InputError for ids outside the
    vocabulary, documents of which some end with `<eos>` and some do not, and damaged or foreign files.
    """
    _check(config)
    tokenizer = load_tokenizer(config.tokenizer)
    if config.end_id >= tokenizer.vocab_size:
        raise InputError(f"end_id is {config.end_id}, but {tokenizer.files[0]} has {tokenizer.vocab_size} ids")
    files, kind = token_files(config.inputs, pattern=config.pattern, split=config.split)
    space = Workspace(Path(config.out), (TRAIN,), _settings(config, tokenizer, files), maker="adopt")
    parts = space.open()
    if not space.finished():
        try:
            write_bytes(space.out / tokenizer_name(tokenizer), tokenizer.files[0].read_bytes())
            _scan_files(config, tokenizer, files, kind, space, parts)
            _write_manifest(config, tokenizer, space, parts)
        except InputError:
            space.discard_if_useless()
            raise
    space.close()
    return read_manifest(space.out)


def _check(config: AdoptConfig) -> None:
    if not config.inputs or "" in config.inputs:
        raise InputError("--input is empty: name token files or a folder that holds some")
    if config.eos not in EOS_RULES:
        raise InputError(f"no rule {config.eos!r} for <eos>: choose one of {', '.join(EOS_RULES)}")


def _settings(config: AdoptConfig, tokenizer: Tokenizer, files: list[Path]) -> dict[str, Any]:
    """Everything that decides what is written."""
    sizes = [file.with_suffix(".idx") for file in files if file.suffix == ".bin"]
    return {
        "inputs": list(config.inputs),
        "pattern": config.pattern,
        "split": config.split,
        "column": config.column,
        "eos": config.eos,
        "end_id": config.end_id,
        "tokenizer": tokenizer.sha256,
        "files": sha256_of("\n".join([*map(str, files), *stamps(files), *stamps(sizes)]).encode()),
    }


def _scan_files(
    config: AdoptConfig, tokenizer: Tokenizer, files: list[Path], kind: str, space: Workspace, parts: list[Part]
) -> None:
    """Scan every file that is not in `parts` yet, and append it."""
    from tqdm import tqdm

    sizes = [file.stat().st_size for file in files]
    bar = tqdm(
        total=sum(sizes),
        initial=sum(sizes[: len(parts)]),
        unit="B",
        unit_scale=True,
        desc="scanning",
        mininterval=0.5,
        disable=None,
    )
    with bar:
        for number in range(len(parts), len(files)):
            scanner = FileScan(config, tokenizer, files[number], kind, space.out / f"part-{number:05d}.sizes")
            info = scanner.run(bar.update)
            part = Part(info.documents, Position(number + 1, 0), {TRAIN: info})
            space.add(number, part)
            parts.append(part)


def _write_manifest(config: AdoptConfig, tokenizer: Tokenizer, space: Workspace, parts: list[Part]) -> None:
    Manifest(
        folder=space.out,
        source=" ".join(config.inputs),
        dtype=token_dtype(tokenizer.vocab_size),
        vocab_size=tokenizer.vocab_size,
        mask_id=tokenizer.mask_id,
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
        tokenizer=tokenizer_name(tokenizer),
        tokenizer_sha256=tokenizer.sha256,
        shards=tuple(part.shards[TRAIN] for part in parts),
    ).write()
