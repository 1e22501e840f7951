"""Measures one speed cell: latencies of its passes, bytes, tokens a second, and the floors beside them."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from mezzotint.eval.cells import DTYPES, Cell, prefill_tokens
from mezzotint.eval.fill import fill_random
from mezzotint.eval.floor import decode_floor, read_bandwidth, state_read_seconds
from mezzotint.eval.memory import available_bytes, storage_peak
from mezzotint.eval.memory_process import process_peak, resident_bytes
from mezzotint.eval.roofline import Hardware, card_floors, sizes_of, step_seconds
from mezzotint.eval.speed_graph import graph_passes
from mezzotint.eval.speed_passes import Call, block_decoder, passes
from mezzotint.eval.subjects import build
from mezzotint.eval.timing import FULL, QUICK, Protocol, Timing, interleave, measure
from mezzotint.models.config import parameter_count
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.state import State

STEPS = (4, 8, 16, 32)  # denoising steps a block, for which tokens a second are stated
BLOCK_STEPS = 8  # of the block that is really decoded


@dataclass(frozen=True)
class Rates:
    """What this machine was measured to do: bytes read and FLOPs of square products, a second."""

    read_bytes: float
    flops: float

    def hardware(self, device: str) -> Hardware:
        return Hardware(
            name="here", read_bytes_per_s=self.read_bytes, flops_per_s=self.flops,
            usable_bytes=available_bytes(device), source="measured in this run",
        )  # fmt: skip


def measure_rates(device: str, dtype: torch.dtype) -> Rates:
    """Read bandwidth, and products of 1024 x 1024 (on CUDA 8192 x 8192) in `dtype`, the best of a few."""
    side = 8192 if device.startswith("cuda") else 1024
    left = torch.ones(side, side, dtype=dtype, device=device)
    timing = measure(lambda: left @ left, protocol=replace(QUICK, steps=5), device=device)
    rates = Rates(read_bandwidth(device), 2 * side**3 / timing.p10)
    release_memory()
    return rates


def measure_alone(cell: Mapping[str, Any], rates: Mapping[str, float]) -> tuple[str, dict]:
    """Measure a cell in a process made for it (eval/isolated.py): Cell.to_dict and Rates as JSON, status and values."""
    own = Cell.from_dict(cell)
    torch.set_num_threads(own.speed.threads)
    base = resident_bytes()
    model = build(own.subject, dtype=DTYPES[own.dtype], device=own.speed.device)
    values = measure_cell(model, own, rates=Rates(**rates), alone=True)
    values["process_base_bytes"] = base
    return ("noisy" if values.pop("noisy") else "ok"), values


@torch.no_grad()
def measure_cell(model: Denoiser, cell: Cell, *, rates: Rates, alone: bool = False) -> dict:
    """Latencies (quantiles, seconds), bytes, tokens a second and floor of one cell, all timed in alternation.

    The state is filled at random: no step reads what the values are, and a real prefill of 256k tokens would take
    longer than all the rest (check_fill compares the two). Every pass starts from the same state, so that the context
    does not grow. alone: the process was made for this cell, so that its own peak says something.
    """
    device = cell.speed.device
    protocol = QUICK if cell.speed.quick else FULL
    generator = torch.Generator().manual_seed(cell.speed.seed)
    state = fill_random(model.start(cell.batch, cell.max_length), length=cell.context, generator=generator)
    calls = passes(model, state, chunk=prefill_tokens(cell), generator=generator)
    values = _peaks(model, state, calls, device=device, alone=alone)
    timed = graph_passes(calls) if cell.mode == "cudagraph" else calls
    floor = decode_floor(model.config, batch=cell.batch, context=cell.context, dtype=DTYPES[cell.dtype], device=device)
    timings = interleave(timed | {"floor_products": floor}, protocol=protocol, device=device, seed=cell.speed.seed)
    for name, timing in timings.items():
        values |= timing.to_dict(name)
    values |= {
        "noisy": timings["denoise"].noisy or timings["advance"].noisy,
        "load": timings["denoise"].load,
        "torch": torch.__version__,
    }
    values |= _floors(cell, timings["floor_products"], rates)
    values |= _throughput(cell, timings)
    if cell.mode == "eager":
        values |= _block(model, state, cell, protocol=protocol, generator=generator)
    return values


def _peaks(model: Denoiser, state: State, calls: dict[str, Call], *, device: str, alone: bool) -> dict:
    """Bytes at the peak, by the process or its allocator, then by count of storages; before anything is timed."""
    values: dict = {}
    for part, names in (("decode", ("denoise", "advance", "commit")), ("prefill", ("prefill",))):
        if alone or device.startswith("cuda"):
            found = process_peak([calls[name] for name in names], device=device)
            values |= {f"{kind}_{part}_peak_bytes": count for kind, count in found.items() if count is not None}
    work = {name: storage_peak(call) for name, call in calls.items()}
    decoding = max(work["denoise"], work["advance"], work["commit"])
    held = sum(parameter.nbytes for parameter in model.parameters()) + state.nbytes
    return values | {
        "state_bytes": state.nbytes,
        "work_bytes": decoding,
        "prefill_work_bytes": work["prefill"],
        "peak_bytes": held + decoding,
        "prefill_peak_bytes": held + work["prefill"],
    }


def _floors(cell: Cell, products: Timing, rates: Rates) -> dict:
    """floor_s: bare products measured beside, and the state's bytes; floor_roofline_s: by formula at measured rates."""
    config, itemsize = cell.subject.config, cell.itemsize
    reading = state_read_seconds(
        config, batch=cell.batch, context=cell.context, itemsize=itemsize, bandwidth=rates.read_bytes
    )
    here = rates.hardware(cell.speed.device)
    return {
        "floor_s": products.p50 + reading,
        "floor_roofline_s": step_seconds(
            sizes_of(config, itemsize=itemsize), here, context=cell.context, batch=cell.batch
        ),
        "read_bytes_per_s": rates.read_bytes,
        "products_flops_per_s": rates.flops,
    }


def _throughput(cell: Cell, timings: dict[str, Timing]) -> dict:
    """Tokens a second of model passes alone, prefill, and the time to the first block.

    `tokens_per_s_N` is of a block of N denoising steps: N - 1 denoise and one advance, which carries the commit;
    `tokens_per_s_apart_N` with N denoise and a commit of its own. A prefill chunk's cost grows linearly with its
    position, so that the whole prefill takes as many chunks as the context holds at the mean of the first and the last.
    """
    denoise, advance, commit = (timings[name].p50 for name in ("denoise", "advance", "commit"))
    tokens, chunk = cell.batch * cell.subject.config.block_length, prefill_tokens(cell)
    last = timings["prefill"].p50
    first = timings["prefill_first"].p50 if "prefill_first" in timings else last
    prefill = cell.context / chunk * (first + last) / 2
    values = {"prefill_tokens_per_s": cell.batch * chunk / last, "prefill_total_s": prefill}
    for steps in STEPS:
        values[f"tokens_per_s_{steps}"] = tokens / ((steps - 1) * denoise + advance)
        values[f"tokens_per_s_apart_{steps}"] = tokens / (steps * denoise + commit)
        values[f"first_block_{steps}_s"] = prefill + steps * denoise
    return values


def _block(
    model: Denoiser, state: State, cell: Cell, *, protocol: Protocol, generator: torch.Generator
) -> dict[str, float | int]:
    """A whole block decoded with sampling on the host, until its tokens can be read."""
    decode = block_decoder(model, state, steps=BLOCK_STEPS, generator=generator)
    assert bool((decode() != decode.mask_token_id).all()), "a decoded block holds masks"
    timing = measure(decode, protocol=replace(protocol, least=2), device=cell.speed.device)
    return timing.to_dict("block") | {
        "block_steps": decode.steps,
        "block_tokens_per_s": cell.batch * cell.subject.config.block_length / timing.p50,
    }


def bytes_needed(cell: Cell) -> dict:
    """What is known of a cell without running it."""
    floors = card_floors(cell.subject.config, context=cell.context, batch=cell.batch, itemsize=cell.itemsize)
    return {
        "parameters": parameter_count(cell.subject.config),
        "pattern": cell.subject.config.pattern,
        "block_length": cell.subject.config.block_length,
        "weight_bytes": cell.weight_bytes,
        "state_bytes": cell.state_bytes,
        "needed_bytes": cell.needed_bytes,
        "available_bytes": available_bytes(cell.speed.device, limit=cell.speed.memory_limit),
        **floors,
    }


def release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
