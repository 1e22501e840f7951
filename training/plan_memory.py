"""Bytes of one GPU by part: what the engine holds, what a pass needs on top, and the most at any moment of a step."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from mezzotint.models.config import ModelConfig, parameter_count
from mezzotint.training.engine import MAX_BUCKET, EngineConfig
from mezzotint.training.plan_activations import Pass, PassBytes, pass_bytes

GATHERED = 10**9  # parameters that ZeRO 3 holds whole at one time (DeepSpeed's stage3_max_live_parameters)


@dataclass(frozen=True, kw_only=True)
class EngineBytes:
    """What DeepSpeed holds on each of N ranks for P parameters; measured on real engines, see tests/test_plan.py."""

    weights: float
    optimizer: float  # float32 masters where ZeRO keeps its own, and two moments
    gradients: float  # alive between the micro-batches of a step
    buckets: float  # alive during a pass: gradients on their way to other ranks
    during: float  # most on top inside a backward pass: weights that ZeRO 3 gathers, gradients reduced at once
    reduce: float  # most on top of gradients and buckets when they are reduced after the last pass
    update: float  # most on top of weights and optimizer in the update

    @property
    def held(self) -> float:
        return self.weights + self.optimizer


@dataclass(frozen=True, kw_only=True)
class Memory:
    """One GPU's bytes. The parts add up to `peak`, the most at any moment of a step."""

    engine: EngineBytes
    average: float  # this rank's share of the averaged weights
    activations: PassBytes

    @property
    def held(self) -> float:
        """Alive all the time."""
        return self.engine.held + self.average

    @property
    def passing(self) -> float:
        """Most while a micro-batch is computed."""
        return self.held + self.engine.gradients + self.engine.buckets + self.engine.during + self.activations.peak

    @property
    def peak(self) -> float:
        reducing = self.held + self.engine.gradients + self.engine.buckets + self.engine.reduce
        return max(self.passing, reducing, self.held + self.engine.update)


def engine_bytes(parameters: int, config: EngineConfig, gpus: int) -> EngineBytes:
    """From the ZeRO stage and precision, in DeepSpeed 0.19 as `engine.py` sets it up.

    A bucket holds at most MAX_BUCKET gradients and exists whole. Reducing one makes a flat copy of it, and in bf16 mode
    another in bfloat16. Stage 1 keeps whole gradients and reduces them behind the last pass; 2 and 3 reduce in every
    backward pass, into the rank's share.
    """
    low = 2 if config.precision == "bf16" else 4  # bytes of a weight and of its gradient
    whole, share = 4 * parameters, 4 * parameters / gpus  # in float32
    bucket = min(MAX_BUCKET, parameters)
    weights, optimizer, update = float(low * parameters), 3 * share, 3 * share
    if config.zero_stage == 0:
        return EngineBytes(
            weights=weights, optimizer=2 * whole, gradients=whole, buckets=0, during=0, reduce=4 * bucket,
            update=2 * whole,
        )  # fmt: skip
    if config.zero_stage == 1 and low == 2:  # accumulates whole gradients in float32, allocated once, beside its own
        weights, gradients, buckets, during = weights + whole, weights, 0.0, 0.0
        reduce, update = 6 * bucket, gradients + 2 * share
    elif config.zero_stage == 1:
        gradients, buckets, during, reduce = whole, 4 * bucket, 0.0, 4 * bucket + share
    elif config.zero_stage == 2:
        gradients, buckets, during, reduce = share, low * bucket, low * bucket + share, low * bucket + share
    else:
        weights, optimizer = low * parameters / gpus, 4 * share  # with a buffer for the share's gradients
        gradients, buckets, update = 0.0, low * bucket, 2 * share
        during = low * (min(GATHERED, parameters) + bucket + bucket / gpus)
        reduce = low * (bucket + bucket / gpus)
    return EngineBytes(
        weights=weights, optimizer=optimizer, gradients=gradients, buckets=buckets, during=during, reduce=reduce,
        update=update,
    )  # fmt: skip


def memory(p: Pass, *, gpus: int, average: bool) -> Memory:
    """One GPU of `gpus`; average: the run keeps averaged weights."""
    parameters = parameter_count(p.model)
    return Memory(
        engine=engine_bytes(parameters, p.engine, gpus),
        average=4 * parameters / gpus if average else 0.0,
        activations=_pass_bytes(p),
    )


@functools.lru_cache(maxsize=64)
def _pass_bytes(p: Pass) -> PassBytes:
    return pass_bytes(p)


def checkpoint_bytes(model: ModelConfig, *, average: bool) -> int:
    """Weights, two moments and the average, in float32."""
    return parameter_count(model) * 4 * (4 if average else 3)
