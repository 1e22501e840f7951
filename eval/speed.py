"""Runs a speed sweep: cell after cell, each in a process of its own or all in this one, one results row each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import replace

import torch

from mezzotint.eval.cells import DTYPES, Cell
from mezzotint.eval.fill import fill_random, prefill, random_tokens
from mezzotint.eval.isolated import run_isolated
from mezzotint.eval.memory import is_out_of_memory
from mezzotint.eval.results import ResultsFile
from mezzotint.eval.speed_cell import Rates, bytes_needed, measure_cell, measure_rates, release_memory
from mezzotint.eval.subjects import build
from mezzotint.eval.timing import FULL, QUICK, interleave
from mezzotint.models.denoiser import Denoiser

FILL_CONTEXT = 4096  # tokens at which a random state is held against a real prefill
MEASURED = ("ok", "noisy")


def sweep(cells: list[Cell], results: ResultsFile) -> Iterator[dict | None]:
    """Measure the cells that `results` lacks, writing each as it is done; yields the row of every cell.

    A cell that is predicted not to fit, or runs out of memory, is a row with that status and the bytes it needs; one that
    needs more than one that ran out is not tried. Batches that were only doubled to find the largest end with the first
    that does not fit: those behind it yield None. Last, the first cell that was measured is measured again, to see how
    far the machine has drifted.
    """
    threads = torch.get_num_threads()
    runner = _Runner()
    lost: dict[tuple[str, str], int] = {}  # (subject, mode) -> least bytes that ran out
    ended: set[tuple[str, str, int]] = set()  # (subject, mode, context) whose larger batches are not tried
    first: Cell | None = None
    try:
        for cell in cells:
            place = (cell.subject.name, cell.mode, cell.context)
            if place in ended and cell.batch not in cell.speed.batches:
                yield None
                continue
            row = results.get(cell.identity) if results.done(cell.identity) else None
            if row is None:
                prune = cell.needed_bytes >= lost.get(place[:2], cell.needed_bytes + 1)
                status, values = runner.run(cell, prune=prune)
                row = results.append(cell.identity, status=status, values=bytes_needed(cell) | values)
            if row["status"] == "oom":
                lost[place[:2]] = min(cell.needed_bytes, lost.get(place[:2], cell.needed_bytes))
            if row["status"] not in MEASURED:
                ended.add(place)
            elif first is None:
                first = cell
            yield row
        if first is not None and len(cells) > 1:
            yield _measure_again(first, results, runner)
    finally:
        torch.set_num_threads(threads)


def _measure_again(first: Cell, results: ResultsFile, runner: _Runner) -> dict | None:
    cell = replace(first, again=True)
    if not results.done(cell.identity):
        status, values = runner.run(cell, prune=False)
        before = (results.get(first.identity) or {})["values"]
        if status in MEASURED:
            values["drift"] = values["denoise_s"] / before["denoise_s"]
            values["drift_cpu"] = values["denoise_cpu_s"] / before["denoise_cpu_s"]
        results.append(cell.identity, status=status, values=bytes_needed(cell) | values)
    return results.get(cell.identity)


class _Runner:
    """Runs cells, and holds what outlives one: the model (without processes of their own) and the machine's rates."""

    def __init__(self) -> None:
        self._held: tuple[object, Denoiser | None] = (None, None)  # (what the model was built from, the model)
        self._rates: dict[tuple[str, str, int], Rates] = {}

    def run(self, cell: Cell, *, prune: bool) -> tuple[str, dict]:
        """Status and values of a cell. prune: it needs no less than one that ran out of memory."""
        torch.set_num_threads(cell.speed.threads)
        wanted = (cell.subject, cell.dtype, cell.speed.device)
        if self._held[0] != wanted:
            self._held = (None, None)
            release_memory()
        if not cell.speed.try_all:
            if prune:
                return "skipped_predicted_oom", {"message": "a cell that needs no more ran out of memory"}
            if not cell.fits(loaded=self._held[0] == wanted):
                return "skipped_predicted_oom", {}
        rates = self._rates_for(cell)
        if cell.speed.isolated:
            outcome = run_isolated(
                "mezzotint.eval.speed_cell:measure_alone",
                {"cell": cell.to_dict(), "rates": dataclasses.asdict(rates)},
                timeout=cell.speed.timeout,
                memory_limit=cell.speed.memory_limit,
            )
            return outcome.status, outcome.values
        if self._held[0] is None:
            self._held = (wanted, build(cell.subject, dtype=DTYPES[cell.dtype], device=cell.speed.device))
        return _attempt(cell, self._held[1], rates)

    def _rates_for(self, cell: Cell) -> Rates:
        key = (cell.speed.device, cell.dtype, cell.speed.threads)
        if key not in self._rates:
            self._rates[key] = measure_rates(cell.speed.device, DTYPES[cell.dtype])
        return self._rates[key]


def _attempt(cell: Cell, model: Denoiser | None, rates: Rates) -> tuple[str, dict]:
    assert model is not None
    try:
        values = measure_cell(model, cell, rates=rates)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return "oom", {"message": str(error).splitlines()[0][:200]}
    finally:
        release_memory()
    return ("noisy" if values.pop("noisy") else "ok"), values


@torch.no_grad()
def check_fill(cell: Cell, *, chunk: int) -> dict:
    """Denoising on a really prefilled state against a randomly filled one, at the cell's context: times and bytes."""
    torch.set_num_threads(cell.speed.threads)
    device, generator = cell.speed.device, torch.Generator().manual_seed(cell.speed.seed)
    model = build(cell.subject, dtype=DTYPES[cell.dtype], device=device)
    tokens = random_tokens(model.config, cell.batch, cell.context, generator=generator).to(device)
    real = prefill(model, tokens, model.start(cell.batch, cell.max_length), chunk=chunk)
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
