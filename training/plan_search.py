"""A recipe on a number of GPUs, and the settings nearest to it whose memory fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from mezzotint.models.config import ModelConfig
from mezzotint.models.errors import InputError
from mezzotint.training.config import TrainConfig
from mezzotint.training.layer_runs import ACTIVATIONS
from mezzotint.training.plan_memory import Memory, memory
from mezzotint.training.plan_pass import Pass
from mezzotint.training.plan_text import gigabytes
from mezzotint.training.plan_work import Gpu

FAR = 4  # times the usable bytes
MOST_GPUS = 1024  # the search ends here


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


def refusal(setting: Setting, gpu: Gpu) -> str:
    """By how much it does not fit, and what the nearest settings are that do."""
    need, free, found = setting.memory().peak, gpu.usable, nearest(setting, gpu)
    names = " or ".join(f"`{change}` ({gigabytes(memory.peak)})" for change, memory in found)
    return (
        f"{setting.config.run} on {setting.gpus} x {gpu.name} needs {gigabytes(need)} a GPU, "
        f"{gigabytes(need - free)} more than the {gigabytes(free)} that CUDA leaves of {gigabytes(gpu.bytes)}: "
        + (f"the nearest that fits is {names}" if found else "nothing that the plan can change makes it fit")
    )


def nearest(setting: Setting, gpu: Gpu) -> list[tuple[str, Memory]]:
    """Overrides that fit, and their memory: with fewer rows a pass, and with fewer activations kept.

    What is FAR from fitting only needs an answer: fewer rows alone, where they do. Where neither helps, with both and a
    higher ZeRO stage; then with more GPUs; then with shorter rows.
    """
    far = setting.memory().peak > FAR * gpu.usable
    found: list[tuple[str, Memory]] = []
    for search in (_fewer_rows, _fewer_activations):
        if not (far and found):
            found += [first for first in [_first(search(setting), gpu)] if first]
    for last in (_higher_stage, _more_gpus, _shorter_rows):
        found = found or [first for first in [_first(last(setting), gpu)] if first]
    return found


Change = tuple[str, Setting]


def _first(changes: Iterator[Change], gpu: Gpu) -> tuple[str, Memory] | None:
    for change, setting in changes:
        need = setting.memory()
        if need.peak <= gpu.usable:
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
