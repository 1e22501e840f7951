"""What a pass and an engine really take: live bytes of real tensors, counted at every operation."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mezzotint.models.denoiser import Denoiser
from mezzotint.training.distributed import Ranks
from mezzotint.training.engine import Engine, MicroBatch
from mezzotint.training.layer_runs import layer_run
from mezzotint.training.objective import Objective
from mezzotint.training.optim import OptimConfig, make_optimizer
from mezzotint.training.plan_ledger import kernels_of
from mezzotint.training.plan_pass import Pass, Rows, micro_batch


class Live(TorchDispatchMode):
    """Bytes of the storages that operations inside the `with` have made and that are alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor) and not value.is_meta:
                self.enter(value)
        return result

    def enter(self, value: Tensor) -> None:
        storage = value.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or size == 0:
            return
        self.now += size
        self.peak = max(self.peak, self.now)

        def leave(_: Any) -> None:
            self.now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, leave)

    def since(self) -> int:
        """The peak since the last call."""
        gc.collect()
        found, self.peak = self.peak, self.now
        return found


def real_objective(p: Pass) -> Objective:
    model = Denoiser(p.model, generator=torch.Generator().manual_seed(0))
    if p.engine.precision == "bf16":
        model = model.bfloat16()
    run = layer_run(p.engine.activations, compiled=False)
    return Objective(model, p.objective.noise_schedule(), loss_chunk=p.objective.loss_chunk, run=run)


def forward(p: Pass, objective: Objective, rows: Rows) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=p.engine.precision == "autocast"):
        return objective(rows.tokens, rows.documents, rows.noise)[0]


def saved_bytes(p: Pass, rows: Rows, *, device: str) -> int:
    """What autograd keeps of a real forward pass, weights left out, by saved_tensors_hooks."""
    objective, saved = real_objective(p), {}
    own = {parameter.untyped_storage()._cdata for parameter in objective.parameters()}

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage
        return value

    with kernels_of(device), torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        forward(p, objective, rows)
    return sum(storage.nbytes() for storage in saved.values())


def live_bytes(p: Pass, rows: Rows, *, device: str) -> tuple[int, int]:
    """Bytes alive between forward and backward pass of a real micro-batch, and the peak, above weights and gradients."""
    objective, live = real_objective(p), Live()
    for parameter in objective.parameters():
        parameter.grad = torch.zeros_like(parameter)
        live.enter(parameter)
        live.enter(parameter.grad)
    held = live.now
    with kernels_of(device), live:
        loss = forward(p, objective, rows)
        between = live.now
        loss.backward()
    return between - held, live.peak - held


def engine_peaks(p: Pass, ranks: Ranks) -> dict[str, int]:
    """Live bytes of a real engine on this rank: held between steps, after a pass, and the peaks of a step's parts."""
    rows, live, found = micro_batch(p), Live(), {}
    micro = MicroBatch(rows.tokens, rows.documents, rows.noise, torch.arange(p.rows))
    with live:
        objective = real_objective(p).float()
        optimizer = make_optimizer(objective.model, OptimConfig())
        engine = Engine(objective, optimizer, config=p.engine, clip=1.0, micro_rows=p.rows, accumulation=2, ranks=ranks)
        del objective, optimizer
        live.since()
        found["held"] = live.now
        for _ in range(2):  # the second step is like all later ones
            _step(engine, micro, live, found)
    engine.close()
    return found


def _step(engine: Engine, micro: MicroBatch, live: Live, found: dict[str, int]) -> None:
    engine.watch.start(2, engine.ranks.device)
    for place in range(2):
        engine.watch.place = place
        loss, _ = engine._engine(micro.tokens, micro.documents, micro.noise)
        engine._engine.backward(loss, scale_wrt_gas=False)
        del loss, _
        found[f"pass {place}"] = live.since()
        found[f"behind {place}"] = live.now
        if place == 0:
            engine._engine.step()
    engine.step(1e-3)
    found["update"] = live.since()
