"""One step: some columns of a canvas run through all layers, the rest read from memory, everything counted."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..denoiser import Denoiser, Layer
from ..layout import Layout, make_layout
from .canvas import Canvas
from .cost import Cost
from .forward import (
    Tables,
    attend,
    attention_of,
    embed,
    finish,
    is_attention,
    layers_of,
    project,
    rotated,
    tables_of,
)
from .interface import Plan, Policy, Sight
from .look import Look, Scene
from .memory import Memory, Pick, Segment
from .past import KVPast


@dataclass(frozen=True)
class Frame:
    """What all steps on a canvas share. `tables` are those of all columns and one more."""

    model: Denoiser
    canvas: Canvas
    policy: Policy
    memory: Memory | None
    tables: Tables | None
    layout: Layout | None  # of the canvas as a noisy block, for Mamba layers
    cost: Cost


def make_frame(model: Denoiser, canvas: Canvas, policy: Policy, cost: Cost) -> Frame:
    """Empty memory, as large as the policy needs it."""
    tables = tables_of(model, F.pad(canvas.positions, (0, 1)))
    memory = _memory(model, canvas, policy) if policy.stores else None
    layout = None
    if canvas.past is not None and "M" in model.config.pattern:
        layout = noisy_layout(canvas.tokens.shape[0], canvas.length, canvas.past.length)
    return Frame(model, canvas, policy, memory, tables, layout, cost)


def noisy_layout(batch: int, length: int, past: int) -> Layout:
    return make_layout(
        block_length=length,
        clean_tokens=0,
        frontiers=torch.zeros(batch, 1, dtype=torch.long),
        lengths=torch.full((batch,), past),
    )


def _memory(model: Denoiser, canvas: Canvas, policy: Policy) -> Memory:
    config, like = model.config, model.embed.weight
    batch, length = canvas.tokens.shape

    def room(first: int, *shape: int) -> Tensor:
        return torch.zeros(batch, length + 1 - first, *shape, dtype=like.dtype, device=like.device)

    k, v = ([room(first, config.n_kv_heads, config.head_dim) for first in canvas.first] for _ in range(2))
    carried = policy.carry in ("hidden", "changes")
    hidden = [room(0, config.d_model) for _ in canvas.first] if carried else []
    return Memory(k, v, canvas.first, hidden)


def run_step(frame: Frame, tokens: Tensor, sight: Sight, plan: Plan, state: Any) -> tuple[Tensor, Any]:
    """Hidden states (B, n, D) of the block's columns, zeros where a column was no query, and the policy's next state."""
    model, policy, cost, canvas = frame.model, frame.policy, frame.cost, frame.canvas
    pick = Pick.of(plan.queries & sight.active[:, None])
    padded = F.pad(tokens, (0, 1), value=model.config.pad_token_id)
    levels = sight.masked.double().mean(dim=1)
    stream = None if policy.carry == "nothing" else embed(model, padded, levels)
    h = embed(model, pick.take(padded), levels) if stream is None else stream
    for index, layer in enumerate(layers_of(model)):
        if canvas.entering is not None and canvas.entering[0] == index:
            assert stream is not None
            stream[:, : canvas.entering[1].shape[1]] = canvas.entering[1]
        if policy.layerwise:
            assert stream is not None
            pick, state = _choose(frame, index, stream, sight, state)
        cost.token_layers += pick.total
        if stream is None:
            h, state = _layer(frame, index, layer, h, pick, sight, state)
        elif pick.total:
            before = pick.take(stream)
            after, state = _layer(frame, index, layer, before, pick, sight, state)
            stream = _carried(frame, index, stream, pick, before, after)
        else:
            stream = _carried(frame, index, stream, pick, None, None)
    cost.passes += 1
    cost.full_token_layers += int(sight.active.sum()) * canvas.full_length * cost.layers
    return _block_hidden(h if stream is None else stream, pick, sight, whole=stream is not None), state


def _choose(frame: Frame, index: int, stream: Tensor, sight: Sight, state: Any) -> tuple[Pick, Any]:
    assert frame.memory is not None
    look = Look(
        index,
        stream[:, :-1],
        sight,
        frame.model,
        frame.memory,
        frame.tables,
        frame.canvas.segments(index),
        frame.canvas.first[index],
        frame.cost,
    )
    with frame.cost.deciding():
        chosen, state = frame.policy.at_layer(look, state)
    return Pick.of(chosen & sight.active[:, None]), state


def _layer(
    frame: Frame, index: int, layer: Layer, h: Tensor, pick: Pick, sight: Sight, state: Any
) -> tuple[Tensor, Any]:
    """The layer's output for the picked columns h (B, Q, D), and the policy's next state."""
    if is_attention(layer):
        return _attention(frame, index, layer, h, pick, sight, state)
    assert frame.canvas.past is not None and h.shape[1] == frame.canvas.length, "a Mamba layer runs on whole blocks"
    past = frame.canvas.past.layers[index]
    assert frame.layout is not None and not isinstance(past, KVPast)
    return layer(h, frame.layout, None, past)[0], state


def _attention(
    frame: Frame, index: int, layer: Layer, h: Tensor, pick: Pick, sight: Sight, state: Any
) -> tuple[Tensor, Any]:
    canvas, memory, policy = frame.canvas, frame.memory, frame.policy
    own = project(attention_of(layer), layer.mixer_norm(h))
    tables = None if frame.tables is None else (pick.take(frame.tables[0]), pick.take(frame.tables[1]))
    q, k = rotated(own.q, tables), rotated(own.k, tables)
    inside = Segment(k, own.v)
    if memory is not None:
        here = pick.behind(canvas.first[index])
        here.put(memory.k[index], k)
        here.put(memory.v[index], own.v)
        inside = memory.segment(index)
    when = policy.evicting() if int(sight.block_step.max()) == 0 else "never"
    scene = _scene(frame, index, q, pick, inside, sight)
    if when == "before":
        scene = _evicted(frame, index, scene)
    if policy.attends:
        with frame.cost.deciding():
            y, state = policy.attention(scene, state)
    else:
        y = attend(q, [*scene.outside, inside]).y
    if when == "after":
        _evicted(frame, index, scene)
    return finish(layer, h, y), state


def _evicted(frame: Frame, index: int, scene: Scene) -> Scene:
    """The scene after the policy has chosen what is kept of its past, which is all that is kept from now on."""
    past = frame.canvas.past
    assert past is not None
    with frame.cost.deciding():
        kept = frame.policy.evict(scene)
    past.layers[index] = kept
    return dataclasses.replace(scene, past=kept, outside=frame.canvas.segments(index))


def _scene(frame: Frame, index: int, q: Tensor, pick: Pick, inside: Segment, sight: Sight) -> Scene:
    past = None if frame.canvas.past is None else frame.canvas.past.layers[index]
    assert past is None or isinstance(past, KVPast)
    length = 0 if frame.canvas.past is None else frame.canvas.past.length
    return Scene(index, q, pick, frame.canvas.segments(index), inside, past, length, sight, frame.cost)


def _carried(
    frame: Frame, index: int, stream: Tensor, pick: Pick, before: Tensor | None, after: Tensor | None
) -> Tensor:
    """The stream (B, L+1, D) behind a layer: what was recomputed, and for the other columns what `carry` says."""
    memory, carry = frame.memory, frame.policy.carry
    if carry == "stream":
        if after is not None:
            pick.put(stream, after)
        return stream
    assert memory is not None
    if carry == "hidden":
        if after is not None:
            pick.put(memory.hidden[index], after)
        return memory.hidden[index]
    if before is None or after is None:
        return stream + memory.hidden[index]
    pick.put(memory.hidden[index], after - before)
    stream = stream + memory.hidden[index]
    pick.put(stream, after)
    return stream


def _block_hidden(h: Tensor, pick: Pick, sight: Sight, *, whole: bool) -> Tensor:
    """Of h (B, Q, D), or with `whole` of all columns, those of the block."""
    block = sight.block
    if whole:
        return h[:, block]
    if pick.run is not None and pick.run.start <= block.start and block.stop <= pick.run.stop:
        return h[:, block.start - pick.run.start : block.stop - pick.run.start]
    out = h.new_zeros(h.shape[0], sight.length + 1, h.shape[2])
    pick.put(out, h)
    return out[:, block]
