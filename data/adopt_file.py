"""Owns the scan of one token file to adopt: what it holds, how its documents end, and the manifest's entry for it."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mezzotint.data.digest import BLOCK, Digest, digest_of
from mezzotint.data.errors import InputError
from mezzotint.data.files import write_bytes
from mezzotint.data.pieces import Piece, arrow_pieces, megatron_pieces, parquet_pieces
from mezzotint.data.scan import Scan
from mezzotint.data.shards import ShardInfo
from mezzotint.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class AdoptConfig:
    """Which token files, made with which tokenizer, into which folder (a manifest, and sizes for parquet and arrow)."""

    inputs: tuple[str, ...]
    tokenizer: str
    out: str
    pattern: str = "*"
    split: str = "train"  # of a saved dataset with several splits
    column: str = "input_ids"
    eos: str = "auto"  # auto: stored or added, never mixed; keep: documents end as they are; add: one more for each
    end_id: int = -1  # id that ends documents in these files and is read as <eos>; -1: the tokenizer's own


@dataclass
class FileScan:
    """The scan of one file, and what it finds on the way."""

    config: AdoptConfig
    tokenizer: Tokenizer
    path: Path
    kind: str
    sizes_path: Path
    groups: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    dtype: str = ""

    def run(self, progress: Any) -> ShardInfo:
        """The manifest's entry; writes the sizes of documents for parquet and arrow. `progress` is told bytes read."""
        scan = Scan(str(self.path), self.tokenizer, self.config.end_id)
        sizes: list[np.ndarray] = []
        with open(self.path, "rb") as file:
            total, digest = self.path.stat().st_size, Digest()
            for piece in self._pieces():
                scan.add(piece)
                self._require_one_ending(scan)
                if self.kind != "megatron":
                    sizes.append(piece.sizes.astype("<i4"))
                self._note_group(piece)
                progress(_hash_some(file, digest, BLOCK * 4))
            while read := _hash_some(file, digest, total):
                progress(read)
        if not scan.documents:
            raise InputError(f"{self.path} holds no tokens: leave it out")
        adds_eos = self._adds_eos(scan)
        if scan.inner:
            print(
                f"{self.path}: {scan.inner:,} <eos> inside documents; each row or document of the file is taken as one",
                file=sys.stderr,
            )
        index = self.path.with_suffix(".idx")
        if self.kind != "megatron":
            index = self.sizes_path
            write_bytes(index, np.concatenate(sizes).tobytes())
        index_digest = digest_of(index)
        return ShardInfo(
            name=self.sizes_path.stem,
            tokens=scan.tokens + adds_eos * scan.documents,
            documents=scan.documents,
            bytes=scan.bytes,
            largest_id=scan.largest_id,
            bin_bytes=total,
            idx_bytes=index.stat().st_size,
            bin_sha256=digest.sha256,
            idx_sha256=index_digest.sha256,
            bin_blocks=digest.blocks,
            idx_blocks=index_digest.blocks,
            kind=self.kind,
            path=str(self.path),
            column="" if self.kind == "megatron" else self.config.column,
            adds_eos=adds_eos,
            end_id=self.config.end_id,
            groups=tuple(self.groups),
            dtype=self.dtype,
            offsets=tuple(self.offsets),
        )

    def _pieces(self) -> Iterator[Piece]:
        if self.kind == "megatron":
            return megatron_pieces(self.path, self.path.with_suffix(".idx"))
        read = parquet_pieces if self.kind == "parquet" else arrow_pieces
        return read(self.path, self.config.column)

    def _note_group(self, piece: Piece) -> None:
        """Documents of each row group or record batch, and where the ids of a batch lie."""
        if self.kind == "megatron":
            return
        while len(self.groups) <= piece.group:
            self.groups.append(0)
            if self.kind == "arrow":
                self.offsets.append(piece.offset)
        self.groups[piece.group] += len(piece.sizes)
        if self.kind == "arrow" and len(piece.tokens):
            if self.dtype not in ("", piece.tokens.dtype.name):
                raise InputError(f"{self.path} changes from {self.dtype} to {piece.tokens.dtype} ids: write it again")
            self.dtype = piece.tokens.dtype.name

    def _require_one_ending(self, scan: Scan) -> None:
        """InputError as soon as documents end in both ways."""
        if self.config.eos == "auto" and 0 < scan.ended < scan.documents:
            raise InputError(
                f"document {scan.first_ended} of {self.path} ends with <eos> and document {scan.first_open} does not: "
                "give --eos keep (such documents were cut off) or --eos add (one more <eos> after every document)"
            )

    def _adds_eos(self, scan: Scan) -> int:
        """1 when `<eos>` is to be added to every document."""
        if self.config.end_id >= 0 and not scan.ended:
            raise InputError(f"no document of {self.path} ends with id {self.config.end_id}: correct or drop --end-id")
        if self.config.eos != "auto":
            return int(self.config.eos == "add")
        alike = scan.documents > 1 and scan.last_id >= 0
        text = self.tokenizer.decode([scan.last_id]) if alike else ""
        if alike and not scan.ended and self.tokenizer.encode(text) != [scan.last_id]:
            raise InputError(
                f"every document of {self.path} ends with id {scan.last_id} ({text!r}), which no text produces: give "
                f"--end-id {scan.last_id} to read it as <eos>, or --eos add to keep it and add <eos>"
            )
        return int(not scan.ended)


def _hash_some(file: Any, digest: Digest, count: int) -> int:
    """Hash the next `count` bytes of the file, at most; how many there were."""
    done = 0
    while done < count and (raw := file.read(min(BLOCK, count - done))):
        digest.update(raw)
        done += len(raw)
    return done
