"""A model on disk: config.json beside safetensors, written whole or not at all, read strictly."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .config import ModelConfig
from .denoiser import Denoiser
from .errors import InputError

FORMAT = 1
MODEL_TYPE = "mezzotint"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
# they set time scales: bfloat16 would move every decay
WIDE = ("A_log", "D", "dt_bias")
# keys of config.json that are for transformers, or say what kind of file it is
ABOUT = ("format", "model_type", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version")


def parameter_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """What parameter `name` is kept as in a model of `dtype`: time scales in float32 or wider."""
    return torch.promote_types(dtype, torch.float32) if name.rsplit(".", 1)[-1] in WIDE else dtype


def config_dict(config: ModelConfig, **about: object) -> dict[str, object]:
    """The content of config.json. `about` adds or replaces keys of ABOUT.

    The fields of ModelConfig stand under `denoiser`: transformers gives names like rope_scaling a meaning of its own.
    """
    return {"format": FORMAT, "model_type": MODEL_TYPE, **about, "denoiser": config.to_dict()}


def save_weights(
    model: Denoiser,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    about: Mapping[str, object] | None = None,
) -> None:
    """Write config.json and the weights into `folder` (made if missing), in shards with an index above `shard_bytes`.

    dtype None keeps the model's own. Every file is written beside and renamed, config.json last; shards of an earlier
    save are removed. `about` adds keys of ABOUT to config.json.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = model.embed.weight.dtype if dtype is None else dtype
    tensors = {
        name: parameter.detach().to("cpu", parameter_dtype(name, dtype)).contiguous()
        for name, parameter in model.named_parameters()  # names a shared tensor once
    }
    shards = list(_shards(tensors, shard_bytes))
    names = [WEIGHTS] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(len(shards))]
    for name, shard in zip(names, shards):
        beside = folder / f"{name}.tmp"
        save_file(shard, beside, metadata={"format": "pt"})
        beside.rename(folder / name)
    if len(shards) > 1:
        places = {key: name for name, shard in zip(names, shards) for key in shard}
        total = sum(tensor.nbytes for tensor in tensors.values())
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    for old in (*folder.glob("model*.safetensors"), folder / INDEX):
        if old.name not in (*names, INDEX if len(shards) > 1 else ""):
            old.unlink(missing_ok=True)
    text = str(dtype).removeprefix("torch.")
    _write_json(folder / "config.json", config_dict(model.config, dtype=text, **(about or {})))


def load_config(folder: str | Path) -> ModelConfig:
    """The configuration in `folder`. Raises InputError where it is missing, broken, foreign or of a newer format."""
    path = Path(folder) / "config.json"
    values = _read_json(path, missing=f"{folder} has no config.json, so it is no release folder")
    if values.get("model_type") != MODEL_TYPE:
        raise InputError(f"{path} describes a {values.get('model_type')!r} model, not a {MODEL_TYPE} one")
    version = values.get("format")
    if not isinstance(version, int):
        raise InputError(f"{path} says no format version; export the model again")
    if version > FORMAT:
        raise InputError(f"{path} has format {version}, this version reads up to {FORMAT}; update mezzotint")
    for key in values:
        if key not in (*ABOUT, "denoiser"):
            near = difflib.get_close_matches(key, [*ABOUT, "denoiser"], n=1, cutoff=0.0)[0]
            raise InputError(f"{path} has the unknown key {key!r}; the nearest is {near!r}")
    own = values.get("denoiser")
    if not isinstance(own, dict):
        raise InputError(f"{path} lacks the sizes of the model, an object under the key 'denoiser'")
    for field in dataclasses.fields(ModelConfig):
        if field.default is dataclasses.MISSING and field.name not in own:
            raise InputError(f"{path} lacks the key {field.name!r} under 'denoiser'")
    try:
        return ModelConfig.from_dict(own)
    except (InputError, TypeError) as error:  # TypeError: a text where a number should stand
        raise InputError(f"{path}: {error}") from None


def load_model(
    folder: str | Path, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Denoiser:
    """The model in `folder`, in eval mode; dtype None keeps the stored one.

    Raises InputError for missing, unreadable or surplus weights, shapes that differ from the configuration, and what
    `load_config` refuses.
    """
    folder = Path(folder)
    config = load_config(folder)
    with torch.device("meta"):
        model = Denoiser(config)
    expected = dict(model.named_parameters())
    loaded: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        loaded |= _read_shard(path, expected, dtype=dtype, device=device)
    missing = [name for name in expected if name not in loaded]
    if missing:
        raise InputError(f"the weights in {folder} lack {_some(missing)}; the folder is incomplete, export it again")
    model.load_state_dict(loaded, assign=True)
    return model.eval()


def _read_shard(
    path: Path, expected: dict[str, torch.nn.Parameter], *, dtype: torch.dtype | None, device: torch.device | str | None
) -> dict[str, Tensor]:
    """The tensors of one file, checked against the parameters `expected`, cast and moved."""
    loaded = {}
    try:
        with safe_open(str(path), framework="pt", device=str(device or "cpu")) as file:
            for name in file.keys():  # noqa: SIM118
                if name not in expected:
                    raise InputError(f"{path} holds {name!r}, which the model of config.json does not have")
                tensor = file.get_tensor(name)
                if tensor.shape != expected[name].shape:
                    shapes = f"{tuple(tensor.shape)}, but config.json means {tuple(expected[name].shape)}"
                    raise InputError(f"{path}: {name} has shape {shapes}")
                loaded[name] = tensor.to(parameter_dtype(name, tensor.dtype if dtype is None else dtype))
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} cannot be read as safetensors ({error}); export the model again") from error
    return loaded


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    index = _read_json(folder / INDEX, missing=f"{folder} has no weights: neither {WEIGHTS} nor {INDEX} is there")
    names = sorted(set(index["weight_map"].values()))
    absent = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if absent:
        raise InputError(
            f"{folder} lacks the weight files {_some(absent)} that {INDEX} names; copy them or export again"
        )
    return [folder / name for name in names]


def _shards(tensors: dict[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    """Runs of tensors, in order, of at most `limit` bytes each; a larger tensor has a shard of its own."""
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > limit:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard


def _shard_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _write_json(path: Path, value: dict) -> None:
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    beside.rename(path)


def _read_json(path: Path, *, missing: str) -> dict:
    if not path.is_file():
        raise InputError(missing)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON ({error}); export the model again") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} must hold a JSON object")
    return value


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
