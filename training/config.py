"""The configuration of a training run: typed sections, recipes with overrides, and the hash of what arms share."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mezzotint.data.loader import DataConfig
from mezzotint.models.config import BACKBONES, PRESETS, ModelConfig
from mezzotint.models.errors import InputError
from mezzotint.training import strict
from mezzotint.training.checkpoint import CheckpointConfig
from mezzotint.training.engine import EngineConfig
from mezzotint.training.guard import GuardConfig
from mezzotint.training.metrics import LogConfig
from mezzotint.training.objective import ObjectiveConfig
from mezzotint.training.optim import OptimConfig
from mezzotint.training.validate import ValidationConfig

RECIPES = Path(__file__).resolve().parents[1] / "launch" / "recipes"
Scalar = bool | int | float | str


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """Which denoiser: a preset, the backbone that tells matched arms apart, and single fields of ModelConfig.

    In a recipe the fields stand beside `preset`; vocabulary size and special ids come from the data's tokenizer.
    block: tokens of a block, 'row' for as long as the row (bidirectional, attention only), null for the preset's.
    """

    preset: str | None = (
        None  # with init_from the release's sizes count, and --plan alone looks here, until it is exported
    )
    backbone: str = "attention"
    block: int | str | None = None
    overrides: dict[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value, known in (("preset", self.preset, PRESETS), ("backbone", self.backbone, BACKBONES)):
            if value is not None and value not in known:
                near = difflib.get_close_matches(value, known, n=1, cutoff=0.0)[0]
                raise InputError(f"model.{name} is {value!r}; the nearest of {', '.join(known)} is {near!r}")
        if isinstance(self.block, str) and self.block != "row":
            raise InputError(f"model.block is {self.block!r}; use a number of tokens or 'row'")


SECTION_KEYS = ("preset", "backbone", "block")
# block_length is model.block; everything else of ModelConfig may be set on top of the preset
MODEL_KEYS = [*SECTION_KEYS, *(f.name for f in dataclasses.fields(ModelConfig) if f.name != "block_length")]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything a run depends on. Raises InputError where sections do not fit together."""

    run: str  # run folder: checkpoints, metrics, resolved recipe
    steps: int
    rows_per_step: int  # rows of one optimizer step, over all ranks
    micro_rows: int = 1  # rows of one forward and backward pass of one rank
    seed: int = 0  # of the weights and the noise; the order of rows has its own, data.seed
    ema_decay: float = 0.0  # 0: no average of the weights
    init_from: str | None = None  # release folder whose weights the run starts with
    model: ModelSection
    data: DataConfig
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        for name in ("steps", "rows_per_step", "micro_rows"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"seed is {self.seed}; it must be from 0 to 2^63 - 1")
        if not 0 <= self.ema_decay < 1:
            raise InputError(f"ema_decay is {self.ema_decay}; it must be at least 0 and below 1")
        if self.model.preset is None and self.init_from is None:
            raise InputError("give model.preset or init_from: one of them says how large the model is")

    def accumulation(self, world: int) -> int:
        """Micro-batches of a step on each of `world` ranks; InputError when the rows cannot be shared out."""
        if self.rows_per_step % (world * self.micro_rows):
            raise InputError(
                f"rows_per_step {self.rows_per_step} is no multiple of {world} ranks times micro_rows {self.micro_rows}"
            )
        return self.rows_per_step // (world * self.micro_rows)


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> TrainConfig:
    """The recipe of that name in launch/recipes/, or a YAML file, with `key.path=value` overrides (values are YAML)."""
    values = _read_recipe(name_or_path)
    for override in overrides:
        _apply(values, override)
    strict.check_keys(values, TrainConfig, flat={ModelSection: MODEL_KEYS})
    return strict.structure(values, TrainConfig)


def dump(config: TrainConfig) -> str:
    """YAML that `load_recipe` reads back to an equal configuration."""
    return strict.dump_yaml(strict.unstructure(config))


def arms_hash(config: TrainConfig, data_hash: str) -> str:
    """Hash of all that matched arms share: rows and their order, noise, seeds, steps, precision, optimizer, EMA, bound.

    Not in it: the backbone and its fields, the run folder, and how the work is cut up (micro-batches, ZeRO, logging).
    """
    shared = strict.unstructure(config)
    for key in ("run", "micro_rows", "checkpoint", "guard", "log"):
        del shared[key]
    shared["engine"] = {"precision": config.engine.precision}
    shared["model"] = {"preset": None if config.init_from else config.model.preset, "block": config.model.block}
    shared["data"] = data_hash
    shared["init_from"] = config.init_from is not None  # each arm has a release of its own
    return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:16]


def _read_recipe(name_or_path: str, above: tuple[Path, ...] = ()) -> strict.Plain:
    """Plain values, with those of the recipe that `extends` names below them; `above` are those that extend this one."""
    path = Path(name_or_path)
    if not path.suffix:
        path = RECIPES / f"{name_or_path}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in RECIPES.glob("*.yaml")))
        raise InputError(f"no recipe {name_or_path!r}: give a YAML file or one of {known}")
    if path in above:
        raise InputError(f"{above[-1]} extends {path}, which extends it again: leave one of them out")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no UTF-8 text (byte {error.start})") from None
    values = strict.parse_yaml(text, source=str(path))
    if not isinstance(values, dict):
        raise InputError(f"{path} must be a mapping of keys to values")
    base = values.pop("extends", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise InputError(f"{path}: extends must be the name of one recipe, not {base!r}")
    return _merge(_read_recipe(base, (*above, path)), values)


def _merge(base: strict.Plain, over: strict.Plain) -> strict.Plain:
    both = {
        key: _merge(base[key], over[key])
        for key in base
        if isinstance(base[key], dict) and isinstance(over.get(key), dict)
    }
    return {**base, **over, **both}


def _apply(values: strict.Plain, override: str) -> None:
    """Set one `key.path=value` in nested plain values; an index selects from a list."""
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise InputError(f"override {override!r} must be key.path=value")
    *parents, last = path.split(".")
    place: Any = values
    for key in parents:
        place = place[_index(place, key, path)] if isinstance(place, list) else place.setdefault(key, {})
        if not isinstance(place, (dict, list)):
            raise InputError(f"override {override!r}: {key!r} holds the value {place!r}, not keys")
    place[_index(place, last, path) if isinstance(place, list) else last] = strict.parse_yaml(
        text, source=f"override {override!r}"
    )


def _index(place: list, key: str, path: str) -> int:
    if not key.isdigit() or int(key) >= len(place):
        raise InputError(f"override {path!r}: {key!r} is no index of a list of {len(place)}")
    return int(key)


def _structure_model(values: strict.Plain, _: type) -> ModelSection:
    """Keys that are not the section's own are overrides, each of the type its field in ModelConfig has."""
    own = {key: value for key, value in values.items() if key in SECTION_KEYS}
    hints = typing.get_type_hints(ModelConfig)
    fields = {}
    for key, value in values.items():
        if key not in own:
            try:
                fields[key] = strict.converter.structure(value, hints[key])
            except InputError as error:
                raise InputError(f"{key}: {error}") from None
    hints = typing.get_type_hints(ModelSection)
    return ModelSection(
        **{key: strict.converter.structure(value, hints[key]) for key, value in own.items()}, overrides=fields
    )


def _unstructure_model(section: ModelSection) -> strict.Plain:
    return {name: getattr(section, name) for name in SECTION_KEYS} | section.overrides


strict.converter.register_structure_hook(ModelSection, _structure_model)
strict.converter.register_unstructure_hook(ModelSection, _unstructure_model)
