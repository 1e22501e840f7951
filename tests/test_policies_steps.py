"""Steps of the harness and of policies against a literal simulation: every layer's keys, values and outputs by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from support import assert_close, generator, ordinary, tiny_config, tiny_model

from mezzotint.models.layers import rope_tables
from mezzotint.models.ops.rope import rotate
from mezzotint.models.policies.acache import ACache
from mezzotint.models.policies.adapters import fresh_adapters
from mezzotint.models.policies.bicache import BiCache
from mezzotint.models.policies.bidirectional import decode_canvas, make_canvas, new_canvas
from mezzotint.models.policies.canvas import Canvas
from mezzotint.models.policies.cost import Cost
from mezzotint.models.policies.dllm_cache import DLLMCache
from mezzotint.models.policies.fast_dllm import FastDLLM
from mezzotint.models.policies.forward import attend
from mezzotint.models.policies.interface import Plan, Policy, Sight
from mezzotint.models.policies.kv_packet import KVPacket
from mezzotint.models.policies.memory import Segment
from mezzotint.models.policies.polestar import Polestar
from mezzotint.models.policies.step import make_frame, run_step
from mezzotint.models.policies.store import Hooks, Store
from mezzotint.models.reveal import Threshold

LAYERS, LENGTH, PROMPT = 3, 14, 8


def model_of():
    return tiny_model(tiny_config("A" * LAYERS, LENGTH)).eval()


class Slow:
    """One row: keys and values of every layer by place, attention as a loop over heads."""

    def __init__(self, model, places: int) -> None:
        self.model = model
        shape = (LAYERS, places, model.config.n_kv_heads, model.config.head_dim)
        self.k, self.v = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
        self.visible = torch.ones(places, dtype=torch.bool)

    def layer(self, index: int, h, places: list[int], positions: list[int]):
        """h (n, D) of tokens kept at `places`, standing at `positions` -> (n, D)."""
        layer = self.model.layers[index]
        mixer, x = layer.mixer, layer.mixer_norm(h)
        tables = rope_tables(self.model.config, torch.tensor([positions]), torch.float64)
        q, k, v = (p(x).unflatten(-1, (-1, 4)) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
        q, k = rotate(q[None], tables)[0], rotate(k[None], tables)[0]
        self.k[index, places], self.v[index, places] = k, v
        heads = []
        for head in range(q.shape[1]):
            keys, values = self.k[index, self.visible, head // 2], self.v[index, self.visible, head // 2]
            heads.append((q[:, head] @ keys.T / 2).softmax(-1) @ values)
        h = h + mixer.o_proj(torch.cat(heads, dim=-1))
        return h + layer.mlp(layer.mlp_norm(h))


def canvas_of(model, spans=()) -> Canvas:
    prompt = ordinary(model.config, (1, PROMPT), generator(3))
    return make_canvas(
        model, prompt, new_canvas(model, len(prompt), LENGTH - PROMPT, None), block=LENGTH - PROMPT, spans=spans
    )


def sight_of(canvas: Canvas, tokens, step: int) -> Sight:
    steps = torch.tensor([step])
    masked = tokens == 0
    block = slice(canvas.start, canvas.length)
    return Sight(masked, torch.ones(1) > 0, block, canvas.response, steps, steps, 0, LAYERS)


def revealed_in_turn(canvas: Canvas, steps: int) -> list[torch.Tensor]:
    """The canvas as it stands at each step: one more token revealed each time."""
    tokens = [canvas.tokens]
    for step in range(1, steps):
        new = tokens[-1].clone()
        new[0, canvas.response + 2 * step - 1] = 5 + step
        tokens.append(new)
    return tokens


# -- the harness -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Scripted(Policy):
    """Recomputes what a table says: rows[step][layer] is a list of columns."""

    name: ClassVar[str] = "scripted"
    layerwise: ClassVar[bool] = True
    rows: tuple = ()

    def plan(self, sight: Sight, state: Any):
        return Plan(sight.everything()), state

    def at_layer(self, look, state: Any):
        chosen = torch.zeros(1, LENGTH, dtype=torch.bool)
        chosen[0, self.rows[int(look.sight.step[0])][look.layer]] = True
        return chosen, state


@dataclass(frozen=True, kw_only=True)
class CarriesHidden(Scripted):
    carry: ClassVar = "hidden"


@dataclass(frozen=True, kw_only=True)
class CarriesChanges(Scripted):
    carry: ClassVar = "changes"


def random_rows(steps: int) -> tuple:
    """All columns in the first step, then some, in one layer none."""
    g = generator(8)
    rows = [[list(range(LENGTH))] * LAYERS]
    for _ in range(steps - 1):
        rows.append([(torch.rand(LENGTH, generator=g) < 0.5).nonzero()[:, 0].tolist() for _ in range(LAYERS)])
    rows[1][1] = []
    return tuple(rows)


@pytest.mark.parametrize("kind", [CarriesHidden, CarriesChanges])
def test_any_columns_at_any_layer_leave_the_others_as_they_were_kept(kind):
    model, steps = model_of(), 4
    canvas, policy = canvas_of(model), kind(rows=random_rows(4))
    frame, slow = make_frame(model, canvas, policy, Cost(layers=LAYERS)), Slow(model, LENGTH)
    kept = torch.zeros(LAYERS, LENGTH, model.config.d_model, dtype=torch.float64)
    counted = 0
    with torch.no_grad():
        for step, tokens in enumerate(revealed_in_turn(canvas, steps)):
            sight = sight_of(canvas, tokens, step)
            got, _ = run_step(frame, tokens, sight, Plan(sight.everything()), None)
            h = model.embed(tokens[0])
            for index in range(LAYERS):
                places = policy.rows[step][index]
                counted += len(places)
                out = slow.layer(index, h[places], places, places) if places else h[:0]
                if kind is CarriesHidden:
                    kept[index, places] = out
                    h = kept[index].clone()
                else:
                    kept[index, places] = out - h[places]
                    h = h + kept[index]
            assert_close(got[0], h[PROMPT:])
    assert frame.cost.token_layers == counted and frame.cost.passes == steps
    assert frame.cost.full_token_layers == steps * LENGTH * LAYERS


def test_dllm_cache_over_several_steps():
    model, canvas = model_of(), canvas_of(model_of())
    policy = DLLMCache(prompt_interval=3, response_interval=4, ratio=0.3)
    frame, slow = make_frame(model, canvas, policy, Cost(layers=LAYERS)), Slow(model, LENGTH)
    changes = torch.zeros(LAYERS, LENGTH, model.config.d_model, dtype=torch.float64)
    response = list(range(PROMPT, LENGTH))
    with torch.no_grad():
        for step, tokens in enumerate(revealed_in_turn(canvas, 4)):
            sight = sight_of(canvas, tokens, step)
            got, _ = run_step(frame, tokens, sight, Plan(sight.everything()), None)
            h = model.embed(tokens[0])
            for index in range(LAYERS):
                rows = list(range(PROMPT)) if step % 3 == 0 else []
                if step % 4 == 0 or index == 0:
                    rows += response
                else:
                    layer = model.layers[index]
                    fresh = layer.mixer.v_proj(layer.mixer_norm(h[response]))
                    alike = F.cosine_similarity(fresh, slow.v[index, response].flatten(1), dim=-1).tolist()
                    rows += [response[i] for i in sorted(range(len(response)), key=lambda i: alike[i])[:2]]  # 0.3 * 6
                out = slow.layer(index, h[rows], rows, rows)
                changes[index, rows] = out - h[rows]
                h = h + changes[index]
            assert_close(got[0], h[PROMPT:])


def test_polestar_that_is_never_due_is_a_dual_cache():
    model = tiny_model(tiny_config("AAA", 32)).eval()
    prompts = ordinary(model.config, (3, 10), generator(7)).tolist()
    asked = {"new_tokens": 16, "block": 4, "reveal": Threshold(confidence=0.3)}
    never = Polestar(clusters=4, min_last=99, min_since=99, window_every=0)
    got = decode_canvas(model, prompts, policy=never, **asked)
    want = decode_canvas(model, prompts, policy=FastDLLM(mode="dual"), **asked)
    assert got.tokens == want.tokens and got.cost.token_layers == want.cost.token_layers
    often = decode_canvas(model, prompts, policy=Polestar(clusters=4, min_last=0), **asked)
    assert often.cost.token_layers > got.cost.token_layers and often.tokens != got.tokens


# -- policies of files to come ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OuterReuse(Policy):
    """Like FlashBlock: what a block sees outside of it is attended to at its first step (or every one), then reused."""

    name: ClassVar[str] = "outer"
    attends: ClassVar[bool] = True
    every_step: bool = False

    def without_object(self, config, *, bidirectional: bool):
        return None

    def begin(self, canvas: Canvas, sight: Sight):
        return {}

    def plan(self, sight: Sight, state: Any):
        first = sight.block_step == 0
        return Plan(first[:, None] | sight.columns(sight.block.start, sight.block.stop)), state

    def attention(self, scene, state: Any):
        block, inside = scene.sight.block, scene.inside
        low, high = block.start, block.stop
        q = scene.q if scene.q.shape[1] == high - low else scene.q[:, block]
        around = [
            Segment(inside.k[:, a:b], inside.v[:, a:b]) for a, b in ((0, low), (high, inside.k.shape[1])) if b > a
        ]
        if scene.layer not in state or self.every_step or int(scene.sight.block_step[0]) == 0:
            state = state | {scene.layer: attend(q, around, weights=True)}
        parts = [state[scene.layer], attend(q, [Segment(inside.k[:, block], inside.v[:, block])], weights=True)]
        share = torch.stack([part.lse for part in parts]).softmax(dim=0).transpose(2, 3)[..., None]
        own = sum(part.y * weight for part, weight in zip(parts, share))
        if q is scene.q:
            return own, state
        return torch.cat(
            [attend(scene.q, [inside]).y[:, :low], own, attend(scene.q, [inside]).y[:, high:]], dim=1
        ), state


@dataclass(frozen=True, kw_only=True)
class Rollout(Policy):
    """Like d2-Cache: attention rows of all layers are multiplied up while a step runs."""

    name: ClassVar[str] = "rollout"
    attends: ClassVar[bool] = True

    def plan(self, sight: Sight, state: Any):
        return Plan(sight.everything()), torch.eye(sight.length, dtype=torch.float64)[None]

    def attention(self, scene, state: Any):
        found = attend(scene.q, [*scene.outside, scene.inside], weights=True)
        mixed = found.weights.mean(dim=1) + torch.eye(scene.q.shape[1], dtype=torch.float64)
        return found.y, (mixed / mixed.sum(dim=-1, keepdim=True)) @ state


def test_attention_may_be_put_together_from_parts_that_are_kept():
    model = tiny_model(tiny_config("AAA", 32)).eval()
    prompts = ordinary(model.config, (1, 10), generator(7)).tolist()
    asked = {"new_tokens": 16, "block": 4, "reveal": Threshold(confidence=0.3)}
    dual = decode_canvas(model, prompts, policy=FastDLLM(mode="dual"), **asked)
    assert decode_canvas(model, prompts, policy=OuterReuse(every_step=True), **asked).tokens == dual.tokens
    assert decode_canvas(model, prompts, policy=OuterReuse(), **asked).tokens != dual.tokens


def test_attention_rows_of_all_layers_are_there_for_who_asks():
    model, policy = model_of(), Rollout()
    canvas = canvas_of(model)
    frame = make_frame(model, canvas, policy, Cost(layers=LAYERS))
    sight = sight_of(canvas, canvas.tokens, 0)
    plan, state = policy.plan(sight, None)
    with torch.no_grad():
        hidden, rollout = run_step(frame, canvas.tokens, sight, plan, state)
        want, _ = run_step(make_frame(model, canvas, FastDLLM(), Cost(layers=LAYERS)), canvas.tokens, sight, plan, None)
    assert_close(hidden, want)
    assert rollout.shape == (1, LENGTH, LENGTH)
    assert_close(rollout.sum(-1), torch.ones(1, LENGTH, dtype=torch.float64))


# -- parts outside of the canvas -------------------------------------------------------------------------------------


def alone_by_hand(model, embedded):
    """Keys before rotation are not needed here: (Slow of the tokens alone from position 0, what each layer was given)."""
    count = len(embedded)
    slow, given, h = Slow(model, count), [], embedded
    for index in range(LAYERS):
        given.append(h)
        h = slow.layer(index, h, list(range(count)), list(range(count)))
    return slow, given


def moved(model, slow: Slow, index: int, by: int):
    """The keys of a layer as if all tokens stood `by` further on."""
    tables = rope_tables(model.config, torch.tensor([[by] * slow.k.shape[1]]), torch.float64)
    return rotate(slow.k[index][None], tables)[0]


def first_step(model, policy, canvas):
    hooks = Hooks(model, Store(), Cost(layers=LAYERS), canvas.spans)
    arranged = policy.arrange(canvas, hooks)
    frame = make_frame(model, arranged, policy, Cost(layers=LAYERS))
    sight = sight_of(arranged, arranged.tokens, 0)
    state = policy.begin(arranged, sight)
    plan, state = policy.plan(sight, state)
    return run_step(frame, arranged.tokens, sight, plan, state)[0][0], arranged


def test_bicache_reads_the_prefix_alone_below_and_goes_on_from_it_above():
    model, end = model_of(), 5
    canvas = canvas_of(model, spans=((0, end),))
    with torch.no_grad():
        for layers in range(LAYERS + 1):
            got, _ = first_step(model, BiCache(layers=layers), canvas)
            alone, given = alone_by_hand(model, model.embed(canvas.tokens[0, :end]))
            slow, h = Slow(model, LENGTH), model.embed(canvas.tokens[0])
            for index in range(LAYERS):
                if index == layers:
                    h = torch.cat([given[index], h[end:]])
                if index < layers:
                    slow.k[index, :end], slow.v[index, :end] = alone.k[index], alone.v[index]
                    own = list(range(end, LENGTH))
                    h = torch.cat([h[:end], slow.layer(index, h[end:], own, own)])
                else:
                    h = slow.layer(index, h, list(range(LENGTH)), list(range(LENGTH)))
            assert_close(got, h[PROMPT:])


def test_packets_stand_where_the_documents_stood_and_push_on_what_follows():
    model = model_of()
    adapters = fresh_adapters(model, header=2, trailer=3, std=0.5)
    canvas = canvas_of(model, spans=((1, 4), (5, 7)))
    with torch.no_grad():
        got, _ = first_step(model, KVPacket(adapters=adapters), canvas)
        # places: token 0, packet of 8, token 4, packet of 7, tokens 7 to 13
        slow = Slow(model, 1 + 8 + 1 + 7 + 7)
        for (start, stop), at in zip(canvas.spans, (1, 10)):
            wrapped = torch.cat([adapters.header, model.embed(canvas.tokens[0, start:stop]), adapters.trailer])
            alone, _ = alone_by_hand(model, wrapped)
            for index in range(LAYERS):
                slow.k[index, at : at + len(wrapped)] = moved(model, alone, index, at)
                slow.v[index, at : at + len(wrapped)] = alone.v[index]
        own, h = [0, 9, *range(17, 24)], model.embed(canvas.tokens[0, [0, 4, *range(7, 14)]])
        for index in range(LAYERS):
            h = slow.layer(index, h, own, own)
        assert_close(got, h[-(LENGTH - PROMPT) :])


@pytest.mark.parametrize("drop_rest", [False, True])
def test_acache_recomputes_its_anchors_and_reads_the_rest_of_the_affix(drop_rest):
    model, (start, stop) = model_of(), (2, 7)
    canvas = canvas_of(model, spans=((start, stop),))
    with torch.no_grad():
        got, arranged = first_step(model, ACache(ratio=0.25, drop_rest=drop_rest), canvas)
        own = arranged.positions[0].tolist()
        assert len([place for place in own if start <= place < stop]) == 2, "a quarter of five, rounded up"
        slow, rest = Slow(model, LENGTH), [place for place in range(LENGTH) if place not in own]
        alone, _ = alone_by_hand(model, model.embed(canvas.tokens[0, start:stop]))
        for index in range(LAYERS):
            slow.k[index, start:stop], slow.v[index, start:stop] = moved(model, alone, index, start), alone.v[index]
        if drop_rest:
            slow.visible[rest] = False
        h = model.embed(canvas.tokens[0, own])
        for index in range(LAYERS):
            h = slow.layer(index, h, own, own)
        assert_close(got, h[-(LENGTH - PROMPT) :])
