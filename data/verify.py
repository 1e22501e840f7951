"""Owns the full check of a prepared or adopted folder: hashes, ids against the tokenizer, indexes against content."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mezzotint.data.digest import BLOCK, Digest, digest_of, first_difference
from mezzotint.data.errors import InputError
from mezzotint.data.files import read_json
from mezzotint.data.manifest import NAME, Manifest, check_tokenizer, read_manifest
from mezzotint.data.megatron import MegatronIndex, index_bytes
from mezzotint.data.parts import HELDOUT, TRAIN
from mezzotint.data.pieces import Piece, arrow_pieces, megatron_pieces, parquet_pieces
from mezzotint.data.scan import Scan
from mezzotint.data.shards import ShardInfo
from mezzotint.data.tokenizer import Tokenizer, load_tokenizer

AGAIN = "copy it again, or prepare or adopt the folder again"


@dataclass(frozen=True)
class Checked:
    """What the check of one folder found."""

    manifest: Manifest
    problems: list[str]  # a sentence each, with file and offset; empty when all is right


def folders_below(folder: Path) -> list[Path]:
    """The folders with a manifest that `folder` means: itself, or its train/ and heldout/."""
    inside = [folder / split for split in (TRAIN, HELDOUT) if (folder / split / NAME).is_file()]
    return inside if inside and not (folder / NAME).is_file() else [folder]


def verify(folder: Path) -> Checked:
    """Read every file of one folder from end to end; with a progress bar on a terminal.

    Raises InputError when there is no manifest to check against, or a damaged one.
    """
    from tqdm import tqdm

    manifest = read_manifest(folder, check_sizes=False)
    files = [file for shard in manifest.shards for file in _files(manifest, shard)]
    present = {file.path: file.path.stat().st_size for file in files if file.path.is_file()}
    tokens = sum(present.get(shard.bin_path(folder), 0) for shard in manifest.shards)
    bar = tqdm(
        total=sum(present.values()) + tokens,
        unit="B",
        unit_scale=True,
        desc=f"verifying {folder}",
        mininterval=0.5,
        disable=None,
    )
    with bar:
        problems, tokenizer = _own_files(manifest)
        digests = {path: digest_of(path, bar.update) for path in present}
        damaged = {file.path for file in files if not _intact(file, digests)}
        problems += [_sentence(file, files, digests) for file in files if file.path in damaged]
        for shard in manifest.shards:
            problems += _content(manifest, shard, tokenizer, damaged)
            bar.update(present.get(shard.bin_path(folder), 0))
    return Checked(manifest, problems)


@dataclass(frozen=True)
class _File:
    """A file as the manifest has it."""

    path: Path
    size: int
    sha256: str
    blocks: str


def _files(manifest: Manifest, shard: ShardInfo) -> tuple[_File, _File]:
    return (
        _File(shard.bin_path(manifest.folder), shard.bin_bytes, shard.bin_sha256, shard.bin_blocks),
        _File(shard.idx_path(manifest.folder), shard.idx_bytes, shard.idx_sha256, shard.idx_blocks),
    )


def _own_files(manifest: Manifest) -> tuple[list[str], Tokenizer | None]:
    """What is wrong with the manifest and the tokenizer beside it, and the tokenizer when it is the right one."""
    problems = []
    if read_json(manifest.folder / NAME).get("sha256") != manifest.sha256:
        problems.append(f"the hashes in {manifest.folder / NAME} are not those that were written: {AGAIN}")
    try:
        tokenizer = load_tokenizer(manifest.folder / manifest.tokenizer)
        check_tokenizer(manifest, tokenizer)
    except InputError as error:
        return [*problems, str(error)], None
    return problems, tokenizer


def _intact(file: _File, digests: dict[Path, Digest]) -> bool:
    return file.path in digests and digests[file.path].sha256 == file.sha256


def _sentence(file: _File, files: list[_File], digests: dict[Path, Digest]) -> str:
    """How a file differs from what was written, and where from."""
    if file.path not in digests:
        return f"{file.path} is missing: {AGAIN}"
    found, size = digests[file.path], file.path.stat().st_size
    owner = next((other.path for other in files if other.sha256 == found.sha256), None)
    if owner is not None:
        own = next((path for path, digest in digests.items() if digest.sha256 == file.sha256), None)
        where = f"what belongs to it is in {own}" if own else "its own is in none of the folder's files"
        return f"{file.path} holds what belongs to {owner}, from byte 0 on; {where}: put each in its place"
    if not file.blocks:  # format 1
        place = f"it has {size} bytes, not {file.size}" if size != file.size else "at a byte that cannot be told"
        return f"{file.path} is not what was written ({place}): {AGAIN}"
    start = first_difference(found.blocks, file.blocks)
    if start is None:
        return f"{file.path} is not what was written: {AGAIN}"
    if size < file.size and start + BLOCK > size:
        return f"{file.path} is truncated at byte {size} of {file.size}: {AGAIN}"
    if size > file.size and start + BLOCK > file.size:
        return f"{file.path} goes on after byte {file.size}, to {size}: {AGAIN}"
    end = min(start + BLOCK, file.size)
    length = f", and has {size} bytes, not {file.size}" if size != file.size else ""
    return f"{file.path} is not what was written: it first differs between bytes {start} and {end}{length}; {AGAIN}"


def _content(manifest: Manifest, shard: ShardInfo, tokenizer: Tokenizer | None, damaged: set[Path]) -> Iterator[str]:
    """What is wrong with the documents of a shard.

    Where hashes differ and CRCs have told the place nothing is added; without CRCs the index may tell it.
    """
    bin_file, idx_file = _files(manifest, shard)
    if {bin_file.path, idx_file.path} & damaged:
        if shard.kind == "shard" and not shard.idx_blocks and idx_file.path in damaged and bin_file.path.is_file():
            yield from _as_sentences(lambda: MegatronIndex(idx_file.path).check())
        return
    if tokenizer is not None:
        yield from _as_sentences(lambda: _check_documents(manifest, shard, tokenizer))


def _as_sentences(check: Callable[[], None]) -> Iterator[str]:
    try:
        check()
    except InputError as error:
        yield str(error)


def _check_documents(manifest: Manifest, shard: ShardInfo, tokenizer: Tokenizer) -> None:
    """InputError when the documents of a shard are not what the manifest and the index say."""
    path, idx_path = shard.bin_path(manifest.folder), shard.idx_path(manifest.folder)
    scan = Scan(str(path), tokenizer, shard.end_id)
    sizes = []
    for piece in _pieces(shard, path, idx_path):
        scan.add(piece)
        if shard.kind != "megatron":  # its own index was checked on the way
            sizes.append(piece.sizes)
    found = {
        "tokens": scan.tokens + shard.adds_eos * scan.documents,
        "documents": scan.documents,
        "bytes": scan.bytes,
        "largest_id": scan.largest_id,
    }
    for name, value in found.items():
        recorded = vars(shard)[name]
        if value != recorded:
            raise InputError(f"{path} has {name} {value}, and {manifest.folder / NAME} says {recorded}: {AGAIN}")
    if shard.kind == "shard" and (scan.inner or scan.ended != scan.documents):
        raise InputError(f"{path} has <eos> where no document ends, or documents without: {AGAIN}")
    if shard.kind == "megatron":
        return
    index = np.concatenate(sizes)
    expected = index_bytes(index, manifest.dtype) if shard.kind == "shard" else index.astype("<i4").tobytes()
    if idx_path.read_bytes() != expected:
        raise InputError(f"{idx_path} does not say where the documents of {path} end: {AGAIN}")


def _pieces(shard: ShardInfo, path: Path, idx_path: Path) -> Iterator[Piece]:
    if shard.kind == "parquet":
        return parquet_pieces(path, shard.column)
    if shard.kind == "arrow":
        return arrow_pieces(path, shard.column)
    return megatron_pieces(path, idx_path)
