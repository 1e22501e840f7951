"""What a run has to compute: FLOPs per token, time at stated utilizations, and the GPUs that are known."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

import torch

from mezzotint.models.config import ModelConfig
from mezzotint.models.errors import InputError
from mezzotint.training.metrics import count_work
from mezzotint.training.noise import NoiseSource
from mezzotint.training.peak import PEAKS

RESERVED = 0.06  # of a GPU's memory, for the CUDA context, NCCL's buffers and what the allocator cannot fill
UTILIZATIONS = (0.3, 0.4, 0.5)
DAY = 86_400


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU, by its maker's data sheet."""

    name: str
    bytes: float  # decimal gigabytes of the data sheet; a few percent more are there, so this errs on the safe side
    peak: float  # FLOP/s of dense bfloat16 products

    @property
    def usable(self) -> float:
        """Bytes that a run may count on."""
        return self.bytes * (1 - RESERVED)


_SHEETS = {
    "a100-40": ("A100", 40),
    "a100-80": ("A100", 80),
    "h100-80": ("H100", 80),
    "h200-141": ("H200", 141),
    "b200-192": ("B200", 192),
}


def known_gpu(name: str) -> Gpu:
    """InputError, naming the nearest, for one that is not known."""
    if name not in _SHEETS:
        near = difflib.get_close_matches(name, _SHEETS, n=1, cutoff=0.0)[0]
        raise InputError(f"--gpu {name!r} is not known; the nearest of {', '.join(_SHEETS)} is {near!r}")
    chip, gigabytes = _SHEETS[name]
    return Gpu(name=name, bytes=gigabytes * 1e9, peak=PEAKS[chip] * 1e12)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Of one step, over all ranks."""

    tokens: int  # each once
    supervised: int  # tokens of the blocks that are denoised
    flops: float  # forward and backward of cut rows; recomputation does not count
    again: float  # of activation checkpointing, on top

    @property
    def flops_per_token(self) -> float:
        return self.flops / self.tokens

    def seconds(self, *, gpus: int, gpu: Gpu, utilization: float) -> float:
        """Of a step, at that share of the peak, not counting recomputation."""
        return self.flops / (gpus * gpu.peak * utilization)


def step_work(model: ModelConfig, noise: NoiseSource, *, micro_rows: int, activations: str) -> Work:
    """Over the draws of 64 steps of one micro-batch of full rows, with half of all tokens masked, the mean over levels."""
    rows, row_length = min(micro_rows, noise.rows_per_step), noise.row_blocks * noise.block_length
    flops = layers = unique = 0.0
    for step in range(1 if noise.slots == noise.row_blocks else 64):
        drawn = noise.draw(step=step, first_row=0, blocks=torch.full((rows,), noise.row_blocks))
        noisy = rows * noise.slots * noise.block_length
        done = count_work(model, drawn, row_length=row_length, masked=round(noisy / 2))
        bare = count_work(model, drawn, row_length=row_length, masked=0)
        flops, layers, unique = flops + done.flops, layers + bare.flops, unique + done.unique_tokens
    tokens = noise.rows_per_step * row_length
    return Work(
        tokens=tokens,
        supervised=noise.rows_per_step * noise.slots * noise.block_length,
        flops=flops / unique * tokens,
        again=layers / 3 / unique * tokens if activations == "layer" else 0.0,
    )
