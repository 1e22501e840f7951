"""Bytes of one GPU by part: what the engine holds, what a pass needs on top, and the most at any moment of a step."""

from __future__ import annotations

from dataclasses import dataclass

from mezzotint.models.config import ModelConfig, parameter_count
from mezzotint.training.engine import MAX_BUCKET, EngineConfig
from mezzotint.training.plan_activations import PassBytes, pass_bytes
from mezzotint.training.plan_pass import Pass

# elements that ZeRO 3 holds whole at one time, and fetches ahead into a buffer of their own; DeepSpeed's defaults
GATHERED, FETCHED = 10**9, 5 * 10**7


@dataclass(frozen=True, kw_only=True)
class EngineBytes:
    """What DeepSpeed holds on one of N ranks; tests/test_plan.py measures it on real engines."""

    weights: float
    optimizer: float  # float32 masters where ZeRO keeps its own, and two moments
    gradients: float  # alive between the micro-batches of a step
    buckets: float  # alive during a pass: gradients on their way to other ranks
    bucket_share: float  # of all gradients that one bucket holds
    gathered: float = 0.0  # weights that ZeRO 3 puts together for a pass
    flushed: float = 0.0  # on top while a backward pass reduces its first full bucket, gathered weights too
    reduced: float = 0.0  # on top while gradients are reduced behind the last pass
    updated: float  # most on top of weights and optimizer in the update

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
        """Most while a micro-batch is computed: at its own peak, or when its backward pass has filled a bucket."""
        engine, own = self.engine, self.activations.peak
        inside = max(own + engine.gathered, own * (1 - engine.bucket_share) + engine.flushed)
        return self.held + engine.gradients + engine.buckets + inside

    @property
    def peak(self) -> float:
        reducing = self.held + self.engine.gradients + self.engine.buckets + self.engine.reduced
        return max(self.passing, reducing, self.held + self.engine.updated)


def engine_bytes(parameters: int, config: EngineConfig, gpus: int) -> EngineBytes:
    """From the ZeRO stage and precision, as `engine.py` sets up DeepSpeed 0.19.

    A bucket is allocated whole and holds at most MAX_BUCKET gradients. Reducing one makes a flat copy of it, in bf16 mode
    with stages 2 and 3 another in float32, in which it is summed. Stage 1 keeps whole gradients and reduces them behind
    the last pass; 2 and 3 reduce in every backward pass, into the rank's share. The update takes the share's gradients, a
    flat copy of them, and two more of their size inside AdamW.
    """
    low = 2 if config.precision == "bf16" else 4  # bytes of a weight and of its gradient
    whole, share = 4.0 * parameters, 4.0 * parameters / gpus  # in float32
    bucket = min(MAX_BUCKET, parameters)
    common = {"weights": float(low * parameters), "optimizer": 3 * share, "bucket_share": bucket / parameters}
    updated = 4 * share if low == 4 else 3 * share
    if config.zero_stage == 0:
        common["optimizer"] = 2 * whole
        return EngineBytes(**common, gradients=whole, buckets=0.0, reduced=4 * bucket, updated=2 * whole)
    if config.zero_stage == 1 and low == 2:  # gradients in bfloat16, added up in float32 that is allocated once
        common["optimizer"] += whole
        updated = 2.0 * parameters + 2 * share
        return EngineBytes(**common, gradients=2.0 * parameters, buckets=0.0, reduced=4 * bucket, updated=updated)
    buckets = float(low * bucket)
    if config.zero_stage == 1:
        return EngineBytes(**common, gradients=whole, buckets=buckets, reduced=buckets + share, updated=updated)
    if config.zero_stage == 2:
        flushed = 6.0 * bucket if low == 2 else buckets + share
        return EngineBytes(**common, gradients=share, buckets=buckets, flushed=flushed, updated=updated)
    common |= {"weights": low * parameters / gpus, "optimizer": 4 * share}  # with a buffer for the share's gradients
    buckets = 4.0 * bucket  # of the type in which gradients are summed
    flushed = 2 * buckets if low == 2 else buckets + buckets / gpus
    return EngineBytes(
        **common, gradients=0.0, buckets=buckets, gathered=_gathered(parameters, low, gpus),
        flushed=flushed + _gathered(parameters - bucket, low, gpus), updated=buckets + 3 * share,
    )  # fmt: skip


def _gathered(parameters: int, low: int, gpus: int) -> float:
    """Bytes of weights that ZeRO 3 holds whole while so many parameters are still to be passed."""
    return float(low * (min(GATHERED, parameters) + min(FETCHED, parameters))) if gpus > 1 else 0.0


def memory(p: Pass, *, gpus: int, average: bool) -> Memory:
    """One GPU of `gpus`; average: the run keeps averaged weights."""
    parameters = parameter_count(p.model)
    return Memory(
        engine=engine_bytes(parameters, p.engine, gpus),
        average=4 * parameters / gpus if average else 0.0,
        activations=pass_bytes(p),
    )


def checkpoint_bytes(model: ModelConfig, *, average: bool) -> int:
    """Weights, two moments and the average, in float32."""
    return parameter_count(model) * 4 * (4 if average else 3)
