"""Full optimizer steps of a preset on one device, and their peak of memory beside what `mezzotint-train --plan` counts.

For `make gpu`: random tokens, the real objective, DeepSpeed's engine where it is installed, else AdamW in plain torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from mezzotint.data.cli import run_command
from mezzotint.eval.fill import random_tokens
from mezzotint.eval.memory import available_bytes
from mezzotint.eval.subjects import build, preset_subject
from mezzotint.models.config import ModelConfig, parameter_count
from mezzotint.models.errors import InputError
from mezzotint.training.engine import Engine, EngineConfig, MicroBatch
from mezzotint.training.layer_runs import layer_run
from mezzotint.training.noise import NoiseSource
from mezzotint.training.objective import Objective, ObjectiveConfig
from mezzotint.training.optim import OptimConfig, make_optimizer
from mezzotint.training.plan_activations import pass_bytes
from mezzotint.training.plan_memory import memory
from mezzotint.training.plan_pass import Pass

ACCUMULATION = 2  # micro-batches a step: gradients are alive while the second is computed, as the plan counts them
MARGIN = 0.94  # of the free memory that a setting may be planned to need
LR, CLIP = 1e-4, 1.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is run."""

    size: str
    backbone: str
    engine: str  # 'deepspeed' or 'plain'
    micro_rows: int
    row_length: int
    activations: str

    @property
    def config(self) -> EngineConfig:
        return EngineConfig(precision="autocast", zero_stage=1, activations=self.activations)

    @property
    def rows(self) -> int:
        return self.micro_rows * ACCUMULATION

    def planned_peak(self, model: ModelConfig) -> float:
        """Bytes: with DeepSpeed the plan's own; in plain torch its pass above weights, gradients and two moments.

        Fused AdamW makes no temporary copies.
        """
        p = Pass(
            model=model,
            objective=ObjectiveConfig(),
            engine=self.config,
            rows=self.micro_rows,
            row_length=self.row_length,
        )
        if self.engine == "deepspeed":
            return memory(p, gpus=1, average=False).peak
        return 16.0 * parameter_count(model) + pass_bytes(p).peak


def choose(size: str, backbone: str, row_length: int, *, free: float) -> Setting:
    """The first setting whose plan fits into `free` bytes. Raises InputError where none does."""
    model = preset_subject(size, backbone).config
    engines = (["deepspeed"] if importlib.util.find_spec("deepspeed") else []) + ["plain"]
    for engine in engines:
        for micro_rows in (4, 2, 1):
            setting = Setting(
                size=size, backbone=backbone, engine=engine, micro_rows=micro_rows, row_length=row_length,
                activations="selective",
            )  # fmt: skip
            if setting.planned_peak(model) <= MARGIN * free:
                return setting
    raise InputError(f"{size} {backbone} on rows of {row_length} needs more than the {free / 1e9:.1f} GB that are free")


def measure(setting: Setting, *, steps: int, device: torch.device) -> dict:
    """Run `steps` optimizer steps: seconds, losses, bytes planned and, on CUDA, bytes at the peak."""
    model = build(preset_subject(setting.size, setting.backbone), dtype=torch.float32, device=device)
    model.train().requires_grad_(True)
    run = layer_run(setting.activations, compiled=False)
    objective = Objective(model, ObjectiveConfig().noise_schedule(), run=run)
    micro_batches = _micro_batches(setting, model.config, device)
    step = (_deepspeed if setting.engine == "deepspeed" else _plain)(setting, objective, device)
    losses, seconds = [], []
    for number in range(steps):
        if number == 1 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)  # the first step makes the optimizer's state
        begun = time.perf_counter()
        losses.append(step(micro_batches(number)))
        seconds.append(time.perf_counter() - begun)
    planned = setting.planned_peak(model.config)
    found = asdict(setting) | {"steps": steps, "losses": losses, "seconds": seconds, "planned_bytes": planned}
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        found |= {"peak_bytes": peak, "reserved_bytes": torch.cuda.max_memory_reserved(device)}
        found["peak_over_plan"] = peak / planned
    return found


Step = Callable[[list[MicroBatch]], float]


def _micro_batches(setting: Setting, model: ModelConfig, device: torch.device) -> Callable[[int], list[MicroBatch]]:
    blocks = setting.row_length // model.block_length
    source = NoiseSource(
        seed=0, rows_per_step=setting.rows, row_blocks=blocks, slots=blocks, block_length=model.block_length
    )
    generator = torch.Generator().manual_seed(0)
    full = torch.full((setting.micro_rows,), blocks)

    def draw(step: int) -> list[MicroBatch]:
        found = []
        for first in range(0, setting.rows, setting.micro_rows):
            tokens = random_tokens(model, setting.micro_rows, setting.row_length, generator=generator).to(device)
            noise = source.draw(step=step, first_row=first, blocks=full)
            ids = torch.arange(first, first + setting.micro_rows)
            found.append(MicroBatch(tokens, torch.zeros_like(tokens), noise, ids))
        return found

    return draw


def _deepspeed(setting: Setting, objective: Objective, device: torch.device) -> Step:
    from mezzotint.training.distributed import join
    from mezzotint.training.stopwatch import Stopwatch

    optimizer = make_optimizer(objective, OptimConfig(lr=LR))
    engine = Engine(
        objective, optimizer, config=setting.config, clip=CLIP, micro_rows=setting.micro_rows, accumulation=ACCUMULATION,
        ranks=join(),
    )  # fmt: skip
    clock, count = Stopwatch(device), torch.tensor(float(setting.rows * setting.row_length), device=device)

    def step(micro_batches: list[MicroBatch]) -> float:
        total, _, _ = engine.accumulate(micro_batches, count, clock)
        engine.step(LR)
        return float(total.sum() / count)

    return step


def _plain(setting: Setting, objective: Objective, device: torch.device) -> Step:
    parameters = list(objective.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    count = setting.rows * setting.row_length

    def step(micro_batches: list[MicroBatch]) -> float:
        total = 0.0
        for micro in micro_batches:
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss, _ = objective(micro.tokens, micro.documents, micro.noise)
            (loss / count).backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total / count

    return step


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mezzotint.launch.gpu_steps", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", default="3b", help="preset (default: %(default)s)")
    parser.add_argument("--backbone", default="mamba", help="backbone (default: %(default)s)")
    parser.add_argument("--row-length", type=int, default=1024, help="tokens of a row (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: %(default)s)")
    parser.add_argument("--engine", choices=("deepspeed", "plain"), help="default: deepspeed where it is and fits")
    parser.add_argument("--wait", action="store_true", help="plan, then wait for a line of standard input to begin")
    options = parser.parse_args(arguments)

    def run() -> int:
        device = torch.device(options.device)
        setting = choose(options.size, options.backbone, options.row_length, free=available_bytes(device))
        if options.engine:
            setting = Setting(**asdict(setting) | {"engine": options.engine})
        if options.wait:
            sys.stdin.readline()
        print(json.dumps(measure(setting, steps=options.steps, device=device)))
        return 0

    return run_command(run, InputError)


if __name__ == "__main__":
    sys.exit(main())
