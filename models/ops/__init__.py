"""The one table of operations: what each op is called, which backends serve it, and why the others are declined."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import (
    causal_conv1d_backend,
    flash_attn_backend,
    flash_cpu,
    flex_backend,
    fused_step,
    mamba_ssm_backend,
    triton_checks,
)


@dataclass(frozen=True)
class Backend:
    """One way to compute one op; `declined` is None where it can be used, else a sentence that says why not."""

    op: str
    name: str
    declined: str | None


def backends(device: torch.device) -> list[Backend]:
    """Every backend of every op on `device`, the preferred one of an op first.

    attention: of training, cached attention: denoise, advance and prefill, both in float32; in bfloat16 a CPU takes the
    same way for all of them; mamba step: a Mamba layer's denoise, advance or commit of one block; clean ssd: prefill;
    prefix read: chunks of several blocks, where nothing is differentiated. On a CUDA device the first call runs every
    kernel there once, beside plain torch: what fails is declined with its error.
    """
    cached = flash_attn_backend.declined(device) or triton_checks.attend_declined(device)
    return [
        Backend("attention", "flash_cpu", flash_cpu.declined(device)),
        Backend("attention", "flex_attention", flex_backend.declined(device)),
        Backend("attention", "products", None),
        Backend("cached attention", "flash_cpu", flash_cpu.declined(device)),
        Backend("cached attention", "flash_attn", cached),
        Backend("cached attention", "triton", triton_checks.attend_declined(device)),
        Backend("cached attention", "products", None),
        Backend("attention in bfloat16", "flash_cpu", flash_cpu.declined(device, torch.bfloat16)),
        Backend("attention in bfloat16", "flex_attention", flex_backend.declined(device)),
        Backend("attention in bfloat16", "products", None),
        Backend("mamba step", "triton", fused_step.declined(device)),
        Backend("mamba step", "torch", None),
        Backend("clean ssd", "mamba_ssm", mamba_ssm_backend.declined(device)),
        Backend("clean ssd", "torch", None),
        Backend("state scan", "triton", triton_checks.scan_declined(device)),
        Backend("state scan", "torch", None),
        Backend("prefix read", "triton", triton_checks.read_declined(device)),
        Backend("prefix read", "torch", None),
        Backend("ssd", "torch", None),
        Backend("conv", "causal_conv1d", causal_conv1d_backend.declined(device)),
        Backend("conv", "torch", None),
    ]
