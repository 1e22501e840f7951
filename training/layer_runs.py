"""How training runs a layer: keeping all activations, some or none of them for the backward pass, and compiled."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from mezzotint.models.attention import AttentionPlan
from mezzotint.models.denoiser import Layer, LayerRun, run_layer
from mezzotint.models.layout import Layout
from mezzotint.models.state import LayerState

ACTIVATIONS = ("all", "selective", "layer")
PRODUCTS = {  # what a selective backward pass keeps: results that cost a matrix product
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.linear.default,
    torch.ops.aten.matmul.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
}


def layer_run(activations: str, *, compiled: bool) -> LayerRun:
    """The call that `Denoiser.hidden` makes for each layer.

    activations: 'all' are kept for the backward pass; 'selective' keeps the results of matrix products and computes the
    rest again; 'layer' keeps one input a layer and computes the layer again. compiled: torch.compile, one graph for all
    layers of a kind; it makes its own choice of what to keep, so 'selective' is not for it (EngineConfig refuses).
    """
    run: LayerRun = run_layer
    if compiled:
        torch._logging.set_logs(dynamo=logging.ERROR)  # each graph break would be a warning of thirty lines
        run = torch.compile(run_layer)
    if activations == "selective":
        return partial(_checkpointed, run, context_fn=partial(create_selective_checkpoint_contexts, _keep_products))
    return partial(_checkpointed, run) if activations == "layer" else run


def _checkpointed(
    run: LayerRun,
    layer: Layer,
    h: Tensor,
    layout: Layout,
    attention: AttentionPlan | None,
    state: LayerState | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The layer's output, its inside computed again in the backward pass; training has no use for the state after it."""

    def inside(h: Tensor) -> Tensor:
        return run(layer, h, layout, attention, state)[0]

    # no layer draws random numbers: nothing to put back before computing again
    return checkpoint(inside, h, use_reentrant=False, preserve_rng_state=False, **options), None


def _keep_products(_: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE
