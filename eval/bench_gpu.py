"""The cells of `make gpu`: training steps and decoding passes, each beside its floor, within a time budget.

Everything takes a device, so that tests run the same code on a CPU with small models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from mezzotint.eval.bench_training import training_case, two_stream_step
from mezzotint.eval.fill import fill_random, random_tokens
from mezzotint.eval.floor import decode_floor, decode_tiles, linear_layers, state_read_seconds, training_floor
from mezzotint.eval.memory import HEADROOM, available_bytes, is_out_of_memory
from mezzotint.eval.products import forward_products
from mezzotint.eval.speed_cell import release_memory
from mezzotint.eval.speed_passes import passes
from mezzotint.eval.subjects import Subject, build
from mezzotint.eval.timing import Protocol, Timing, interleave
from mezzotint.models.config import ModelConfig, parameter_count, state_bytes
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.graphs import StepGraphs
from mezzotint.models.state import State

PROTOCOL = Protocol(
    steps=10, seconds=0.4, least=3, warmups=1, warmup_rounds=3, warmup_tolerance=0.05, warmup_seconds=1.0
)
CHUNK = 1024  # tokens of a prefill chunk
# bytes that a cell may need beside weights and state: floors' operands, work, what graphs keep
WORK = {"cuda": 4 * 2**30, "cpu": 2**28}


@dataclass
class Budget:
    """Seconds that the whole command may take; a cell begins only where its estimate still fits."""

    seconds: float
    started: float = field(default_factory=time.perf_counter)

    @property
    def left(self) -> float:
        return self.seconds - (time.perf_counter() - self.started)


@dataclass(frozen=True)
class CellPlan:
    """One entry of the table: what it is, about how many seconds it takes, and the call that makes its rows."""

    section: str
    name: str
    seconds: float
    call: Callable[[], list[dict]]


def run_cells(cells: list[CellPlan], budget: Budget) -> Iterator[dict]:
    """Rows of all cells in order; one that does not fit into the budget, or into memory, is a row that says so."""
    for cell in cells:
        about = {"section": cell.section, "name": cell.name}
        if budget.left < cell.seconds:
            yield about | {"status": f"skipped: {max(0, budget.left):.0f} s of {budget.seconds:.0f} s are left"}
            continue
        begun = time.perf_counter()
        try:
            rows = cell.call()
        except Exception as error:  # the other cells are still worth their time
            oom = is_out_of_memory(error)
            first = (str(error).splitlines() or [""])[0][:200]
            rows = [
                {"status": "out of memory" if oom else f"error: {type(error).__name__}: {first}", "failed": not oom}
            ]
        spent = time.perf_counter() - begun
        yield from (about | {"status": "ok", "cell_seconds": spent} | row for row in rows)


class Models:
    """Holds one model at a time: cells of the same subject follow each other."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._held: tuple[tuple[str, torch.dtype] | None, Denoiser | None] = (None, None)

    def holds(self, subject: Subject, dtype: torch.dtype) -> bool:
        return self._held[0] == (subject.name, dtype)

    def get(self, subject: Subject, dtype: torch.dtype) -> Denoiser:
        if not self.holds(subject, dtype):
            self.drop()
            self._held = ((subject.name, dtype), build(subject, dtype=dtype, device=self.device))
        assert self._held[1] is not None
        return self._held[1]

    def drop(self) -> None:
        self._held = (None, None)
        release_memory()


def ratio_row(name: str, timing: Timing, floor: Timing, *, more: float = 0.0, **values: object) -> dict:
    """A pass over its floor of products and `more` seconds of reading."""
    bound = floor.p50 + more
    times = {"ms": timing.p50 * 1e3, "floor_ms": bound * 1e3, "ratio": timing.p50 / bound, "n": timing.n}
    return {"pass": name, **times, "spread": timing.p90 / timing.p10, "load": timing.load, **values}


# ---- training ----


def training_rows(models: Models, subject: Subject, *, batch: int, row_length: int) -> list[dict]:
    """Forward and backward of two streams under bfloat16 autocast, float32 weights, over bfloat16 products."""
    device = models.device
    model = models.get(subject, torch.float32).train().requires_grad_(True)
    case = training_case(subject.config, batch=batch, row_length=row_length, device=device)
    floor = training_floor(
        subject.config,
        batch=batch,
        row_length=row_length,
        masked=int(case.masked.sum()),
        dtype=torch.bfloat16,
        device=device,
    )
    calls = {"step": two_stream_step(model, case, autocast=torch.bfloat16), "floor": floor}
    on_card = device.startswith("cuda")
    if on_card:
        torch.cuda.reset_peak_memory_stats()
        calls["step"]()
    peak = {"peak_bytes": torch.cuda.max_memory_allocated()} if on_card else {}
    times = interleave(calls, protocol=PROTOCOL, device=device)
    rate = batch * row_length / times["step"].p50
    return [ratio_row(f"{batch} x {row_length}", times["step"], times["floor"], tokens_per_s=rate, **peak)]


# ---- decoding ----


def fits(subject: Subject, *, context: int, batch: int, dtype: torch.dtype, models: Models) -> bool:
    """Whether weights and state of a cell are predicted to fit, whatever model is held now."""
    need = state_bytes(subject.config, batch=batch, length=context + CHUNK, itemsize=dtype.itemsize)
    need += WORK[torch.device(models.device).type]
    if not models.holds(subject, dtype):
        models.drop()
        need += parameter_count(subject.config) * dtype.itemsize
    return need <= HEADROOM * available_bytes(models.device)


@torch.no_grad()
def decode_rows(
    models: Models, subject: Subject, *, context: int, batch: int, dtype: torch.dtype, bandwidth: float
) -> list[dict]:
    """denoise, advance and one prefill chunk at `context`, eager and where they can be captured as graphs."""
    if not fits(subject, context=context, batch=batch, dtype=dtype, models=models):
        return [{"status": "does not fit"}]
    config, device = subject.config, models.device
    model, g = models.get(subject, dtype), config.block_length
    chunk = min(CHUNK, context)
    draws = torch.Generator().manual_seed(0)
    state = model.start(batch, context + g)
    state = fill_random(state, length=context, generator=torch.Generator(device).manual_seed(0))
    calls = passes(model, state, chunk=chunk, generator=draws)
    calls = {name: calls[name] for name in ("denoise", "advance", "prefill")}
    graphs = StepGraphs(model, state)
    if graphs.captures:
        calls |= _graph_calls(graphs, state, random_tokens(config, batch, g, generator=draws).to(device))
    floors = {
        "floor denoise": decode_floor(config, batch=batch, context=context, dtype=dtype, device=device),
        "floor advance": decode_floor(config, batch=batch, context=context, dtype=dtype, device=device, passes=2),
        "floor prefill": _prefill_floor(config, batch=batch, context=context, chunk=chunk, dtype=dtype, device=device),
    }
    times = interleave(calls | floors, protocol=PROTOCOL, device=device)
    reading = state_read_seconds(config, batch=batch, context=context, itemsize=dtype.itemsize, bandwidth=bandwidth)
    rows = []
    for name in calls:
        kind, _, mode = name.partition(" ")
        more = 0.0 if kind == "prefill" else reading
        about = {"mode": mode or "eager", "context": context, "batch": batch, "state_bytes": state.nbytes}
        if kind == "prefill":
            about["tokens_per_s"] = batch * chunk / times[name].p50
        rows.append(ratio_row(kind, times[name], times[f"floor {kind}"], more=more, **about))
    return rows


def _graph_calls(graphs: StepGraphs, state: State, block: torch.Tensor) -> dict[str, Callable[[], object]]:
    canvas = torch.full_like(block, graphs.model.config.mask_token_id)
    return {
        "denoise graph": lambda: graphs.denoise(canvas, state),
        "advance graph": lambda: graphs.advance(block, canvas, state),
    }


def _prefill_floor(
    config: ModelConfig, *, batch: int, context: int, chunk: int, dtype: torch.dtype, device: str
) -> Callable[[], None]:
    """The products of the chunk that ends at `context`; no logits."""
    linears = linear_layers(config, rows=batch * chunk, logits=0)
    tiles = decode_tiles(config, batch=batch, rows=chunk, context=context - chunk)
    return forward_products(linears, tiles, dtype=dtype, device=device)


def block_rates(rows: list[dict], *, steps: int, block_length: int) -> list[dict]:
    """Tokens a second of a block of `steps` steps for every mode, batch and context: steps - 1 denoise and an advance."""
    found: dict[tuple, dict[str, float]] = {}
    for row in rows:
        if row.get("pass") in ("denoise", "advance"):
            key = (row["section"], row["name"], row["mode"], row["context"], row["batch"])
            found.setdefault(key, {})[row["pass"]] = row["ms"] / 1e3
    return [
        {"section": key[0], "name": key[1], "mode": key[2], "context": key[3], "batch": key[4], "steps": steps,
         "tokens_per_s": key[4] * block_length / ((steps - 1) * times["denoise"] + times["advance"])}
        for key, times in found.items() if len(times) == 2
    ]  # fmt: skip
