"""Soft tokens around a document computed alone: their values, the model they were trained for, and their file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..denoiser import Denoiser
from ..errors import InputError

FORMAT = 1


@dataclass(frozen=True, eq=False)
class Adapters:
    """header (n, D) stands before every document, trailer (m, D) behind it; `model` names the frozen denoiser."""

    header: Tensor
    trailer: Tensor
    model: str

    @property
    def fingerprint(self) -> str:
        """16 hex digits over both."""
        digest = hashlib.sha256(self.model.encode())
        for part in (self.header, self.trailer):
            digest.update(part.detach().to("cpu", torch.float64).numpy().tobytes())
        return digest.hexdigest()[:16]

    def check(self, model: Denoiser) -> None:
        """InputError where they were trained for another model, or are no soft tokens of this one."""
        own = model_fingerprint(model)
        if self.model != own:
            raise InputError(
                f"these adapters were trained for the model {self.model}, this one is {own}: train adapters for it"
            )
        width = model.config.d_model
        if {self.header.shape[1], self.trailer.shape[1]} != {width}:
            raise InputError(
                f"these adapters hold tokens of {self.header.shape[1]} and {self.trailer.shape[1]} values, the model's have "
                f"{width}: the file was changed, train or copy it again"
            )

    def save(self, path: str | Path) -> None:
        """One safetensors file, written beside and renamed."""
        path = Path(path)
        about = json.dumps({"format": FORMAT, "model": self.model})
        beside = path.with_name(path.name + ".tmp")
        tensors = {"header": self.header.detach().contiguous(), "trailer": self.trailer.detach().contiguous()}
        save_file(tensors, beside, metadata={"mezzotint_adapters": about})
        beside.rename(path)


def load_adapters(path: str | Path, device: torch.device | str = "cpu") -> Adapters:
    """The inverse of save. InputError for a file that is missing, holds no adapters or is of a newer format."""
    try:
        with safe_open(str(path), framework="pt", device=str(device)) as file:
            about = _about((file.metadata() or {}).get("mezzotint_adapters", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} cannot be read as adapters: {error}") from error
    if about is None or set(tensors) != {"header", "trailer"}:
        raise InputError(f"{path} is a safetensors file, but holds no adapters")
    written, model = about
    if written > FORMAT:
        raise InputError(f"{path} has adapter format {written}, this version reads up to {FORMAT}; update mezzotint")
    if any(part.ndim != 2 or not part.is_floating_point() or not part.isfinite().all() for part in tensors.values()):
        raise InputError(f"{path} holds adapters that are no rows of numbers: train or copy them again")
    return Adapters(tensors["header"], tensors["trailer"], model)


def _about(text: str) -> tuple[int, str] | None:
    """Format and model of a file's metadata; None where it says neither."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or type(found.get("format")) is not int or not isinstance(found.get("model"), str):
        return None
    return found["format"], found["model"]


def fresh_adapters(model: Denoiser, *, header: int = 8, trailer: int = 8, seed: int = 0, std: float = 0.02) -> Adapters:
    """Untrained ones: normal with standard deviation `std`."""
    g = torch.Generator().manual_seed(seed)
    width, like = model.config.d_model, model.embed.weight
    parts = [
        (std * torch.randn(count, width, generator=g, dtype=torch.float64)).to(like) for count in (header, trailer)
    ]
    return Adapters(parts[0], parts[1], model_fingerprint(model))


def model_fingerprint(model: Denoiser) -> str:
    """16 hex digits over the configuration and all weights in float32, whatever type they are kept in now."""
    digest = hashlib.sha256(json.dumps(model.config.to_dict(), sort_keys=True).encode())
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().to("cpu", torch.float32).numpy().tobytes())
    return digest.hexdigest()[:16]
