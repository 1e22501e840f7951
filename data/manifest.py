"""Owns `manifest.json`, which says what a prepared or adopted folder holds, and the checks that it fits its readers."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mezzotint.data.errors import InputError
from mezzotint.data.files import read_json, sha256_of, write_json
from mezzotint.data.megatron import require_size
from mezzotint.data.shards import ShardInfo, shard_info
from mezzotint.data.tokenizer import Tokenizer

FORMAT = 2  # 1: no CRCs of blocks, no adopted files; read as it is
NAME = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """A prepared or adopted folder: totals, control ids, tokenizer and shards in reading order."""

    folder: Path  # where it was read; not part of the file
    source: str  # what was prepared
    dtype: str  # of the tokens on disk
    vocab_size: int
    mask_id: int
    eos_id: int
    pad_id: int
    tokenizer: str  # name of the tokenizer's file in the folder
    tokenizer_sha256: str
    shards: tuple[ShardInfo, ...]

    @property
    def tokens(self) -> int:
        """Tokens of all documents, one <eos> each, fill left out."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of the text."""
        return sum(shard.bytes for shard in self.shards)

    @property
    def largest_id(self) -> int:
        return max(shard.largest_id for shard in self.shards)

    @property
    def sha256(self) -> str:
        """Hash of all token files, in order, how they are read, and of the tokenizer; not of where they lie."""
        hashes = [self.tokenizer_sha256, *(h for s in self.shards for h in (s.bin_sha256, s.idx_sha256))]
        hashes += [shard.reading for shard in self.shards if shard.reading]
        return sha256_of("\n".join(hashes).encode())

    def write(self) -> None:
        """Write `manifest.json` into the folder, last of all its files, atomically."""
        totals = ("tokens", "documents", "bytes", "largest_id", "sha256")
        plain = [field.name for field in fields(self) if field.name not in ("folder", "shards")]
        content: dict[str, Any] = {"format": FORMAT}
        content |= {name: getattr(self, name) for name in (*plain, *totals)}
        content["shards"] = [shard.as_dict() for shard in self.shards]
        write_json(self.folder / NAME, content)


def read_manifest(folder: str | Path, *, check_sizes: bool = True) -> Manifest:
    """Read `folder/manifest.json` and check that every shard file has its full size (O(shards), no content is read).

    Only `verify`, which names every damaged file and not the first alone, does without the check.

    Raises InputError for a folder that was never or not completely prepared, a newer format, damaged entries and
    missing or truncated shards (named with the offset).
    """
    folder = Path(folder)
    path = folder / NAME
    if not path.is_file():
        inside = " (its train/ or heldout/ is)" if (folder / "train" / NAME).is_file() else ""
        raise InputError(
            f"{folder} is no prepared folder{inside}: it has no {NAME}; make it, or finish making it, "
            "with `mezzotint-data prepare` (text) or `mezzotint-data adopt` (token files made elsewhere)"
        )
    content = read_json(path)
    version = content.get("format")
    if not isinstance(version, int) or version > FORMAT:
        raise InputError(f"{path} has format {version}, and this version reads up to {FORMAT}: update mezzotint")
    plain = [field.name for field in fields(Manifest) if field.name not in ("folder", "shards")]
    try:
        shards = tuple(shard_info(shard) for shard in content["shards"])
        manifest = Manifest(folder=folder, shards=shards, **{name: content[name] for name in plain})
    except (KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged ({error}): prepare the folder again") from error
    if not shards:
        raise InputError(f"{path} lists no shard: prepare the folder again")
    if check_sizes:
        for shard in shards:
            require_size(shard.bin_path(folder), shard.bin_bytes)
            require_size(shard.idx_path(folder), shard.idx_bytes)
    return manifest


def check_vocabulary(manifest: Manifest, vocab_size: int) -> None:
    """InputError when a model of `vocab_size` ids has no row for some id of the shards or for a control id."""
    for shard in manifest.shards:
        if shard.largest_id >= vocab_size:
            raise InputError(
                f"{shard.bin_path(manifest.folder)} holds token id {shard.largest_id}, but the vocabulary has only "
                f"{vocab_size}: set vocab_size to {manifest.vocab_size}"
            )
    if manifest.vocab_size > vocab_size:
        raise InputError(
            f"the tokenizer of {manifest.folder} has {manifest.vocab_size} ids, control ids included, but the "
            f"vocabulary has only {vocab_size}: set vocab_size to {manifest.vocab_size}"
        )


def check_tokenizer(manifest: Manifest, tokenizer: Tokenizer) -> None:
    """InputError when the shards were made with another tokenizer."""
    if manifest.tokenizer_sha256 != tokenizer.sha256:
        raise InputError(
            f"{tokenizer.files[0]} (sha256 {tokenizer.sha256[:12]}) did not make the shards of {manifest.folder} "
            f"(sha256 {manifest.tokenizer_sha256[:12]}): use {manifest.folder / manifest.tokenizer}"
        )
