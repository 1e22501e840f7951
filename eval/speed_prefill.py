"""A prompt that is really read, chunk after chunk, in one process: rate, state and process peak on the way."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mezzotint.eval.cells import DTYPES, Cell, prefill_tokens
from mezzotint.eval.fill import random_tokens
from mezzotint.eval.isolated import Outcome, run_isolated
from mezzotint.eval.memory_process import reset_peak, resident_bytes, resident_peak
from mezzotint.eval.results import ResultsFile
from mezzotint.eval.speed_cell import BLOCK_STEPS, bytes_needed
from mezzotint.eval.speed_passes import BlockDecoder
from mezzotint.eval.subjects import build
from mezzotint.eval.timing import load_average, synchronize
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.state import State

TASK = "speed/prefill"
DECODED_BLOCKS = 4  # decoded and committed behind the whole prompt
TIMED_BLOCKS = 3  # decoded at every checkpoint, the state left as it is


def checkpoints(cell: Cell) -> list[int]:
    """Contexts of the sweep up to the prompt's length, and that itself; whole blocks."""
    g = cell.subject.config.block_length
    return sorted({min(context, cell.context) // g * g for context in (*cell.speed.contexts, cell.context)})


def identity(cell: Cell, context: int) -> dict[str, object]:
    """What names a checkpoint's row: it does not depend on how much further the prompt goes."""
    return cell.identity | {"task": TASK, "context": context}


def read_prompt(cell: Cell, results: ResultsFile) -> list[dict]:
    """The rows of all checkpoints of a prompt of `cell.context` tokens; where one is missing the prompt is read again.

    What fails is one row, under the prompt's full length.
    """
    places = checkpoints(cell)
    last = results.get(identity(cell, places[-1]))
    failed = last is not None and results.done(last["identity"]) and last["status"] != "ok"
    if not failed and not all(results.done(identity(cell, place)) for place in places):
        outcome = _run(cell, places)
        found = outcome.values["checkpoints"] if outcome.status == "ok" else [outcome.values]
        for place, values in zip(places[-len(found) :], found):
            name = identity(cell, place)
            if not results.done(name):
                needed = bytes_needed(dataclasses.replace(cell, context=place))
                results.append(name, status=outcome.status, values=needed | values)
    rows = [results.get(identity(cell, place)) for place in places]
    return [row for row in rows if row is not None]


def _run(cell: Cell, places: list[int]) -> Outcome:
    if not cell.speed.try_all and not cell.fits(loaded=False):
        return Outcome("skipped_predicted_oom", {})
    arguments: dict[str, Any] = {"cell": cell.to_dict(), "places": places}
    if not cell.speed.isolated:
        status, values = read_alone(**arguments)
        return Outcome(status, values)
    function = "mezzotint.eval.speed_prefill:read_alone"
    return run_isolated(function, arguments, timeout=cell.speed.timeout, memory_limit=cell.speed.memory_limit)


@dataclass
class _Stretch:
    """Chunks between two checkpoints: their seconds, on the wall clock and of the processor."""

    tokens: int = 0
    walls: list[float] = dataclasses.field(default_factory=list)
    cpus: list[float] = dataclasses.field(default_factory=list)

    def values(self, chunk: int) -> dict[str, float | int]:
        """Rates by the median chunk: one that others disturbed does not count."""
        return {
            "stretch_tokens": self.tokens,
            "stretch_s": sum(self.walls),
            "prefill_tokens_per_s": chunk / statistics.median(self.walls),
            "prefill_tokens_per_cpu_s": chunk / statistics.median(self.cpus),
        }


@torch.no_grad()
def read_alone(cell: Mapping[str, Any], places: list[int]) -> tuple[str, dict]:
    """Read a prompt of random tokens up to the last of `places` (rising), then decode behind it.

    Returns ("ok", {"checkpoints": one dictionary for each of `places`}).
    Each holds the rate of the stretch before it, bytes of the state, the process's peak so far, the time of a block of
    BLOCK_STEPS denoising steps. State and peak of the last one are those after decoding and committing DECODED_BLOCKS.
    """
    own = Cell.from_dict(cell)
    torch.set_num_threads(own.speed.threads)
    device, chunk = own.speed.device, prefill_tokens(own)
    model = build(own.subject, dtype=DTYPES[own.dtype], device=device)
    generator = torch.Generator().manual_seed(own.speed.seed)
    g = model.config.block_length
    state = model.start(1, places[-1] + DECODED_BLOCKS * g)
    reset_peak()
    found, total, done = [], 0.0, 0
    for place in places:
        stretch = _Stretch()
        while done < place:
            count = min(chunk, place - done)
            tokens = random_tokens(model.config, 1, count, generator=generator).to(device)
            began, cpu = time.perf_counter(), time.process_time()
            state = model.commit(tokens, state)
            synchronize(device)
            total += time.perf_counter() - began
            if count == chunk:
                stretch.walls.append(time.perf_counter() - began)
                stretch.cpus.append(time.process_time() - cpu)
            done, stretch.tokens = done + count, stretch.tokens + count
        values: dict[str, Any] = {"prefill_total_s": total, "load": load_average()}
        if stretch.walls:
            values |= stretch.values(chunk)
        values |= _decode(model, state, generator=generator, device=device)
        if place == places[-1]:
            values["decoded_tokens"], state = _go_on(model, state, generator=generator)
        values |= {
            "state_bytes": state.nbytes,
            "length": int(state.length[0]),
            "process_peak_bytes": resident_peak(),
            "process_bytes": resident_bytes(),
        }
        found.append({name: value for name, value in values.items() if value is not None})
    return "ok", {"checkpoints": found}


def _decoder(model: Denoiser, state: State, generator: torch.Generator) -> BlockDecoder:
    """Decodes the block behind `state` and commits nothing."""
    config = model.config
    canvas = torch.full((1, config.block_length), config.mask_token_id, device=model.embed.weight.device)
    return BlockDecoder(
        first=lambda: (model.denoise(canvas, state), state),
        next=model.denoise,
        mask_token_id=config.mask_token_id,
        steps=min(BLOCK_STEPS, config.block_length),
        generator=generator,
    )


def _decode(model: Denoiser, state: State, *, generator: torch.Generator, device: str) -> dict[str, float | int]:
    decode, walls, cpus = _decoder(model, state, generator), [], []
    decode()
    for _ in range(TIMED_BLOCKS):
        began, cpu = time.perf_counter(), time.process_time()
        decode()
        walls.append(time.perf_counter() - began)
        cpus.append(time.process_time() - cpu)
    return {"block_s": statistics.median(walls), "block_cpu_s": statistics.median(cpus), "block_steps": decode.steps}


def _go_on(model: Denoiser, state: State, *, generator: torch.Generator) -> tuple[int, State]:
    """Decode DECODED_BLOCKS blocks, each committed before the next: tokens written, and the state behind them."""
    tokens = 0
    for _ in range(DECODED_BLOCKS):
        block = _decoder(model, state, generator)()
        assert bool((block != model.config.mask_token_id).all()), "a decoded block holds masks"
        state, tokens = model.commit(block.to(model.embed.weight.device), state), tokens + block.numel()
    return tokens, state
