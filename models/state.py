"""What a model keeps of the clean prefix: keys and values, or SSM state and convolution tail, per layer, as a value."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .errors import InputError

FORMAT = 1


@dataclass
class KVState:
    """Keys and values (B, Hkv, S, P) of one attention layer, preallocated for S tokens and written in place."""

    k: Tensor
    v: Tensor

    def write(self, k: Tensor, v: Tensor, lengths: Tensor, tokens: Tensor) -> None:
        """Put the first `tokens[b]` of k, v (B, Hkv, T, P) behind `lengths[b]`; both (B,) on the CPU."""
        first, count = int(lengths[0]), int(tokens[0])
        if bool((lengths == first).all()) and bool((tokens == count).all()):
            self.k[:, :, first : first + count] = k[:, :, :count]
            self.v[:, :, first : first + count] = v[:, :, :count]
            return
        for row, (at, count) in enumerate(zip(lengths.tolist(), tokens.tolist())):
            self.k[row, :, at : at + count] = k[row, :, :count]
            self.v[row, :, at : at + count] = v[row, :, :count]


@dataclass
class SSMState:
    """SSM state (B, N, H, P), float32 or wider, and the last convolution inputs (B, d_conv-1, Ch) of a Mamba layer."""

    ssm: Tensor
    conv: Tensor


LayerState = KVState | SSMState


@dataclass
class State:
    """The state of all layers, with `length` (B,) committed tokens per row, on the CPU.

    A commit returns the next value; attention layers are written in place, so the old value counts as consumed.
    """

    layers: tuple[LayerState, ...]
    length: Tensor
    max_length: int
    block_length: int

    @property
    def batch(self) -> int:
        return self.length.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' preallocated tensors."""
        return sum(tensor.nbytes for layer in self.layers for tensor in vars(layer).values())

    def clone(self) -> State:
        """An independent copy."""
        return self._map(torch.clone)

    def select(self, rows: Tensor) -> State:
        """An independent state of the given rows (int64 indices, repeats allowed): forks, or drops finished rows."""
        return self._map(lambda t: t.index_select(0, rows.to(t.device)))

    def save(self, path: str | Path) -> None:
        """One safetensors file; written beside and renamed, so that a half-written file never has the name."""
        used = int(self.length.max()) if self.batch else 0
        tensors = {
            name: (t[:, :, :used] if name.endswith((".k", ".v")) else t).contiguous()
            for name, t in self._tensors().items()
        }
        about = {"format": FORMAT, "max_length": self.max_length, "block_length": self.block_length}
        beside = Path(f"{path}.tmp")
        save_file(tensors, beside, metadata={"mezzotint_state": json.dumps(about)})
        beside.rename(path)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> State:
        """The inverse of save. Raises InputError for a file that is no state or of a newer format."""
        try:
            with safe_open(str(path), framework="pt", device=str(device)) as file:
                about = json.loads((file.metadata() or {}).get("mezzotint_state", "null"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path} cannot be read as a saved state: {error}") from error
        if about is None:
            raise InputError(f"{path} is a safetensors file, but no saved state")
        if about["format"] > FORMAT:
            raise InputError(
                f"{path} has state format {about['format']}, this version reads up to {FORMAT}; update mezzotint"
            )
        count = 1 + max(int(name.split(".")[0]) for name in tensors if name != "length")
        layers = tuple(_load_layer(tensors, layer, about["max_length"]) for layer in range(count))
        return cls(layers, tensors["length"].cpu(), about["max_length"], about["block_length"])

    def _tensors(self) -> dict[str, Tensor]:
        named = {"length": self.length}
        for index, layer in enumerate(self.layers):
            for name, tensor in vars(layer).items():
                named[f"{index}.{name}"] = tensor
        return named

    def _map(self, change) -> State:
        layers = tuple(type(layer)(*(change(t) for t in vars(layer).values())) for layer in self.layers)
        return State(layers, change(self.length), self.max_length, self.block_length)


def _load_layer(tensors: dict[str, Tensor], layer: int, max_length: int) -> LayerState:
    if f"{layer}.ssm" in tensors:
        return SSMState(tensors[f"{layer}.ssm"], tensors[f"{layer}.conv"])
    pair = []
    for name in ("k", "v"):
        kept = tensors[f"{layer}.{name}"]
        room = kept.new_zeros(*kept.shape[:2], max_length, kept.shape[3])
        room[:, :, : kept.shape[2]] = kept
        pair.append(room)
    return KVState(*pair)
