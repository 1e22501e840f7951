"""What a run would need on given GPUs, before anything is paid for: memory, time and disk, or the nearest that fits."""

from __future__ import annotations

from pathlib import Path

from mezzotint.data.manifest import NAME as MANIFEST
from mezzotint.data.manifest import read_manifest
from mezzotint.models.config import ModelConfig, preset
from mezzotint.models.errors import InputError
from mezzotint.training.build import base_model, check_layers, resolve_model
from mezzotint.training.config import TrainConfig
from mezzotint.training.noise import NoiseSource
from mezzotint.training.plan_search import Setting, refusal
from mezzotint.training.plan_text import report
from mezzotint.training.plan_work import known_gpu, step_work


def plan(config: TrainConfig, *, gpus: int, gpu: str) -> str:
    """Text for the user: parameters, FLOPs, bytes per GPU by part, times, checkpoints.

    Needs neither data nor a GPU, and allocates nothing of the model's size. Without prepared data the vocabulary is the
    preset's. Raises InputError for rows that cannot be shared out and for what does not fit, with what does.
    """
    kind = known_gpu(gpu)
    model, vocabulary = planned_model(config)
    check_rows(config, gpus)
    row_blocks = config.data.row_length // model.block_length
    noise = NoiseSource(
        seed=config.seed,
        rows_per_step=config.rows_per_step,
        row_blocks=row_blocks,
        slots=config.objective.slots(row_blocks),
        block_length=model.block_length,
    )
    setting = Setting(config=config, model=model, gpus=gpus)
    need = setting.memory()
    if need.peak > kind.usable:
        raise InputError(refusal(setting, kind))
    work = step_work(model, noise, micro_rows=config.micro_rows, activations=config.engine.activations)
    return report(config, model, need, work, gpus=gpus, gpu=kind, vocabulary=vocabulary)


def planned_model(config: TrainConfig) -> tuple[ModelConfig, str]:
    """The model that would be trained, and where its vocabulary comes from."""
    base, told = _base(config)
    row_length, block = config.data.row_length, config.model.block
    block = row_length if isinstance(block, str) else base.block_length if block is None else block
    if row_length % block:
        raise InputError(f"data.row_length {row_length} is no multiple of the block length {block}")
    folder = Path(config.data.sources[0][0])
    if (folder / MANIFEST).is_file():
        manifest = read_manifest(folder)
        model, told = resolve_model(base, config.model, block_length=block, manifest=manifest), f"of {folder}"
        check_layers(config, model)
        return model, told
    chunk = base.chunk_length if base.chunk_length % block == 0 else block
    values = base.to_dict() | {"block_length": block, "chunk_length": chunk} | config.model.overrides
    model = ModelConfig.from_dict(values)
    check_layers(config, model)
    return model, f"of {told}: {folder} is not prepared"


def _base(config: TrainConfig) -> tuple[ModelConfig, str]:
    """The sizes, and whose they are: the release's, or those of the preset where it is yet to be exported."""
    release, name = config.init_from, config.model.preset
    if release is None or (name is not None and not Path(release).exists()):
        return preset(str(name), config.model.backbone), f"the preset {name}, {config.model.backbone}"
    return base_model(config), release


def check_rows(config: TrainConfig, gpus: int) -> None:
    """InputError when the rows of a step cannot be shared out over the GPUs in whole micro-batches."""
    rows = config.rows_per_step
    if gpus < 1:
        raise InputError(f"--gpus is {gpus}; it must be at least 1")
    if rows % gpus:
        whole = [n for n in range(1, rows + 1) if rows % n == 0]
        shares = [n for n in whole if rows // n % config.micro_rows == 0] or whole
        near = {
            max((n for n in shares if n < gpus), default=1),
            min((n for n in shares if n > gpus), default=shares[-1]),
        }
        use = " or ".join(map(str, sorted(near)))
        raise InputError(f"rows_per_step {rows} cannot be shared out over {gpus} GPUs: use --gpus {use}")
    if rows // gpus % config.micro_rows:
        fitting = max(n for n in range(1, config.micro_rows) if rows // gpus % n == 0)
        raise InputError(
            f"the {rows // gpus} rows of each of {gpus} GPUs are no multiple of micro_rows {config.micro_rows}: "
            f"use micro_rows={fitting}"
        )
