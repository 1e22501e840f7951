"""What is measured: a release folder, or a preset with random weights; each with a name and a fingerprint."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from mezzotint.models.config import ModelConfig, preset
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.errors import InputError
from mezzotint.models.initialise import initialise
from mezzotint.models.weights import load_config, load_model, parameter_dtype


@dataclass(frozen=True)
class Subject:
    """A model that can be built. `folder` is None for a preset."""

    name: str
    fingerprint: str
    config: ModelConfig
    folder: Path | None


def release_subject(folder: str | Path) -> Subject:
    """A release folder, named after it. Raises InputError for a folder without configuration or weights."""
    path = Path(folder)
    if not path.is_dir():
        raise InputError(f"{folder} is no release folder; export a run first with mezzotint-export")
    config = load_config(path)
    weights = sorted(path.glob("model*.safetensors"))
    if not weights:
        raise InputError(f"the release {folder} has no weights: model.safetensors is missing; export the run again")
    return Subject(path.resolve().name, _file_hash(path / "config.json", *weights), config, path)


def preset_subject(name: str, backbone: str) -> Subject:
    """A preset with random weights, named like `3b-mamba`. Raises InputError naming the nearest known name."""
    config = preset(name, backbone)
    text = json.dumps(config.to_dict(), sort_keys=True)
    return Subject(f"{name}-{backbone}", hashlib.sha256(text.encode()).hexdigest()[:16], config, None)


def _file_hash(*paths: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while piece := file.read(2**24):
                digest.update(piece)
    return digest.hexdigest()[:16]


def build(subject: Subject, *, dtype: torch.dtype, device: str | torch.device = "cpu") -> Denoiser:
    """The model of a subject in `dtype`, made for decoding; what sets time scales stays float32 or wider."""
    if subject.folder is not None:
        return load_model(subject.folder, dtype=dtype, device=device).eval()
    with torch.device("meta"):
        model = Denoiser(subject.config)
    for name, parameter in model.named_parameters():  # made in its final dtype: float32 first would need more memory
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(parameter_dtype(name, dtype))
    model = model.to_empty(device=device)
    initialise(model, subject.config, torch.Generator(device=device).manual_seed(0))
    return model.eval()
