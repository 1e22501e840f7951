"""From a recipe to what exists before any training: data, tokenizer, model configuration, noise, model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from mezzotint.data.loader import Loader
from mezzotint.data.manifest import Manifest, check_tokenizer, check_vocabulary
from mezzotint.data.tokenizer import Tokenizer, load_tokenizer
from mezzotint.models.config import ModelConfig, preset
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.errors import InputError
from mezzotint.models.weights import load_config, load_model
from mezzotint.training.config import ModelSection, TrainConfig, arms_hash
from mezzotint.training.noise import NoiseSource
from mezzotint.training.validate import HeldOut, load_held_out


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A checked run: its recipe with every value filled in, and what it reads and draws."""

    config: TrainConfig
    model: ModelConfig
    loader: Loader
    tokenizer: Tokenizer
    noise: NoiseSource
    held_out: HeldOut | None
    arms_hash: str


def make_plan(config: TrainConfig) -> Plan:
    """Open the data, check that all parts fit, and fill in the recipe. Raises InputError for what does not fit."""
    row_wide = config.model.block == "row"
    data = dataclasses.replace(config.data, align=config.data.align and not row_wide)
    base = base_model(config)
    block = _block_length(config.model.block, row_length=data.row_length, own=base.block_length)
    loader = Loader(data, block)
    manifest = loader.manifests[0]
    tokenizer = load_tokenizer(manifest.folder)
    model = resolve_model(base, config.model, block_length=block, manifest=manifest)
    check_layers(config, model)
    for source in loader.manifests:
        check_tokenizer(source, tokenizer)
        check_vocabulary(source, model.vocab_size)
    if config.init_from is not None:
        _check_release_tokenizer(config.init_from, tokenizer)
    noise = NoiseSource(
        seed=config.seed,
        rows_per_step=config.rows_per_step,
        row_blocks=data.row_length // block,
        slots=config.objective.slots(data.row_length // block),
        block_length=block,
    )
    section = dataclasses.replace(config.model, overrides=_overrides(model), block=config.model.block or block)
    config = dataclasses.replace(config, data=data, model=section)
    held_out = load_held_out(config.validation, data=data, block_length=block, tokenizer=tokenizer)
    return Plan(
        config=config,
        model=model,
        loader=loader,
        tokenizer=tokenizer,
        noise=noise,
        held_out=held_out,
        arms_hash=arms_hash(config, loader.hash),
    )


def check_layers(config: TrainConfig, model: ModelConfig) -> None:
    """InputError for what the recipe asks of layers that cannot do it."""
    if config.model.block == "row" and "M" in model.pattern:
        raise InputError(f"model.block 'row' is for attention alone; the pattern {model.pattern} has Mamba layers")
    if config.engine.precision == "bf16" and "M" in model.pattern:
        raise InputError(
            f"engine.precision 'bf16' would round the time scales of the Mamba layers in {model.pattern}: use 'autocast'"
        )


def resolve_model(base: ModelConfig, section: ModelSection, *, block_length: int, manifest: Manifest) -> ModelConfig:
    """`base` with the recipe's fields, the block length, and the vocabulary of the data.

    The chunk length of the preset is kept where the block divides it, else it becomes the block; so does a recipe's own
    in a model without Mamba layers, which has no chunks: a block as long as the row asks for no second change.
    """
    ids = {"mask_token_id": manifest.mask_id, "eos_token_id": manifest.eos_id, "pad_token_id": manifest.pad_id}
    for name, value in ids.items():
        if section.overrides.get(name, value) != value:
            raise InputError(
                f"model.{name} is {section.overrides[name]}, but the tokenizer of {manifest.folder} has {value}"
            )
    vocabulary = {"vocab_size": manifest.vocab_size} | ids
    chunk = base.chunk_length if base.chunk_length % block_length == 0 else block_length
    values = base.to_dict() | {"block_length": block_length, "chunk_length": chunk} | vocabulary | section.overrides
    own = values["chunk_length"]
    if "M" not in str(values["pattern"]) and isinstance(own, int) and own % block_length:
        values["chunk_length"] = block_length
    return ModelConfig.from_dict(values)


def build_model(plan: Plan) -> Denoiser:
    """The denoiser with its starting weights: drawn from the seed, or those of `init_from`."""
    model = Denoiser(plan.model, generator=torch.Generator().manual_seed(plan.config.seed))
    folder = plan.config.init_from
    if folder is not None:
        weights = load_model(folder, dtype=torch.float32).state_dict()
        shapes = {name: value.shape for name, value in model.state_dict().items()}
        for name in sorted(shapes.keys() | weights.keys()):
            theirs = weights[name].shape if name in weights else None
            if shapes.get(name) != theirs:
                raise InputError(
                    f"init_from {folder}: {name} is {_shape(theirs)} there, {_shape(shapes.get(name))} in this recipe"
                )
        model.load_state_dict(weights)
    return model


def base_model(config: TrainConfig) -> ModelConfig:
    """The configuration that the recipe's fields go on top of: the release's, else the preset's."""
    release = config.init_from
    if release is not None and not Path(release).exists():
        raise InputError(
            f"init_from {release} is not there: export it first (mezzotint-export RUN {release}); --plan goes by a preset "
            "until then (model.preset=3b model.backbone=mamba, say)"
        )
    if release is not None:
        return load_config(release)
    return preset(str(config.model.preset), config.model.backbone)


def _block_length(block: int | str | None, *, row_length: int, own: int) -> int:
    if isinstance(block, str):  # 'row'
        return row_length
    return own if block is None else block


def _check_release_tokenizer(folder: str, tokenizer: Tokenizer) -> None:
    """InputError when the weights of `folder` know other tokens; one without a tokenizer is taken at its word."""
    if any(Path(folder).glob("tokenizer.*")) and load_tokenizer(folder).sha256 != tokenizer.sha256:
        raise InputError(
            f"init_from {folder} was trained with another tokenizer than {tokenizer.files[0]}: "
            f"prepare the data with `--tokenizer {folder}`"
        )


def _overrides(model: ModelConfig) -> dict:
    values = model.to_dict()
    del values["block_length"]
    return values


def _shape(shape: torch.Size | None) -> str:
    return "missing" if shape is None else "x".join(map(str, shape))
