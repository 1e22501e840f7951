"""The likelihood bound of what was written behind a prompt, under the model itself and its exact cache."""

from __future__ import annotations

import torch
from torch import Tensor

from mezzotint.eval.bound import Draws
from mezzotint.eval.canvases import Job, measure
from mezzotint.eval.fill import prefill
from mezzotint.models.denoiser import Denoiser

CHUNK = 1024


@torch.inference_mode()
def written_bound(model: Denoiser, prompt: list[int], written: list[int], *, draws: Draws, key: str) -> float:
    """Nats that bound -log p(written | prompt), whatever policy wrote it: block after block, the earlier ones given.

    Serves both kinds of denoisers: to a bidirectional one the row is a single block. Its places behind the text stay
    masked. A text longer than a bidirectional model's row would be read as several rows, which it never was.
    """
    config, device = model.config, model.embed.weight.device
    size, tokens = config.block_length, torch.tensor(prompt + written)
    first = len(prompt) // size * size
    state = model.start(1, max(len(tokens) - 1, 0) // size * size)
    state = prefill(model, tokens[None, :first].to(device), state, chunk=max(CHUNK // size, 1) * size)
    nats = 0.0
    for low in range(first, len(tokens), size):
        canvas, places = _block(tokens, low, size, written_from=len(prompt), mask=config.mask_token_id)
        chosen = draws.of(len(places), key=f"{key}/{low}", twin=False)
        nats += measure(model, [Job(canvas, places, chosen)], state, batch=draws.batch)[0].bound(chosen)
        if low + size < len(tokens):
            state = model.commit(canvas[None].to(device), state)
    return nats


def _block(tokens: Tensor, low: int, size: int, *, written_from: int, mask: int) -> tuple[Tensor, Tensor]:
    """A block's canvas (G,), masks behind the text, and its places that were written."""
    canvas = torch.full((size,), mask)
    here = tokens[low : low + size]
    canvas[: len(here)] = here
    return canvas, torch.arange(max(written_from - low, 0), len(here))
