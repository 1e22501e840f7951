"""Measures a speed cell: latency of denoise, advance and a prefill chunk, bytes, tokens a second, and the floor."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import torch

from mezzotint.eval.cells import DTYPES, Cell, prefill_tokens
from mezzotint.eval.fill import fill_random, prefill, random_tokens
from mezzotint.eval.floor import decode_floor, read_bandwidth, state_read_seconds
from mezzotint.eval.memory import available_bytes, is_out_of_memory, storage_peak
from mezzotint.eval.results import ResultsFile
from mezzotint.eval.subjects import build
from mezzotint.eval.timing import FULL, QUICK, Timing, interleave
from mezzotint.models.config import parameter_count
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.state import State

STEPS = (4, 8, 16, 32)  # denoising steps a block, for which tokens a second are stated
FILL_CONTEXT = 4096  # tokens at which a random state is held against a real prefill


def sweep(cells: list[Cell], results: ResultsFile) -> Iterator[dict]:
    """Measure the cells that `results` lacks, writing each as it is done; yields the row of every cell.

    A cell that is predicted not to fit, or runs out of memory, is a row with that status and the bytes it needs.
    """
    threads = torch.get_num_threads()
    held: tuple[object, Denoiser | None] = (None, None)  # (what the model was built from, the model)
    bandwidth: dict[str, float] = {}
    try:
        for cell in cells:
            if results.done(cell.identity):
                yield results.get(cell.identity) or {}
                continue
            torch.set_num_threads(cell.speed.threads)
            wanted = (cell.subject, cell.dtype, cell.speed.device)
            if held[0] != wanted:
                held = (None, None)
                _release_memory()
            if not cell.fits(loaded=held[0] == wanted):
                yield results.append(cell.identity, status="skipped_predicted_oom", values=_bytes_needed(cell))
                continue
            if held[0] is None:
                held = (wanted, build(cell.subject, dtype=DTYPES[cell.dtype], device=cell.speed.device))
            device = cell.speed.device
            if device not in bandwidth:
                bandwidth[device] = read_bandwidth(device)
            status, values = _attempt(cell, held[1], bandwidth[device])
            yield results.append(cell.identity, status=status, values=_bytes_needed(cell) | values)
    finally:
        torch.set_num_threads(threads)


def _attempt(cell: Cell, model: Denoiser | None, bandwidth: float) -> tuple[str, dict]:
    assert model is not None
    try:
        values = measure_cell(model, cell, bandwidth=bandwidth)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return "oom", {"message": str(error).splitlines()[0][:200]}
    finally:
        _release_memory()
    return ("noisy" if values.pop("noisy") else "ok"), values


@torch.inference_mode()
def measure_cell(model: Denoiser, cell: Cell, *, bandwidth: float) -> dict:
    """Latencies (quantiles, seconds), bytes, tokens a second and floor of one cell, all timed in alternation.

    The state is filled at random: no step reads what the values are, and a real prefill of 256k tokens would take
    longer than all the rest (check_fill compares the two). Every pass starts from the same state, so that the context
    does not grow. `tokens_per_s_N` is of a block of N denoising steps: N - 1 denoise and one advance, model passes
    alone; `mezzotint-eval generate` states it with sampling.
    """
    config, device = model.config, cell.speed.device
    generator = torch.Generator().manual_seed(cell.speed.seed)
    state = model.start(cell.batch, cell.max_length)
    state = fill_random(state, length=cell.context, generator=generator)
    calls = passes(model, state, chunk=prefill_tokens(cell), generator=generator)
    work = {name: storage_peak(call) for name, call in calls.items()}
    dtype = DTYPES[cell.dtype]
    calls["floor_products"] = decode_floor(config, batch=cell.batch, context=cell.context, dtype=dtype, device=device)
    timings = interleave(calls, protocol=QUICK if cell.speed.quick else FULL, device=device, seed=cell.speed.seed)
    reading = state_read_seconds(
        config, batch=cell.batch, context=cell.context, itemsize=dtype.itemsize, bandwidth=bandwidth
    )
    values: dict = {"noisy": timings["denoise"].noisy or timings["advance"].noisy}
    for name, timing in timings.items():
        values |= timing.to_dict(name)
    values |= {
        "floor_s": timings["floor_products"].p50 + reading,
        "read_bytes_per_s": bandwidth,
        "load": timings["denoise"].load,
        "state_bytes": state.nbytes,
        "work_bytes": max(work["denoise"], work["advance"]),
        "prefill_work_bytes": work["prefill"],
        "prefill_tokens_per_s": cell.batch * prefill_tokens(cell) / timings["prefill"].p50,
        "torch": torch.__version__,
    }
    values["peak_bytes"] = _weight_bytes(model) + state.nbytes + values["work_bytes"]
    return values | _tokens_per_second(timings, tokens=cell.batch * config.block_length)


def passes(model: Denoiser, state: State, *, chunk: int, generator: torch.Generator) -> dict[str, Callable[[], object]]:
    """Calls of one denoise, one advance, one commit of a block and one prefill chunk, each from a fixed state.

    The prefill chunk is the last one that ends at the state's length: it rewrites keys and values there.
    """
    config, device = model.config, next(model.parameters()).device
    g = config.block_length
    canvas = torch.full((state.batch, g), config.mask_token_id, device=device)
    block = random_tokens(config, state.batch, g, generator=generator).to(device)
    tokens = random_tokens(config, state.batch, chunk, generator=generator).to(device)
    earlier = State(state.layers, state.length - chunk, state.max_length, state.block_length)
    return {
        "denoise": lambda: model.denoise(canvas, state),
        "advance": lambda: model.advance(block, canvas, state),
        "commit": lambda: model.commit(block, state),
        "prefill": lambda: model.commit(tokens, earlier),
    }


@torch.inference_mode()
def check_fill(cell: Cell) -> dict:
    """Denoising on a really prefilled state against a randomly filled one, at the cell's context: times and bytes."""
    torch.set_num_threads(cell.speed.threads)
    device, generator = cell.speed.device, torch.Generator().manual_seed(cell.speed.seed)
    model = build(cell.subject, dtype=DTYPES[cell.dtype], device=device)
    tokens = random_tokens(model.config, cell.batch, cell.context, generator=generator).to(device)
    real = prefill(model, tokens, model.start(cell.batch, cell.max_length), chunk=prefill_tokens(cell))
    filled = fill_random(model.start(cell.batch, cell.max_length), length=cell.context, generator=generator)
    canvas = torch.full((cell.batch, model.config.block_length), model.config.mask_token_id, device=device)
    times = interleave(
        {"real": lambda: model.denoise(canvas, real), "filled": lambda: model.denoise(canvas, filled)},
        protocol=QUICK if cell.speed.quick else FULL,
        device=device,
    )
    return {
        "real_s": times["real"].p50,
        "filled_s": times["filled"].p50,
        "filled_over_real": times["filled"].p50 / times["real"].p50,
        "filled_over_real_cpu": times["filled"].cpu / times["real"].cpu,
        "real_bytes": real.nbytes,
        "filled_bytes": filled.nbytes,
        "load": times["real"].load,
    }


def _tokens_per_second(timings: dict[str, Timing], *, tokens: int) -> dict[str, float]:
    denoise, advance = timings["denoise"].p50, timings["advance"].p50
    return {f"tokens_per_s_{steps}": tokens / ((steps - 1) * denoise + advance) for steps in STEPS}


def _bytes_needed(cell: Cell) -> dict:
    return {
        "parameters": parameter_count(cell.subject.config),
        "weight_bytes": cell.weight_bytes,
        "state_bytes": cell.state_bytes,
        "needed_bytes": cell.needed_bytes,
        "available_bytes": available_bytes(cell.speed.device),
    }


def _weight_bytes(model: Denoiser) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
