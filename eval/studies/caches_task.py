"""The recall task of the study of caches: entries of key and value, then questions; prompts with shared parts, and text.

An entry is one token that says both its key and its value; a row holds every key once, in any order, with values drawn at
random. A question is a key's own token, the answer behind it the value's. Ids: 0 mask, 1 end, 2 pad, then entries, keys,
values.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mezzotint.data.files import write_bytes
from mezzotint.data.manifest import Manifest
from mezzotint.data.shards import ShardWriter, token_dtype


@dataclass(frozen=True)
class Recall:
    """Entries of all keys, `asked` questions behind them."""

    keys: int = 8
    values: int = 8
    asked: int = 8

    @property
    def vocabulary(self) -> int:
        return 3 + self.keys * self.values + self.keys + self.values

    @property
    def length(self) -> int:
        return self.keys + 2 * self.asked

    @property
    def answers(self) -> Tensor:
        """Columns of the answers."""
        return self.keys + 1 + 2 * torch.arange(self.asked)

    def rows(self, count: int, generator: torch.Generator) -> Tensor:
        """(count, length) ids; every question asks for another entry."""
        keys = torch.rand(count, self.keys, generator=generator).argsort(dim=1)
        values = torch.randint(0, self.values, keys.shape, generator=generator)
        chosen = torch.rand(count, self.keys, generator=generator).argsort(dim=1)[:, : self.asked]
        first_key = 3 + self.keys * self.values
        questions = first_key + keys.gather(1, chosen)
        answers = first_key + self.keys + values.gather(1, chosen)
        entries = 3 + keys * self.values + values
        return torch.cat([entries, torch.stack([questions, answers], dim=2).flatten(1)], dim=1)

    def write_text(self, folder: Path, count: int, *, seed: int) -> Path:
        """`count` rows as a prepared folder, a document each, once."""
        if not (folder / "manifest.json").exists():
            rows = self.rows(count, torch.Generator().manual_seed(seed)).numpy()
            writer = ShardWriter(folder, "part-00000", token_dtype(self.vocabulary))
            writer.add(rows.flatten(), np.full(count, self.length), 0)
            Manifest(
                folder=folder,
                source=f"recall: {self}, seed {seed}",
                dtype=token_dtype(self.vocabulary),
                vocab_size=self.vocabulary,
                mask_id=0,
                eos_id=1,
                pad_id=2,
                tokenizer="",
                tokenizer_sha256="",
                shards=(writer.close(),),
            ).write()
        return folder

    def write_prompts(self, path: Path, count: int, *, seed: int, shared: tuple[tuple[int, int], ...]) -> Path:
        """`count` rows as prompts of `mezzotint-eval caches`, whose entries `shared` are shared parts; once."""
        rows = self.rows(count, torch.Generator().manual_seed(seed)).tolist()
        given = [place % 2 == 0 for place in range(2 * self.asked)]
        lines = [
            {"prompt": row[: self.keys], "answer": row[self.keys :], "given": given, "shared": shared} for row in rows
        ]
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, content)
        return path

    def places(self, entries: int) -> dict[str, tuple[int, int]]:
        """Where a shared part of so many entries stands."""
        room = self.keys - entries
        starts = {"prefix": 0, "infix": room // 2, "suffix": room}
        return {name: (start, start + entries) for name, start in starts.items()}
