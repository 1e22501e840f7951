"""What a run would need on given GPUs, before anything is paid for: memory, time and disk, or the nearest that fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mezzotint.data.manifest import NAME as MANIFEST
from mezzotint.data.manifest import read_manifest
from mezzotint.models.config import ModelConfig, preset
from mezzotint.models.errors import InputError
from mezzotint.models.weights import load_config
from mezzotint.training.build import resolve_model
from mezzotint.training.config import TrainConfig
from mezzotint.training.layer_runs import ACTIVATIONS
from mezzotint.training.noise import NoiseSource
from mezzotint.training.plan_memory import Memory, memory
from mezzotint.training.plan_pass import Pass
from mezzotint.training.plan_text import gigabytes, report
from mezzotint.training.plan_work import Gpu, known_gpu, step_work

RESERVED = 0.06  # of a GPU's memory, for the CUDA context, NCCL's buffers and what the allocator cannot fill
MOST_GPUS = 1024  # the search for a setting that fits ends here


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A recipe on a number of GPUs."""

    config: TrainConfig
    model: ModelConfig
    gpus: int

    def memory(self) -> Memory:
        p = Pass(
            model=self.model,
            objective=self.config.objective,
            engine=self.config.engine,
            rows=self.config.micro_rows,
            row_length=self.config.data.row_length,
        )
        return memory(p, gpus=self.gpus, average=self.config.ema_decay > 0)


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
    if need.peak > usable(kind):
        raise InputError(refusal(setting, kind))
    work = step_work(model, noise, micro_rows=config.micro_rows, activations=config.engine.activations)
    return report(config, model, need, work, gpus=gpus, gpu=kind, free=usable(kind), vocabulary=vocabulary)


def usable(gpu: Gpu) -> float:
    return gpu.bytes * (1 - RESERVED)


def planned_model(config: TrainConfig) -> tuple[ModelConfig, str]:
    """The model that would be trained, and where its vocabulary comes from."""
    base = (
        load_config(config.init_from) if config.init_from else preset(str(config.model.preset), config.model.backbone)
    )
    row_length, block = config.data.row_length, config.model.block
    block = row_length if isinstance(block, str) else base.block_length if block is None else block
    if row_length % block:
        raise InputError(f"data.row_length {row_length} is no multiple of the block length {block}")
    folder = Path(config.data.sources[0][0])
    if (folder / MANIFEST).is_file():
        manifest = read_manifest(folder)
        return resolve_model(base, config.model, block_length=block, manifest=manifest), f"of {folder}"
    chunk = base.chunk_length if base.chunk_length % block == 0 else block
    values = base.to_dict() | {"block_length": block, "chunk_length": chunk} | config.model.overrides
    model = ModelConfig.from_dict(values)
    return model, f"of {config.init_from or f'the preset {config.model.preset}'}: {folder} is not prepared"


def check_rows(config: TrainConfig, gpus: int) -> None:
    """InputError when the rows of a step cannot be shared out over the GPUs in whole micro-batches."""
    rows = config.rows_per_step
    if gpus < 1:
        raise InputError(f"--gpus is {gpus}; it must be at least 1")
    if rows % gpus:
        below = max((n for n in range(1, max(gpus, 1)) if rows % n == 0), default=1)
        above = min((n for n in range(gpus + 1, rows + 1) if n > 0 and rows % n == 0), default=rows)
        raise InputError(f"rows_per_step {rows} cannot be shared out over {gpus} GPUs: use --gpus {below} or {above}")
    if rows // gpus % config.micro_rows:
        fitting = max(n for n in range(1, config.micro_rows) if rows // gpus % n == 0)
        raise InputError(
            f"the {rows // gpus} rows of each of {gpus} GPUs are no multiple of micro_rows {config.micro_rows}: "
            f"use micro_rows={fitting}"
        )


def refusal(setting: Setting, gpu: Gpu) -> str:
    """By how much it does not fit, and what the nearest settings are that do."""
    need, free, found = setting.memory().peak, usable(gpu), nearest(setting, gpu)
    names = " or ".join(f"`{change}` ({gigabytes(memory.peak)})" for change, memory in found)
    return (
        f"{setting.config.run} on {setting.gpus} x {gpu.name} needs {gigabytes(need)} a GPU, "
        f"{gigabytes(need - free)} more than the {gigabytes(free)} that CUDA leaves of {gigabytes(gpu.bytes)}: "
        + (f"the nearest that fits is {names}" if found else "nothing that the plan can change makes it fit")
    )


def nearest(setting: Setting, gpu: Gpu) -> list[tuple[str, Memory]]:
    """Overrides that fit, and their memory: with fewer rows a pass, and with fewer activations kept.

    Where neither helps, with both and a higher ZeRO stage; then with more GPUs; then with shorter rows.
    """
    found = [first for search in (_fewer_rows, _fewer_activations) if (first := _first(search(setting), gpu))]
    for last in (_higher_stage, _more_gpus, _shorter_rows):
        found = found or [first for first in [_first(last(setting), gpu)] if first]
    return found


Change = tuple[str, Setting]


def _first(changes: Iterator[Change], gpu: Gpu) -> tuple[str, Memory] | None:
    for change, setting in changes:
        need = setting.memory()
        if need.peak <= usable(gpu):
            return change, need
    return None


def _fewer_rows(setting: Setting) -> Iterator[Change]:
    share = setting.config.rows_per_step // setting.gpus
    for rows in range(setting.config.micro_rows - 1, 0, -1):
        if share % rows == 0:
            yield f"micro_rows={rows}", _replaced(setting, micro_rows=rows)


def _fewer_activations(setting: Setting) -> Iterator[Change]:
    for activations in ACTIVATIONS[ACTIVATIONS.index(setting.config.engine.activations) + 1 :]:
        if (changed := _with_engine(setting, activations=activations)) is not None:
            name = f"engine.activations={activations}"
            yield name, changed
            yield from ((f"{name} {rows}", fewer) for rows, fewer in _fewer_rows(changed))


def _higher_stage(setting: Setting) -> Iterator[Change]:
    for stage in range(setting.config.engine.zero_stage + 1, 4):
        if (changed := _with_engine(setting, zero_stage=stage)) is not None:
            name = f"engine.zero_stage={stage}"
            yield name, changed
            for search in (_fewer_rows, _fewer_activations):
                yield from ((f"{name} {change}", fewer) for change, fewer in search(changed))


def _more_gpus(setting: Setting) -> Iterator[Change]:
    gpus = 2 * setting.gpus
    while gpus <= MOST_GPUS and setting.config.rows_per_step % (gpus * setting.config.micro_rows) == 0:
        changed = dataclasses.replace(setting, gpus=gpus)
        yield f"--gpus {gpus}", changed
        for search in (_fewer_rows, _fewer_activations, _higher_stage):
            yield from ((f"--gpus {gpus} {change}", fewer) for change, fewer in search(changed))
        gpus *= 2


def _shorter_rows(setting: Setting) -> Iterator[Change]:
    leanest = next(
        changed for x in reversed(ACTIVATIONS) if (changed := _with_engine(setting, activations=x)) is not None
    )
    engine, frontiers = leanest.config.engine, setting.config.objective.frontiers
    length, size = setting.config.data.row_length // 2, setting.model.block_length
    while length >= size and length % size == 0:
        name = f"data.row_length={length} micro_rows=1 engine.activations={engine.activations}"
        objective = setting.config.objective
        if isinstance(frontiers, int) and frontiers > length // size:
            objective = dataclasses.replace(objective, frontiers=length // size)
            name += f" objective.frontiers={length // size}"
        data = dataclasses.replace(setting.config.data, row_length=length)
        yield name, _replaced(setting, data=data, engine=engine, objective=objective, micro_rows=1)
        length //= 2


def _replaced(setting: Setting, **fields: object) -> Setting:
    return dataclasses.replace(setting, config=dataclasses.replace(setting.config, **fields))  # type: ignore[arg-type]


def _with_engine(setting: Setting, **fields: object) -> Setting | None:
    """None where the engine refuses the combination."""
    try:
        return _replaced(setting, engine=dataclasses.replace(setting.config.engine, **fields))  # type: ignore[arg-type]
    except InputError:
        return None
