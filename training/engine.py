"""Forward, backward and optimizer step on DeepSpeed's engine; the only file that imports it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mezzotint.models.errors import InputError
from mezzotint.models.mamba2 import Mamba2
from mezzotint.training.distributed import Ranks
from mezzotint.training.fragments import Fragment, flat_fragments, split_fragments, start_moments, whole_fragments
from mezzotint.training.gradient_watch import GradientWatch
from mezzotint.training.layer_runs import ACTIVATIONS
from mezzotint.training.noise import Noise
from mezzotint.training.objective import BlockSums, Objective
from mezzotint.training.stopwatch import Stopwatch

MAX_BUCKET = 500_000_000  # elements of DeepSpeed's communication buffers, which it allocates whole
PRECISIONS = ("float32", "autocast", "bf16")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How a step is computed.

    precision: 'float32'; 'autocast', float32 parameters and products in bfloat16; 'bf16', DeepSpeed's own mode: bfloat16
    parameters beside float32 masters and float32 accumulation (attention only: it would round Mamba's time scales).
    activations: what is kept for the backward pass, see `layer_runs`; compile: torch.compile, layer by layer.
    """

    precision: str = "float32"
    zero_stage: int = 1
    activations: str = "all"
    compile: bool = False

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise InputError(f"engine.precision is {self.precision!r}; use one of {', '.join(PRECISIONS)}")
        if self.activations not in ACTIVATIONS:
            raise InputError(f"engine.activations is {self.activations!r}; use one of {', '.join(ACTIVATIONS)}")
        if self.zero_stage not in (0, 1, 2, 3):
            raise InputError(f"engine.zero_stage is {self.zero_stage}; use 0, 1, 2 or 3")
        if self.zero_stage == 0 and self.precision == "bf16":
            raise InputError("engine.zero_stage 0 cannot accumulate in float32 with precision 'bf16': use stage 1")
        if self.compile and self.activations == "selective":
            raise InputError("engine.compile chooses by itself what to keep: use engine.activations 'all' or 'layer'")
        if self.compile and self.zero_stage == 3:
            raise InputError("engine.compile does not work with zero_stage 3, whose weights come and go: use stage 1")


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward and backward pass, with their draws."""

    tokens: Tensor  # (B, T) int64
    documents: Tensor  # (B, T) int64, -1 at pad
    noise: Noise
    row_ids: Tensor  # (B,) int64 on the CPU, the loader's


class Engine:
    """One optimizer step at a time: `accumulate` micro-batches, then `step` or `discard`.

    DeepSpeed averages gradients over ranks; the loss is a sum over all of them divided by one global count, so
    `accumulate` multiplies by the number of ranks and lets DeepSpeed divide by nothing else.
    """

    def __init__(
        self,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        *,
        config: EngineConfig,
        clip: float,
        micro_rows: int,
        accumulation: int,
        ranks: Ranks,
    ) -> None:
        deepspeed = _import_deepspeed()
        self.ranks = ranks
        self.stage, self.clip = config.zero_stage, clip
        self.watch = GradientWatch(objective)
        settings = _settings(config, objective, clip=clip, micro_rows=micro_rows, accumulation=accumulation)
        if config.precision == "bf16":
            objective = objective.bfloat16()  # type: ignore[assignment]
        self._linear = nn.functional.linear  # ZeRO 3 puts its own in place, for the whole process
        self._engine, *_ = deepspeed.initialize(
            model=objective, optimizer=optimizer, config=settings, dist_init_required=False
        )
        if self.stage == 3:
            for module, parameter in _used_elsewhere(objective):
                deepspeed.zero.register_external_parameter(module, parameter)
        self._inner = optimizer if self.stage == 0 else self._engine.optimizer.optimizer
        self._link(0)

    @property
    def objective(self) -> Objective:
        return self._engine.module

    def accumulate(
        self, micro_batches: Sequence[MicroBatch], count: Tensor, clock: Stopwatch
    ) -> tuple[Tensor, Tensor, list[BlockSums]]:
        """Gradients of (sum of losses / count), count () being the tokens of the global batch, on the device.

        Returns, on the device so that nothing here waits for it, for each micro-batch: its loss sum, whether its loss or
        a gradient is not finite, both (micro-batches,), and its block sums.
        """
        losses, details = [], []
        self.watch.start(len(micro_batches), self.ranks.device)
        for place, micro in enumerate(micro_batches):
            self.watch.place = place
            with clock.split("forward"):
                loss, sums = self._engine(micro.tokens, micro.documents, micro.noise)
            losses.append(loss.detach())
            details.append(sums)
            # an infinite loss may have finite gradients: times NaN, so that every ZeRO stage sees what the watch saw
            scale = torch.where(torch.isfinite(losses[-1]), self.ranks.world / count.to(loss.dtype), torch.nan)
            with clock.split("backward"):
                self._engine.backward(loss * scale, scale_wrt_gas=False)
            if place < len(micro_batches) - 1:
                self._engine.step()  # counts the micro-batch; the optimizer runs at the last one, in `step`
        total = torch.stack(losses)
        return total, self.watch.bad(total), details

    def step(self, lr: float) -> float:
        """Clip, update the weights with rate `lr`, clear the gradients. Returns the global norm before clipping.

        It is infinite, on all ranks alike, when a sum over ranks overflowed: then the step was discarded.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        norm = self._clip_plain() if self.stage == 0 else None
        if norm is not None and not math.isfinite(norm):
            self.discard()
            return math.inf
        self._engine.step()
        if norm is None:
            norm = float(self._engine.get_global_grad_norm())
        return norm if self._engine.was_step_applied() else math.inf  # DeepSpeed skips in silence

    def discard(self) -> None:
        """Drop the accumulated gradients of a step that is not finite, leaving weights and moments as they are."""
        if self.stage == 0:
            for p in self.objective.parameters():
                p.grad = None
        self._engine.step()  # without gradients AdamW does nothing; with ZeRO, DeepSpeed skips what is not finite
        if self.stage and self._engine.was_step_applied():
            raise RuntimeError("DeepSpeed applied a step whose gradient is not finite: the weights are spoiled")

    def fragments(self, *, reading: bool = False) -> list[Fragment]:
        """This rank's share of weights and moments, as views; the same order at every call.

        reading: all that this rank holds; more than its share without ZeRO, where every rank holds everything.
        """
        if self.stage == 0:
            rank, world = (0, 1) if reading else (self.ranks.rank, self.ranks.world)
            return whole_fragments(self.objective.model, self._inner, rank, world)
        if self.stage == 3:
            return list(split_fragments(self.objective.model, self._engine.optimizer, self.ranks.rank))
        return list(flat_fragments(self.objective.model))

    def restored(self, updates: int) -> None:
        """Take over `fragments(reading=True)` as written from outside, after `updates` optimizer steps; collective."""
        self._link(updates)
        optimizer = self._engine.optimizer
        if self.stage == 3:
            for group in range(len(optimizer.fp16_groups)):
                optimizer._reassign_or_swap_out_partitioned_parameters(group)
            if optimizer.persistent_parameters:
                optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
        elif self.stage:
            optimizer.update_lp_params()

    def _clip_plain(self) -> float:
        """Without ZeRO the gradients lie whole on every parameter: clip them here. Returns their norm before.

        DeepSpeed would clip them too, but keeps no norm, and dies of a step without gradients, see `discard`.
        """
        parameters = [p for p in self.objective.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self.clip:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clip, norm)
        return float(norm)

    def _link(self, updates: int) -> None:
        """Make AdamW's moments where torch has not yet, set its count of steps, and tie them to the parameters."""
        flat = [p for group in self._inner.param_groups for p in group["params"]]
        optimizer = self._engine.optimizer
        start_moments(self._inner, optimizer.fp32_partitioned_groups_flat if self.stage == 3 else flat, updates)
        if self.stage in (1, 2):
            optimizer._lazy_init_hp_params_optimizer_state()

    def close(self) -> None:
        self.watch.close()
        self._engine.destroy()
        nn.functional.linear = self._linear


def _settings(config: EngineConfig, objective: Objective, *, clip: float, micro_rows: int, accumulation: int) -> dict:
    """DeepSpeed's configuration: explicit numbers, nothing left to its defaults that changes results."""
    bucket = min(MAX_BUCKET, sum(p.numel() for p in objective.parameters()))
    settings = {
        "train_micro_batch_size_per_gpu": micro_rows,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip if config.zero_stage else 0.0,  # see Engine._clip_plain
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": config.zero_stage,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        },
        # an empty list: gradients of linear layers are summed over ranks in float32 too, not in bfloat16
        "torch_autocast": {
            "enabled": config.precision == "autocast",
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],
        },
    }
    if config.precision == "bf16":
        # left to itself DeepSpeed would sum over ranks in bfloat16 what each of them has added up in float32
        settings |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        settings["communication_data_type"] = "fp32"
    return settings


def _used_elsewhere(objective: Objective) -> list[tuple[nn.Module, nn.Parameter]]:
    """(module, parameter of another module that its forward reads): ZeRO 3 gathers only a module's own by itself."""
    model = objective.model
    pairs: list[tuple[nn.Module, Any]] = [(objective, model.embed.weight), (objective, model.norm.weight)]
    if not model.config.tie_embeddings:
        pairs.append((objective, model.head.weight))
    for mixer in (module for module in model.modules() if isinstance(module, Mamba2)):
        pairs += [(mixer, mixer.conv1d.weight), (mixer, mixer.conv1d.bias), (mixer, mixer.norm.weight)]
    return pairs


@contextlib.contextmanager
def precision(config: EngineConfig, device: torch.device) -> Iterator[None]:
    """The arithmetic of training, for passes outside the engine (validation)."""
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.precision != "float32"):
        yield


def _import_deepspeed():
    """DeepSpeed, quiet, with nothing to compile.

    Its shared-memory communication would be built with a C++ compiler; the table says it cannot be. Replacing the
    table, not editing it, also spares the probing of every extension, which runs the compiler and prints what it lacks.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    # torch renamed collectives that DeepSpeed's stage 3 calls under their old names, a warning each time
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\..*is deprecated", category=FutureWarning)
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    # its Muon, which is used nowhere here, is compiled when it is imported, and all of torch's inductor with it
    deepspeed.runtime.compiler.compile = lambda: lambda function: function
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed
