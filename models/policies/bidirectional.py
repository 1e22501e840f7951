"""Decoding of a bidirectional denoiser on a fixed canvas of prompt and masks, under a cache policy."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from ..denoiser import Denoiser
from ..errors import InputError
from ..reveal import Reveal, Sampler
from .canvas import Canvas, check_canvas, check_spans, equal_prompts
from .cost import Cost
from .interface import Policy
from .loop import Revealing, reveal_canvas
from .store import Hooks, Store

GREEDY = Sampler(temperature=0.0)


@dataclass(frozen=True)
class Decoded:
    """What was written behind every prompt, and what it cost. `tokens` fill the canvas: some may stand behind <eos>."""

    tokens: list[list[int]]
    cost: Cost
    eos: int

    @property
    def texts(self) -> list[list[int]]:
        """Cut at the first <eos>, which is left out."""
        return [row[: row.index(self.eos)] if self.eos in row else row for row in self.tokens]

    @property
    def tokens_per_second(self) -> float:
        """Of all rows, behind what was prepared before the first pass."""
        return sum(map(len, self.tokens)) / max(self.cost.seconds - self.cost.prepare_seconds, 1e-9)


@torch.inference_mode()
def decode_canvas(
    model: Denoiser,
    prompts: list[list[int]],
    *,
    policy: Policy,
    new_tokens: int,
    block: int,
    reveal: Reveal,
    sampler: Sampler = GREEDY,
    generator: torch.Generator | None = None,
    spans: tuple[tuple[int, int], ...] = (),
    store: Store | None = None,
    standing: list[list[int]] | None = None,
) -> Decoded:
    """Write `new_tokens` behind each prompt, `block` of them at a time, on a canvas that is all there from the start.

    The model is one that was trained with `block: row`. spans: (start, end) tokens of the prompts that are shared
    parts, the same for every row, for policies that share any; store: where shared parts are looked up and kept.
    standing: `new_tokens` ids a row that stand there from the start, mask where one is to be written.

    Raises InputError for prompts of unequal length, a canvas shorter than a block, shared parts that the prompt does
    not hold, Mamba layers, and a policy without an object here.
    """
    require_object(model, policy, bidirectional=True)
    tokens = equal_prompts(model, prompts)
    check_canvas(new_tokens, block)
    check_shared(policy, model, spans, tokens.shape[1])
    began = _now(model)
    store = Store() if store is None else store
    store.bind(model)
    cost = Cost(layers=len(model.config.pattern))
    hooks = Hooks(model, store, cost, spans)
    behind = new_canvas(model, len(tokens), new_tokens, standing)
    canvas = policy.arrange(make_canvas(model, tokens, behind, block=block, spans=spans), hooks)
    cost.prepare_seconds = _now(model) - began
    how = Revealing(reveal, sampler, torch.Generator().manual_seed(0) if generator is None else generator)
    written = reveal_canvas(model, canvas, policy, how, cost)
    cost.seconds = _now(model) - began
    cost.effective |= policy.effective() | {
        "block": block,
        "new_tokens": new_tokens,
        "prompt_tokens": tokens.shape[1],
        "reveal": str(reveal),
        "canvas": canvas.length,
    }
    return Decoded(written[:, canvas.response :].tolist(), cost, model.config.eos_token_id)


def make_canvas(
    model: Denoiser, prompts: Tensor, behind: Tensor, *, block: int, spans: tuple[tuple[int, int], ...] = ()
) -> Canvas:
    """Prompts (B, n) and what stands `behind` them (B, new_tokens), nothing outside."""
    batch, prompt = prompts.shape
    new_tokens = behind.shape[1]
    length, layers = prompt + new_tokens, len(model.config.pattern)
    return Canvas(
        tokens=torch.cat([prompts, behind], dim=1),
        positions=torch.arange(length).expand(batch, -1),
        response=prompt,
        start=prompt,
        block=block,
        outside=((),) * layers,
        first=(0,) * layers,
        full_length=length,
        spans=spans,
    )


def new_canvas(model: Denoiser, batch: int, new_tokens: int, standing: list[list[int]] | None) -> Tensor:
    """(B, new_tokens): masks, and the tokens that stand from the start. InputError where those are of another length."""
    device = model.embed.weight.device
    if standing is None:
        return torch.full((batch, new_tokens), model.config.mask_token_id, device=device)
    if len(standing) != batch or any(len(row) != new_tokens for row in standing):
        raise InputError(
            f"standing tokens must be {batch} rows of {new_tokens} tokens, masks where one is to be written"
        )
    return torch.tensor(standing, dtype=torch.int64, device=device)


def require_object(model: Denoiser, policy: Policy, *, bidirectional: bool) -> None:
    """InputError, in the policy's own sentence, where it has nothing to do on this model."""
    if bidirectional and "M" in model.config.pattern:
        raise InputError(
            f"a bidirectional denoiser is attention alone; the pattern {model.config.pattern} has Mamba layers, which read "
            "from left to right: decode it block by block"
        )
    sentence = policy.without_object(model.config, bidirectional=bidirectional)
    if sentence is not None:
        raise InputError(sentence)


def check_shared(policy: Policy, model: Denoiser, spans: tuple[tuple[int, int], ...], prompt_tokens: int) -> None:
    """InputError for shared parts that the prompt does not hold, are missing, or are none that this policy shares."""
    check_spans(spans, prompt_tokens)
    if policy.spans and not spans:
        raise InputError(f"policy {policy.name} shares parts of the prompts: name them (start and end token of each)")
    if spans and not policy.spans and policy.name != "none":
        raise InputError(f"policy {policy.name} shares no parts of prompts: leave the shared parts out")
    policy.check(model.config, spans)


def _now(model: Denoiser) -> float:
    if model.embed.weight.is_cuda:
        torch.cuda.synchronize(model.embed.weight.device)
    return time.perf_counter()
