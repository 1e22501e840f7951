"""Each policy's selection rule on hand-made tensors, against a second, slow, literal writing of its formula."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from support import assert_close, generator, ordinary, tiny_config, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from mezzotint.models.policies.acache import ACache, importance, most_important, segments_of, shared_part
from mezzotint.models.policies.bicache import layers_for, measured_layers
from mezzotint.models.policies.bidirectional import make_canvas, new_canvas
from mezzotint.models.policies.cost import Cost
from mezzotint.models.policies.dllm_cache import least_alike
from mezzotint.models.policies.drop_kv import EPSILON, DropKV, leave_one_out
from mezzotint.models.policies.entropy_cache import EntropyCache, most_recent
from mezzotint.models.policies.fast_dllm import block_queries
from mezzotint.models.policies.forward import attend
from mezzotint.models.policies.interface import Sight
from mezzotint.models.policies.look import Delta, Scene
from mezzotint.models.policies.memory import Pick, Segment
from mezzotint.models.policies.past import KVPast
from mezzotint.models.policies.polestar import divergence, in_clusters, means, spherical_clusters
from mezzotint.models.policies.store import Hooks, Store


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def sight_of(masked: torch.Tensor, block: slice, *, step: list[int], response: int = 2, layers: int = 3) -> Sight:
    steps = torch.tensor(step)
    return Sight(masked, masked[:, block].any(dim=1), block, response, steps, steps, 0, layers)


# -- attention over segments -----------------------------------------------------------------------------------------


def by_loops(q, k, v, seen):
    """softmax(q k / sqrt P) v of every row, head and query, and its log-sum-exp."""
    batch, count, heads, size = q.shape
    y, lse = torch.zeros_like(q), torch.zeros(batch, heads, count, dtype=q.dtype)
    for b in range(batch):
        for h in range(heads):
            kv = h // (heads // k.shape[2])
            for i in range(count):
                scores = [
                    float(q[b, i, h] @ k[b, j, kv]) / math.sqrt(size) if seen[b, j, kv] else -math.inf
                    for j in range(k.shape[1])
                ]
                total = sum(math.exp(score) for score in scores)
                lse[b, h, i] = math.log(total)
                y[b, i, h] = sum(math.exp(score) / total * v[b, j, kv] for j, score in enumerate(scores))
    return y, lse


def test_attention_over_segments_is_one_softmax_over_all_their_keys():
    q, own_k, own_v = rand(2, 3, 4, 6), rand(2, 5, 2, 6, seed=1), rand(2, 5, 2, 6, seed=2)
    k, v = rand(1, 4, 2, 6, seed=3), rand(1, 4, 2, 6, seed=4)  # one copy that both rows read
    seen = torch.rand(2, 4, 2, generator=generator(5)) < 0.6
    found = attend(q, [Segment(k, v, seen=seen), Segment(own_k, own_v)], weights=True)
    keys, values = (torch.cat([a.expand(2, -1, -1, -1), b], dim=1) for a, b in ((k, own_k), (v, own_v)))
    y, lse = by_loops(q, keys, values, torch.cat([seen, torch.ones(2, 5, 2) > 0], dim=1))
    assert_close(found.y, y)
    assert_close(found.lse, lse)
    assert_close(found.weights.sum(-1), torch.ones(2, 4, 3, dtype=torch.float64))
    plain = attend(q, [Segment(own_k, own_v)])
    assert_close(plain.y, by_loops(q, own_k, own_v, torch.ones(2, 5, 2) > 0)[0])


def test_parts_are_merged_by_their_log_sum_exp():
    q, k, v = rand(1, 3, 2, 4), rand(1, 7, 2, 4, seed=1), rand(1, 7, 2, 4, seed=2)
    parts = [attend(q, [Segment(k[:, a:b], v[:, a:b])], weights=True) for a, b in ((0, 3), (3, 7))]
    share = torch.stack([part.lse for part in parts]).softmax(dim=0).transpose(2, 3)[..., None]
    merged = sum(part.y * weight for part, weight in zip(parts, share))
    assert_close(merged, attend(q, [Segment(k, v)]).y)


# -- EntropyCache ----------------------------------------------------------------------------------------------------


def test_the_most_recent_are_the_last_revealed():
    revealed_at = torch.tensor([[-1, 3, 0, 3, 5, -1, 3], [-1, -1, 2, -1, -1, 1, -1]])
    for count in range(6):
        got = most_recent(revealed_at, count)
        for row in range(2):
            known = [(-int(at), column) for column, at in enumerate(revealed_at[row]) if at >= 0]
            want = {column for _, column in sorted(known)[:count]}
            assert set(got[row].nonzero()[:, 0].tolist()) == want


def test_the_largest_entropy_of_what_was_revealed_decides():
    logits = rand(2, 4, 9) * 3
    logits[:, :, 0] = -torch.inf
    revealed = torch.zeros(2, 10, dtype=torch.bool)
    revealed[0, 3:5] = revealed[1, 5] = True
    block = slice(3, 7)
    delta = Delta(revealed, logits, sight_of(torch.ones(2, 10) > 0, block, step=[1, 1]), Cost(layers=3))
    want = []
    for row in range(2):
        entropies = []
        for column in revealed[row].nonzero()[:, 0].tolist():
            weights = [math.exp(float(x)) for x in logits[row, column - block.start]]
            p = [w / sum(weights) for w in weights]
            entropies.append(-sum(x * math.log(x) for x in p if x > 0))
        want.append(max(entropies))
    assert_close(delta.entropies().amax(dim=1), torch.tensor(want, dtype=torch.float64))
    middle = sum(want) / 2
    assert EntropyCache(threshold=middle).too_uncertain(delta).tolist() == [w > middle for w in want]


class Touched(TorchDispatchMode):
    """Counts the elements of every tensor that an operation reads or makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [x for x in (*args, *(out if isinstance(out, (tuple, list)) else [out])) if torch.is_tensor(x)]
            self.elements += sum(tensor.numel() for tensor in tensors)
        return out


def test_the_entropy_decision_costs_v_a_token_whatever_length_and_depth():
    def cost_of(*, length: int, layers: int, vocabulary: int, revealed: int) -> tuple[int, int]:
        chosen = torch.zeros(1, length, dtype=torch.bool)
        chosen[0, 4 : 4 + revealed] = True
        sight = sight_of(torch.ones(1, length) > 0, slice(4, 12), step=[1], layers=layers)
        delta = Delta(chosen, rand(1, 8, vocabulary), sight, Cost(layers=layers))
        with Touched() as touched:
            EntropyCache(threshold=0.5).too_uncertain(delta)
        return delta.cost.decision_operations, touched.elements

    base = {"length": 64, "layers": 2, "vocabulary": 4096, "revealed": 2}
    counted, elements = cost_of(**base)
    assert counted == 2 * 4096
    assert cost_of(**base | {"length": 4096}) == (counted, elements) == cost_of(**base | {"layers": 64})
    assert cost_of(**base | {"revealed": 4})[0] == 2 * counted
    more = cost_of(**base | {"vocabulary": 8192})
    assert more[0] == 2 * counted and 1.9 < more[1] / elements < 2.1


# -- Fast-dLLM, dLLM-Cache -------------------------------------------------------------------------------------------


def test_block_queries_are_all_at_the_start_and_then_the_block():
    sight = sight_of(torch.ones(4, 12) > 0, slice(4, 8), step=[0, 1, 2, 4])
    for mode in ("prefix", "dual"):
        for refresh in (0, 1, 2):
            got = block_queries(sight, mode=mode, refresh=refresh)
            for row, step in enumerate([0, 1, 2, 4]):
                everything = step == 0 or (refresh > 0 and step % refresh == 0)
                own = range(4, 12 if mode == "prefix" else 8)
                assert got[row].tolist() == [everything or column in own for column in range(12)]


def test_the_values_least_alike_are_recomputed():
    new, old = rand(3, 7, 5), rand(3, 7, 5, seed=1)
    old[0, 2] = new[0, 2] * 3  # the same direction
    for ratio in (0.0, 0.25, 0.5, 1.0):
        got = least_alike(new, old, ratio)
        for row in range(3):
            cosines = [float(a @ b / (a.norm() * b.norm())) for a, b in zip(new[row], old[row])]
            order = sorted(range(7), key=lambda i: (cosines[i], i))[: math.ceil(ratio * 7)]
            assert set(got[row].nonzero()[:, 0].tolist()) == set(order)


# -- Polestar --------------------------------------------------------------------------------------------------------


def test_drift_is_the_divergence_of_a_clusters_attention():
    now, before = (rand(2, 3, 4, 6, seed=s).softmax(-1) for s in (0, 1))
    got = divergence(now, before)
    for b in range(2):
        for c in range(4):
            heads = [
                sum(float(p) * math.log(float(p) / float(r)) for p, r in zip(now[b, h, c], before[b, h, c]))
                for h in range(3)
            ]
            assert math.isclose(float(got[b, c]), sum(heads) / 3, rel_tol=1e-10)
    labels = torch.tensor([[0, 1, -1, 2, 3, 1], [-1, -1, 0, 0, 2, 1]])
    for count in range(5):
        chosen = in_clusters(labels, got, count)
        for b in range(2):
            top = sorted(range(4), key=lambda c: -float(got[b, c]))[:count]
            assert chosen[b].tolist() == [label in top for label in labels[b].tolist()]


def test_clusters_are_those_of_the_nearest_direction():
    g = generator(3)
    directions = torch.eye(4, dtype=torch.float64)[:3]
    truth = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2, 0], [2, 2, 2, 1, 0, 0, 0, 1, 1]])
    x = directions[truth] * (1 + 4 * torch.rand(2, 9, 1, generator=g)) + 0.05 * rand(2, 9, 4)
    window = torch.ones(2, 9, dtype=torch.bool)
    window[:, 4] = False
    labels = spherical_clusters(x, window, 3)
    assert labels[:, 4].tolist() == [-1, -1]
    for row in range(2):
        pairs = {(int(t), int(m)) for t, m, w in zip(truth[row], labels[row], window[row]) if w}
        assert len(pairs) == 3 and len({m for _, m in pairs}) == 3
        for cluster in range(3):
            own = [x[row, i] for i in range(9) if labels[row, i] == cluster]
            assert_close(means(x, labels, 3)[row, cluster], sum(own) / len(own))


# -- ACache, BiCache -------------------------------------------------------------------------------------------------


def test_anchors_are_the_affix_tokens_that_masks_look_at_most():
    model = tiny_model(tiny_config("AA", 16, noise_level_input=True)).eval()
    prompts = ordinary(model.config, (2, 9), generator(2))
    prompts[:, 2:7] = prompts[:1, 2:7]
    canvas = make_canvas(model, prompts, new_canvas(model, len(prompts), 5, None), block=5, spans=((2, 5), (5, 7)))
    hooks = Hooks(model, Store(), Cost(layers=2), canvas.spans)
    with torch.no_grad():
        packets = [shared_part(canvas, span, hooks) for span in canvas.spans]
        got = importance(canvas, packets, hooks)
        want = probe_by_hand(model, canvas, packets, hooks)
    assert_close(got, want)
    chosen = most_important(got, 2)
    for row in range(2):
        order = sorted(range(5), key=lambda i: -float(want[row, i]))[:2]
        assert set(chosen[row].nonzero()[:, 0].tolist()) == set(order)
    assert hooks.cost.token_layers == 2 * 9 * 2 and hooks.cost.passes == 1


def probe_by_hand(model, canvas, packets, hooks):
    """Layer by layer: softmax over affix keys alone of every mask's query, summed; the stream sees affix and own tokens."""
    from mezzotint.models.layers import noise_level_features, rope_tables
    from mezzotint.models.ops.rope import rotate

    own = [0, 1, *range(7, 14)]
    tokens = canvas.tokens[:, own]
    level = model.level_proj(noise_level_features(torch.full((2,), 5 / 14, dtype=torch.float64), torch.float64))
    h = model.embed(tokens) + level[:, None]
    tables = rope_tables(model.config, torch.tensor([own]), torch.float64)
    affix = rope_tables(model.config, torch.arange(2, 7)[None], torch.float64)
    total = torch.zeros(2, 5, dtype=torch.float64)
    for index, layer in enumerate(model.layers):
        x, mixer = layer.mixer_norm(h), layer.mixer
        q, k, v = (p(x).unflatten(-1, (-1, 4)) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
        q, k = rotate(q, tables), rotate(k, tables)
        ak = rotate(torch.cat([p.k[index] for p in packets], dim=1), affix).expand(2, -1, -1, -1)
        av = torch.cat([p.v[index] for p in packets], dim=1).expand(2, -1, -1, -1)
        y = torch.zeros_like(q)
        for head in range(4):
            scores = torch.einsum("bip,bjp->bij", q[:, :, head], ak[:, :, head // 2]) / 2
            total += scores[:, -5:].softmax(-1).sum(1)
            every = torch.cat([scores, torch.einsum("bip,bjp->bij", q[:, :, head], k[:, :, head // 2]) / 2], dim=-1)
            values = torch.cat([av, v], dim=1)[:, :, head // 2]
            y[:, :, head] = every.softmax(-1) @ values
        h = h + mixer.o_proj(y.flatten(2))
        h = h + layer.mlp(layer.mlp_norm(h))
    return total


def test_a_packet_stands_anywhere_by_rotating_its_keys():
    """Keys kept before their rotation, rotated to another place, are those computed at that place."""
    model = tiny_model(tiny_config("AA", 16, rope_scaling="yarn", rope_factor=4.0, rope_trained_length=8)).eval()
    row = ordinary(model.config, (1, 12), generator(4))
    canvas = make_canvas(model, row, new_canvas(model, len(row), 4, None), block=4, spans=((5, 9),))
    hooks = Hooks(model, Store(), Cost(layers=2), canvas.spans)
    from mezzotint.models.policies.forward import project, rotated, tables_of

    with torch.no_grad():
        packet = shared_part(canvas, (5, 9), hooks)
        first = model.layers[0]
        plain = project(first.mixer, first.mixer_norm(model.embed(row[:, 5:9]))).k
        there = rotated(plain, tables_of(model, torch.arange(5, 9)[None]))
        assert_close(segments_of(canvas, [packet], hooks)[0][0].keys(), there)
    assert ACache(ratio=0.0) == ACache(ratio=0.0)


def test_layers_that_a_prefix_shares_follow_the_table_and_the_measured_cosines():
    table = ((0, 1), (10, 3), (50, 2), (90, 4))
    for share in (0, 5, 10, 49.9, 50, 91):
        want = [layers for percent, layers in table if percent <= share][-1]
        assert layers_for(share, table) == want
    assert layers_for(-1, table) == 0
    model = tiny_model(tiny_config("AAA", 16)).eval()
    texts = ordinary(model.config, (4, 16), generator(6))
    assert measured_layers(model, texts, 16) == 3  # nothing follows
    assert measured_layers(model, texts, 8, threshold=1.0 + 1e-9) == 0
    assert measured_layers(model, texts, 8, threshold=1.0 - 1e-9) == 1  # the first layer sees tokens alone


# -- DropKV ----------------------------------------------------------------------------------------------------------


def test_scores_are_the_brute_force_leave_one_out():
    q, k, v = rand(2, 3, 4, 6), rand(2, 8, 2, 6, seed=1), rand(2, 8, 2, 6, seed=2)
    found = attend(q, [Segment(k, v)], weights=True)
    got = leave_one_out(found.weights[..., :5], v[:, :5], found.y)  # of eight keys five may be evicted
    for b in range(2):
        for kv in range(2):
            for j in range(5):
                rest = [i for i in range(8) if i != j]
                moved = []
                for h in (2 * kv, 2 * kv + 1):
                    total = 0.0
                    for m in range(3):
                        whole = F.softmax(k[b, :, kv] @ q[b, m, h] / math.sqrt(6), dim=0) @ v[b, :, kv]
                        less = F.softmax(k[b, rest, kv] @ q[b, m, h] / math.sqrt(6), dim=0) @ v[b, rest, kv]
                        total += float((whole - less).square().sum())
                    moved.append(total)
                # the published score has a small number below the fraction, which the brute force has not
                assert math.isclose(float(got[b, kv, j]), sum(moved) / 2, rel_tol=20 * EPSILON)


@pytest.mark.parametrize("seed", range(8))  # among them tokens at the border, which have fewer neighbours
def test_eviction_keeps_the_highest_pooled_scores_and_the_last_tokens_per_head(seed):
    q, k, v = (rand(1, *shape, seed=10 * seed + n) for n, shape in enumerate([(4, 4, 6), (12, 2, 6), (12, 2, 6)]))
    inside = Segment(rand(1, 4, 2, 6, seed=10 * seed + 3), rand(1, 4, 2, 6, seed=10 * seed + 4))
    past = KVPast((Segment(k[:, :7], v[:, :7]),), k.clone()[:, 7:], v.clone()[:, 7:], used=5)
    sight = sight_of(torch.ones(1, 4) > 0, slice(0, 4), step=[0])
    columns = Pick.of(sight.everything())
    scene = Scene(0, q, columns, past.segments(), inside, past, 12, sight, Cost(layers=1))
    kept = DropKV(keep=0.5, kernel=3, protect=2).evict(scene)
    assert kept.tokens == 6 and kept.used == 0
    found = attend(q, [Segment(k, v), inside], weights=True)
    scores = leave_one_out(found.weights[..., :12], v, found.y)[0]
    for head in range(2):
        own = [float(s) for s in scores[head]]
        pooled = [sum(near := own[max(0, i - 1) : i + 2]) / len(near) for i in range(12)]
        chosen = sorted([10, 11, *sorted(range(10), key=lambda i: -pooled[i])[:4]])
        assert_close(kept.fixed[0].k[0, :, head], k[0, chosen, head])
        assert_close(kept.fixed[0].v[0, :, head], v[0, chosen, head])
    last = DropKV(keep=0.5, rule="recency", protect=2).evict(scene)
    assert_close(last.fixed[0].k, k[:, 6:])
    anything = DropKV(keep=0.5, rule="random", protect=2).evict(scene)
    assert anything.tokens == 6 and torch.equal(anything.fixed[0].k[:, -2:], k[:, -2:])
    assert DropKV(keep=1.0).evict(scene) is past
