"""Forward, backward and optimizer step on DeepSpeed's engine; the only file that imports it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mezzotint.models.errors import InputError
from mezzotint.training.distributed import Ranks
from mezzotint.training.noise import Noise
from mezzotint.training.objective import BlockSums, Objective

MAX_BUCKET = 500_000_000  # elements of DeepSpeed's communication buffers, which it allocates whole
PRECISIONS = ("float32", "autocast")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How a step is computed. Parameters are float32 always; autocast computes matrix products in bfloat16."""

    precision: str = "float32"
    zero_stage: int = 1

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise InputError(f"engine.precision is {self.precision!r}; use one of {', '.join(PRECISIONS)}")
        if self.zero_stage not in (0, 1, 2):
            raise InputError(
                f"engine.zero_stage is {self.zero_stage}; use 0, 1 or 2 (3 splits the weights that EMA and export read)"
            )
        if self.zero_stage == 2 and self.precision == "autocast":
            raise InputError("engine.zero_stage 2 does not work with precision 'autocast' in DeepSpeed: use stage 1")


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward and backward pass, with their draws."""

    tokens: Tensor  # (B, T) int64
    documents: Tensor  # (B, T) int64, -1 at pad
    noise: Noise


class NonFinite(RuntimeError):
    """Loss or gradient is NaN or infinite on some rank; the weights were not touched."""


class Engine:
    """One optimizer step at a time: `accumulate` micro-batches, then `step`.

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
        self.stage = config.zero_stage
        bucket = min(MAX_BUCKET, sum(p.numel() for p in objective.parameters()))
        settings = {
            "train_micro_batch_size_per_gpu": micro_rows,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": clip,
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
            "checkpoint": {"tag_validation": "Fail"},
        }
        self._engine, *_ = deepspeed.initialize(
            model=objective, optimizer=optimizer, config=settings, dist_init_required=False
        )

    @property
    def objective(self) -> Objective:
        return self._engine.module

    def accumulate(self, micro_batches: Sequence[MicroBatch], count: float) -> tuple[float, list[BlockSums]]:
        """Gradients of (sum of losses / count), count being the tokens of the global batch; this rank's sums."""
        total, details = torch.zeros((), dtype=torch.float64, device=self.ranks.device), []
        for place, micro in enumerate(micro_batches):
            loss, sums = self._engine(micro.tokens, micro.documents, micro.noise)
            self._engine.backward(loss * (self.ranks.world / count), scale_wrt_gas=False)
            total += loss.detach()
            details.append(sums)
            if place < len(micro_batches) - 1:
                self._engine.step()  # counts the micro-batch; the optimizer runs at the last one, in `step`
        return float(total), details

    def step(self, lr: float) -> float:
        """Clip, update the weights with rate `lr`, clear the gradients. Returns the global norm before clipping.

        Raises NonFinite, on all ranks alike, when a gradient is not finite.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        norm = self._plain_gradient_norm() if self.stage == 0 else None
        if norm is not None and not math.isfinite(norm):
            raise NonFinite("the gradient is not finite")
        self._engine.step()
        if norm is None:
            norm = float(self._engine.get_global_grad_norm())
            if not math.isfinite(norm):  # DeepSpeed has skipped the update, in silence
                raise NonFinite("the gradient is not finite")
        return norm

    def _plain_gradient_norm(self) -> float:
        """Without ZeRO the gradients lie whole on every parameter, and DeepSpeed does not keep their norm."""
        gradients = [p.grad for p in self.objective.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    def save(self, folder: Path) -> None:
        """Write optimizer, weights and counters into `folder`; collective. checkpoint.py makes it crash-safe."""
        # the universal format (another number of ranks) needs this mark at save time
        mark = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
        self._engine.save_checkpoint(str(folder), tag="engine", client_state=mark, save_latest=False)

    def load(self, folder: Path) -> None:
        """Continue from `save`; same number of ranks and ZeRO stage. Raises InputError when DeepSpeed finds nothing."""
        path, _ = self._engine.load_checkpoint(str(folder), tag="engine", load_lr_scheduler_states=False)
        if path is None:  # DeepSpeed only warns
            raise InputError(f"{folder} holds no engine state that DeepSpeed can read")

    def close(self) -> None:
        self._engine.destroy()


@contextlib.contextmanager
def precision(config: EngineConfig, device: torch.device) -> Iterator[None]:
    """The arithmetic of training, for passes outside the engine (validation)."""
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.precision == "autocast"):
        yield


def _import_deepspeed():
    """DeepSpeed, quiet, with nothing to compile.

    Its shared-memory communication would be built with a C++ compiler; the table says it cannot be. Replacing the
    table, not editing it, also spares the probing of every extension, which runs the compiler and prints what it lacks.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed
