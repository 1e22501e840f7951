"""Mistakes somebody could make in a mixer, each as a patch of the shipped code, for test_mutations.

They patch module boundaries (arguments of an operation, the plan of a pass) and nothing private where that suffices.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mezzotint.models import attention, denoiser, layout, mamba2
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.ops import ssd as ssd_module
from mezzotint.models.state import SSMState

Patch = pytest.MonkeyPatch


# ---- Mamba ----------------------------------------------------------------------------------------------------------


def patch_ssd(patch: Patch, change: Callable) -> None:
    """`change(ssd, x, dt, A, B, C, named)` stands for ssd in the mixer."""
    original = mamba2.ssd
    patch.setattr(mamba2, "ssd", lambda x, dt, A, B, C, **named: change(original, x, dt, A, B, C, named))


def directions(ssd: Callable, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, named: dict):
    """(y of the forward direction, y of the backward direction, state)."""
    silent = torch.stack([dt[:, :, :, 0], torch.zeros_like(dt[:, :, :, 1])], dim=3)
    both, state = ssd(x, dt, A, B, C, **named)
    forward, _ = ssd(x, silent, A, B, C, **named)
    return forward, both - forward, state


def tail_dropped_from_the_state(patch: Patch) -> None:
    patch.setattr(mamba2, "SSMState", lambda ssm, conv: SSMState(ssm, torch.zeros_like(conv)))


def left_context_dropped(patch: Patch) -> None:
    original = mamba2.block_conv
    patch.setattr(mamba2, "block_conv", lambda u, left, *rest: original(u, torch.zeros_like(left), *rest))


def convolution_sees_other_documents(patch: Patch) -> None:
    original = mamba2.Mamba2._contexts

    def contexts(self, u: Tensor, geometry, tail: Tensor):
        return original(self, u, dataclasses.replace(geometry, starts=torch.zeros_like(geometry.starts)), tail)

    patch.setattr(mamba2.Mamba2, "_contexts", contexts)


def boundary_state_one_token_off(patch: Patch) -> None:
    """Noisy blocks, and the next pass, get the state before the last token of the clean blocks."""

    def change(ssd, x, dt, A, B, C, named):
        clean = named["clean_blocks"]
        y, _ = ssd(x, dt, A, B, C, **named)
        early = dt.clone()
        if clean:
            early[:, clean - 1, -1, 0] = 0
        late, state = ssd(x, early, A, B, C, **named)
        return torch.cat([y[:, :clean], late[:, clean:]], dim=1), state

    patch_ssd(patch, change)


def boundary_state_is_of_the_wrong_block(patch: Patch) -> None:
    """A noisy block reads the state one block early."""

    def change(ssd, x, dt, A, B, C, named):
        return ssd(x, dt, A, B, C, **named | {"frontiers": (named["frontiers"] - 1).clamp(min=0)})

    patch_ssd(patch, change)


def backward_scan_crosses_the_block(patch: Patch) -> None:
    """Clean tokens also hear the first token of the next block."""

    def change(ssd, x, dt, A, B, C, named):
        y, state = ssd(x, dt, A, B, C, **named)
        clean = named["clean_blocks"]
        if clean < 2:
            return y, state
        here, there = slice(0, clean - 1), slice(1, clean)
        scores = torch.einsum("bmgn,bmn->bmg", C[:, here], B[:, there, 0])
        crossing = scores[..., None, None] * (dt[:, there, 0, 1, :, None] * x[:, there, 0])[:, :, None]
        decay = (dt[:, here, :, 1] * A).flip(2).cumsum(2).flip(2).exp()
        return torch.cat([y[:, here] + decay[..., None] * crossing, y[:, clean - 1 :]], dim=1), state

    patch_ssd(patch, change)


def asked(t: Tensor, y: Tensor) -> Tensor:
    """Of all blocks those that have outputs: in a last layer the noisy ones alone."""
    return t[:, t.shape[1] - y.shape[1] :]


def backward_decay_one_index_off(patch: Patch) -> None:
    """exp(sum over i+1..j) instead of i..j-1."""

    def change(ssd, x, dt, A, B, C, named):
        forward, _, state = directions(ssd, x, dt, A, B, C, named)
        a = (dt[:, :, :, 1] * A)[..., None]
        _, backward, _ = directions(ssd, x * a.exp(), dt, A, B, C, named)
        return forward + backward * (-asked(a, forward)).exp(), state

    patch_ssd(patch, change)


def backward_scan_includes_the_token_itself(patch: Patch) -> None:
    def change(ssd, x, dt, A, B, C, named):
        y, state = ssd(x, dt, A, B, C, **named)
        itself = (B * C).sum(-1)[..., None, None] * dt[:, :, :, 1, :, None] * x
        return y + asked(itself, y), state

    patch_ssd(patch, change)


def directions_swapped(patch: Patch) -> None:
    patch_ssd(patch, lambda ssd, x, dt, A, B, C, named: ssd(x, dt.flip(3), A, B, C, **named))


def entering_state_not_masked(patch: Patch) -> None:
    """Documents go on from the state and the tokens of the one before."""

    def change(ssd, x, dt, A, B, C, named):
        return ssd(x, dt, A, B, C, **named | {"starts": torch.zeros_like(named["starts"])})

    patch_ssd(patch, change)


def running_sum_not_restarted(patch: Patch) -> None:
    """One running sum over the chunk, other documents masked afterwards: right on paper, but rounding leaks."""
    original = ssd_module._Prefix._weights

    def weights(self, chunk: Tensor, frontier: Tensor, start: Tensor):
        kept, total = original(self, chunk, frontier, start)
        run = layout.pick(self.run, chunk)  # (Bt, F, R, G, H)
        ends = run[:, :, :, -1].cumsum(2)
        c = run + (ends - run[:, :, :, -1])[:, :, :, None]
        place = (frontier - chunk * self.R - 1).clamp(min=0)[:, :, None, None].expand(-1, -1, 1, run.shape[-1])
        before = ends.gather(2, place)[:, :, :, None]  # (Bt, F, 1, 1, H): c at the frontier
        return (before - c).exp() * layout.pick(self.dt, chunk) * (kept != 0), total

    patch.setattr(ssd_module._Prefix, "_weights", weights)


def invalid_tokens_advance_the_state(patch: Patch) -> None:
    patch.setattr(layout.Layout, "valid", lambda self, device: None)


# ---- attention ------------------------------------------------------------------------------------------------------


def patch_reach(patch: Patch, stream: str, blocks: int) -> None:
    """Move the end of what a stream's blocks see; plan_attention plans the clean blocks, then the noisy ones."""
    original, streams = attention.plan_tiles, itertools.cycle(["clean", "noisy"])

    def plan(low: Tensor, high: Tensor, *, block_length: int, **named):
        if next(streams) == stream and high.numel():
            most = int(high.max()) + (block_length if stream == "noisy" else 0)  # a clean block has no key beyond
            high = (high + blocks * block_length).clamp(min=0, max=most)
        return original(low, high, block_length=block_length, **named)

    patch.setattr(attention, "plan_tiles", plan)


def clean_token_sees_a_later_block(patch: Patch) -> None:
    patch_reach(patch, "clean", 1)


def frontier_sees_its_own_answer(patch: Patch) -> None:
    patch_reach(patch, "noisy", 1)


def frontier_misses_the_last_clean_block(patch: Patch) -> None:
    patch_reach(patch, "noisy", -1)


def attention_sees_other_documents(patch: Patch) -> None:
    original = denoiser.plan_attention

    def plan(config, geometry, **named):
        return original(config, dataclasses.replace(geometry, starts=torch.zeros_like(geometry.starts)), **named)

    patch.setattr(denoiser, "plan_attention", plan)


def query_heads_take_turns_at_the_keys(patch: Patch) -> None:
    """Query head h uses key head h % Hkv."""
    original = attention.attend_tiles

    def attend(q: Tensor, k: Tensor, *rest):
        order = torch.arange(q.shape[1]).reshape(-1, k.shape[1]).T.flatten()
        return original(q[:, order], k, *rest)[:, order.argsort()]

    patch.setattr(attention, "attend_tiles", attend)


def denoise_writes(patch: Patch) -> None:
    original = Denoiser.denoise

    def denoise(self, canvas: Tensor, state, levels=None):
        logits = original(self, canvas, state, levels)
        for layer in state.layers:
            next(iter(vars(layer).values())).mul_(1 + 2**-50)
        return logits

    patch.setattr(Denoiser, "denoise", denoise)
