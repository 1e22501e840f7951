"""The model that is judged: the averaged weights if the run keeps any, whole on every rank, beside the trained ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from mezzotint.models.denoiser import Denoiser
from mezzotint.training.distributed import Ranks
from mezzotint.training.fragments import WEIGHTS, Fragment
from mezzotint.training.objective import Objective
from mezzotint.training.run import Run


@contextmanager
def evaluating(run: Run) -> Iterator[Objective]:
    """An objective with the weights to judge; collective. The trained weights are not touched.

    Without an average and without ZeRO 3 it is the trained model itself; else a copy that lives inside the `with`.
    """
    trained = run.engine.objective
    if run.ema is None and run.engine.stage != 3:
        yield trained
        return
    fragments = run.fragments
    values = run.ema.values if run.ema is not None else [fragment.views[WEIGHTS] for fragment in fragments]
    with torch.device("meta"):
        model = Denoiser(run.plan.model)
    model = model.to_empty(device=run.ranks.device)
    fill(model, fragments, values, run.ranks)
    yield Objective(model, trained.schedule, loss_chunk=trained.loss_chunk)


@torch.no_grad()
def fill(model: Denoiser, fragments: Sequence[Fragment], values: Sequence[Tensor], ranks: Ranks) -> None:
    """Put together the parameters of `model` from the `values` of every rank's fragments; collective."""
    mine = {fragment.name: (fragment.start, value) for fragment, value in zip(fragments, values)}
    for name, parameter in model.named_parameters():
        flat = parameter.data.view(-1)
        flat.zero_()
        if name in mine:
            start, value = mine[name]
            flat[start : start + len(value)] = value
        if ranks.world > 1:
            dist.all_reduce(flat)
