"""Policies that share parts of prompts or evict: parity, one copy in memory whatever the requests, counts, refusals."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from support import assert_close, generator, ordinary, tiny_config, tiny_model

from mezzotint.models.decode import generate
from mezzotint.models.errors import InputError
from mezzotint.models.policies.acache import ACache
from mezzotint.models.policies.adapters import fresh_adapters, load_adapters
from mezzotint.models.policies.bicache import BiCache
from mezzotint.models.policies.bidirectional import decode_canvas, make_canvas, new_canvas
from mezzotint.models.policies.causal import decode_blocks
from mezzotint.models.policies.cost import Cost
from mezzotint.models.policies.drop_kv import DropKV
from mezzotint.models.policies.entropy_cache import EntropyCache
from mezzotint.models.policies.interface import Plan, Sight
from mezzotint.models.policies.kv_packet import KVPacket
from mezzotint.models.policies.none import NoCache
from mezzotint.models.policies.polestar import Polestar
from mezzotint.models.policies.shared_prefix import SharedPrefix
from mezzotint.models.policies.step import make_frame, run_step
from mezzotint.models.policies.store import Hooks, Store
from mezzotint.models.policies.table import POLICIES, parse_policy, spelled
from mezzotint.models.reveal import Sampler, Threshold, TopK

ROW, PROMPT = 32, 16
PREFIX, INFIX, SUFFIX = ((0, 10),), ((3, 9),), ((6, 16),)
EVERYTHING = Polestar(clusters=4, refreshed=4, last_layer=4, before=-1, after=-1, min_last=0, window_every=0)


def row_model(seed: int = 0, **overrides):
    return tiny_model(tiny_config("AAA", ROW, **overrides), seed=seed).eval()


def prompts_of(model, rows: int = 3, length: int = PROMPT, shared: int = PROMPT - 3) -> list[list[int]]:
    """Rows that share their first `shared` tokens."""
    tokens = ordinary(model.config, (rows, length), generator(7))
    tokens[:, :shared] = tokens[:1, :shared]
    return tokens.tolist()


def decoded(model, policy, prompts=None, **changed):
    asked = {"new_tokens": ROW - PROMPT, "block": 8, "reveal": Threshold(confidence=0.3)} | changed
    return decode_canvas(model, prompts or prompts_of(model), policy=policy, **asked)


def blocks(model, policy, prompts, **changed):
    return decode_blocks(
        model, prompts, policy=policy, **{"new_tokens": 20, "reveal": Threshold(confidence=0.3)} | changed
    )


# -- bidirectional ---------------------------------------------------------------------------------------------------

EXACT = [
    (EVERYTHING, ()),
    (BiCache(layers=0, interval=1), PREFIX),
    *((ACache(ratio=1.0, refresh=1), spans) for spans in (PREFIX, INFIX, SUFFIX, ((0, 4), (6, 10)))),
]
CACHING = [
    (Polestar(clusters=4, refreshed=1), ()),
    (Polestar(clusters=4, refreshed=2, before=-1, after=-1, window_every=2), ()),
    (BiCache(layers=1, interval=4), PREFIX),
    (BiCache(layers=0, interval=4, inner="dual"), PREFIX),
    (BiCache(layers=3), PREFIX),
    *((ACache(ratio=0.3), spans) for spans in (PREFIX, INFIX, SUFFIX, ((0, 4), (6, 10)))),
    (ACache(ratio=0.0), PREFIX),
    (ACache(ratio=0.3, drop_rest=True), PREFIX),
    (KVPacket(), ((0, 6), (6, 13))),
]


@pytest.mark.parametrize(("policy", "spans"), EXACT, ids=str)
def test_a_policy_at_its_exact_setting_writes_what_no_cache_writes(policy, spans):
    model = row_model()
    want, got = decoded(model, NoCache()), decoded(model, policy, spans=spans)
    assert got.tokens == want.tokens
    assert got.cost.token_layers == want.cost.token_layers and got.cost.passes == want.cost.passes


@pytest.mark.parametrize(("policy", "spans"), CACHING, ids=str)
def test_a_policy_otherwise_recomputes_less_and_rows_decode_as_alone(policy, spans):
    model = row_model()
    prompts = prompts_of(model)
    got = decoded(model, policy, prompts, spans=spans)
    assert got.cost.share < 0.9
    apart = [decoded(model, policy, [prompt], spans=spans) for prompt in prompts]
    assert got.tokens == [one.tokens[0] for one in apart]
    assert got.cost.token_layers == sum(one.cost.token_layers for one in apart)


def test_an_affix_is_computed_once_and_held_once_by_all_requests():
    model, store = row_model(), Store()
    per_token = 3 * 2 * 2 * 4 * 8  # layers, keys and values, key heads, width, bytes of float64
    costs = {}
    for rows in (1, 2, 4, 8):
        prompts = prompts_of(model, rows)
        costs[rows] = decoded(model, ACache(ratio=0.3), prompts, spans=PREFIX, store=store).cost
    assert costs[1].shared_token_layers == 10 * 3
    assert all(costs[rows].shared_token_layers == 0 for rows in (2, 4, 8)), "later requests find it in the store"
    own = ROW - 10 + 3 + 1  # the request's own tokens, its anchors, and one more for rows with fewer columns
    a, b, c = (costs[rows].peak_bytes for rows in (2, 4, 8))
    private = (c - b) // 4
    assert c - b == 4 * private and b - a == 2 * private
    assert own * per_token <= private < own * per_token + 256  # keys and values, and a few flags
    shared = a - 2 * private
    assert 10 * per_token <= shared < 11 * per_token  # the affix, and the tables of its positions
    full = decoded(model, ACache(ratio=1.0), prompts_of(model, 8), spans=PREFIX, store=store).cost
    assert costs[8].peak_bytes < full.peak_bytes


def test_anchors_are_private_and_differ_between_requests():
    model = row_model()
    tokens = torch.tensor(prompts_of(model, 6, shared=10))
    canvas = make_canvas(model, tokens, new_canvas(model, len(tokens), ROW - PROMPT, None), block=8, spans=PREFIX)
    with torch.no_grad():
        arranged = ACache(ratio=0.3).arrange(canvas, Hooks(model, Store(), Cost(layers=3), PREFIX))
    seen = arranged.outside[0][0].seen
    assert arranged.length == ROW - 10 + 3 and seen is not None
    assert (~seen).sum(dim=1).tolist() == [3] * 6 and len({tuple(row) for row in seen.tolist()}) > 1
    for row in range(6):
        anchors = (~seen[row]).nonzero()[:, 0].tolist()
        assert arranged.positions[row, :3].tolist() == anchors
        assert arranged.tokens[row, :3].tolist() == tokens[row, anchors].tolist()


@pytest.mark.parametrize("spans", [PREFIX, INFIX, SUFFIX], ids=["prefix", "infix", "suffix"])
def test_more_anchors_bring_the_logits_nearer_to_full_recomputation(spans):
    """Between direct reuse (ratio 0) and the exact canvas (ratio 1), over models and prompts that share nothing."""
    errors = {ratio: 0.0 for ratio in (0.0, 0.25, 0.5, 0.75, 1.0)}
    for seed in range(4):
        model = row_model(seed=seed)
        prompts = ordinary(model.config, (16, PROMPT), generator(seed))
        want = first_logits(model, NoCache(), prompts, ())
        for ratio in errors:
            got = first_logits(model, ACache(ratio=ratio, refresh=1), prompts, spans)
            errors[ratio] += float((got.softmax(-1) - want.softmax(-1)).abs().sum())
    found = list(errors.values())
    assert all(more > less for more, less in pairwise(found)), found
    assert found[-1] < 1e-8


def first_logits(model, policy, prompts, spans):
    """Logits of all masks at the first step, but for the two tokens that are never predicted."""
    canvas = make_canvas(model, prompts, new_canvas(model, len(prompts), 16, None), block=16, spans=spans)
    with torch.no_grad():
        canvas = policy.arrange(canvas, Hooks(model, Store(), Cost(layers=3), spans))
        masked = canvas.tokens == 0
        steps = torch.zeros(len(prompts), dtype=torch.long)
        block = slice(canvas.start, canvas.length)
        sight = Sight(masked, steps == 0, block, canvas.response, steps, steps, 0, 3)
        frame = make_frame(model, canvas, policy, Cost(layers=3))
        hidden, _ = run_step(frame, canvas.tokens, sight, Plan(sight.everything()), None)
        return model.logits(hidden)[..., [1, *range(3, 40)]]


def test_rows_with_affixes_of_their_own_are_held_apart():
    model = row_model()
    prompts = ordinary(model.config, (2, PROMPT), generator(1)).tolist()
    got = decoded(model, ACache(ratio=0.0), prompts, spans=PREFIX)
    assert got.cost.shared_token_layers == 2 * 10 * 3
    assert got.tokens == [decoded(model, ACache(ratio=0.0), [prompt], spans=PREFIX).tokens[0] for prompt in prompts]


def test_entropy_caching_saves_more_the_longer_the_canvas():
    """With the same tokens revealed, what is not recomputed grows with the prompt."""
    model = row_model()
    shares = []
    for length in (16, 64, 256):
        got = decoded(model, EntropyCache(threshold=10.0, recent=4), prompts_of(model, 1, length), reveal=TopK(steps=4))
        shares.append(got.cost.share)
    assert shares[0] > shares[1] > shares[2]


# -- documents between soft tokens -----------------------------------------------------------------------------------


def test_packets_recompute_no_token_of_a_document():
    model, store = row_model(), Store()
    spans = ((0, 6), (6, 13))
    policy = KVPacket(adapters=fresh_adapters(model, header=2, trailer=3))
    first = decoded(model, policy, spans=spans, store=store)
    assert first.cost.shared_token_layers == (13 + 2 * 5) * 3
    again = decoded(model, policy, spans=spans, store=store)
    assert again.cost.shared_token_layers == 0 and again.tokens == first.tokens
    own = ROW - 13
    assert again.cost.token_layers == again.cost.full_token_layers * own // ROW
    assert first.tokens != decoded(model, KVPacket(), spans=spans, store=store).tokens  # the soft tokens are seen


def test_one_document_that_is_the_whole_prompt_is_what_the_model_reads_when_it_is_block_causal():
    """Without soft tokens a packet at the start of the text is exactly the committed prefix."""
    model = tiny_model(tiny_config("AAA", 8)).eval()
    prompts = prompts_of(model, 3, 24, shared=16)
    got = blocks(model, KVPacket(), prompts, spans=((0, 16),))
    assert got.tokens == blocks(model, NoCache(), prompts).tokens
    assert got.cost.shared_token_layers == 16 * 3 and got.cost.prefill_token_layers == 3 * 8 * 3


def test_adapters_are_saved_whole_and_belong_to_their_model(tmp_path):
    model, other = row_model(), row_model(seed=1)
    adapters = fresh_adapters(model)
    adapters.save(tmp_path / "adapters.safetensors")
    loaded = load_adapters(tmp_path / "adapters.safetensors")
    assert loaded.fingerprint == adapters.fingerprint
    assert_close(loaded.header, adapters.header, 0.0)
    policy = parse_policy(f"packet:adapters={tmp_path / 'adapters.safetensors'}")
    assert isinstance(policy, KVPacket) and policy.effective()["soft_tokens"] == 16
    decoded(model, policy, spans=PREFIX)
    with pytest.raises(InputError, match="were trained for the model"):
        decoded(other, policy, spans=PREFIX)
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(InputError, match="cannot be read as adapters"):
        load_adapters(tmp_path / "text")


# -- block-causal ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["AA", "MM", "MAM"])
def test_requests_on_one_prefix_prefill_it_once_hold_it_once_and_decode_as_alone(pattern):
    shared_prefix_case(pattern, requests=16, prefix=20, own=7)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # 17 prefills of 16k, on whatever cores are free
@pytest.mark.parametrize("pattern", ["AA", "MM", "MAM"])
def test_sixteen_requests_on_a_prefix_of_16k(pattern):
    shared_prefix_case(pattern, requests=16, prefix=2**14, own=7)


def shared_prefix_case(pattern: str, *, requests: int, prefix: int, own: int, alone: int = 16) -> None:
    model = tiny_model(tiny_config(pattern, 8)).eval()
    store = Store()
    prompts = prompts_of(model, requests, prefix + own, shared=prefix)
    got = blocks(model, SharedPrefix(), prompts, spans=((0, prefix),), store=store)
    reveal, whole = Threshold(confidence=0.3), prefix // 8 * 8
    greedy = Sampler(temperature=0.0)
    for row in range(0, requests, requests // alone):
        want = generate(model, [prompts[row]], max_new_tokens=20, reveal=reveal, sampler=greedy, generator=generator())
        assert got.texts[row] == want.tokens[0]
    layers = len(pattern)
    assert got.cost.shared_token_layers == whole * layers
    remainder = (prefix + own) // 8 * 8 - whole  # whole blocks of a request's own
    assert got.cost.prefill_token_layers == requests * remainder * layers
    assert blocks(model, SharedPrefix(), prompts, spans=((0, prefix),), store=store).cost.shared_token_layers == 0
    kv = 2 * 2 * 4 * 8 * pattern.count("A")  # bytes of a token
    ssm = (24 * 5 + 3 * 34) * 8 * pattern.count("M")  # of a row: state, and tail of the convolution
    room = -(-(prefix + own + 20) // 8) * 8 - whole
    assert got.cost.peak_bytes == whole * kv + requests * (room * kv + ssm)


DROPS = [DropKV(keep=0.5, protect=2), DropKV(keep=0.25, protect=2, rule="recency"), DropKV(keep=0.5, rule="random")]


@pytest.mark.parametrize("pattern", ["AA", "MAM"])
def test_eviction_keeps_everything_at_1_and_else_holds_fewer_bytes(pattern):
    model = tiny_model(tiny_config(pattern, 8)).eval()
    prompts = prompts_of(model, 2, 45)
    want = blocks(model, NoCache(), prompts)
    exact = blocks(model, DropKV(keep=1.0), prompts)
    assert exact.tokens == want.tokens
    for policy in DROPS:
        got = blocks(model, policy, prompts)
        assert got.cost.held_bytes < want.cost.held_bytes
        assert got.cost.effective["held_tokens"] == int(policy.keep * 64)  # read before the last block
    first = blocks(model, DropKV(keep=0.5, exact_first=False), prompts)
    assert first.cost.held_bytes < want.cost.held_bytes and first.tokens != want.tokens
    assert blocks(model, DropKV(keep=1.0, exact_first=False), prompts).tokens == want.tokens
    a, b = (blocks(model, DropKV(keep=0.5, rule=rule), prompts).cost for rule in ("recency", "leave-one-out"))
    assert a.held_bytes == b.held_bytes and a.decision_operations == 0 < b.decision_operations


def test_keys_that_nobody_looks_at_are_evicted_without_a_trace():
    """A prompt token whose weight is zero everywhere can go: the text stays the same."""
    model = tiny_model(tiny_config("A", 8, positions="none")).eval()
    mixer = model.layers[0].mixer
    with torch.no_grad():  # the first four of eight embedding directions decide alone what is looked at
        mixer.q_proj.weight.mul_(6.0)
    prompts = prompts_of(model, 2, 40)
    want = blocks(model, NoCache(), prompts, new_tokens=8)
    got = blocks(model, DropKV(keep=0.6, kernel=1, protect=0), prompts, new_tokens=8)
    poor = blocks(model, DropKV(keep=0.6, rule="random", protect=0), prompts, new_tokens=8)
    agree = [sum(x == y for r, s in zip(want.tokens, other.tokens) for x, y in zip(r, s)) for other in (got, poor)]
    assert agree[0] >= agree[1] and agree[0] >= 14


# -- names and odd input ---------------------------------------------------------------------------------------------


def test_policies_are_spelled_and_parsed_back():
    for text in (
        "none",
        "fast:mode=prefix:refresh=2",
        "entropy:threshold=0.25:recent=8",
        "dllm:ratio=0.5:first_layer=false",
        "polestar:clusters=4:before=-1",
        "acache:ratio=0.4:drop_rest=true",
        "bicache:layers=2:inner=dual",
        "fork",
        "drop:keep=0.25:rule=recency",
        "packet",
    ):
        assert spelled(parse_policy(text)) == text
    assert parse_policy("bicache:table=0-1,20-8") == BiCache(table=((0, 1), (20, 8)))
    assert set(POLICIES) == {
        "none",
        "fast",
        "entropy",
        "dllm",
        "polestar",
        "acache",
        "bicache",
        "packet",
        "fork",
        "drop",
    }


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("entropi", "the nearest of none, fast"),
        ("fork:keep=1", "it has none"),
        ("drop:ratio=1", "its parameters are keep, rule"),
        ("drop:keep=much", "not of type float"),
        ("acache:refresh=99999999999999999999", "at most 2,147,483,647"),
        ("drop:keep=1.5", "keep is 1.5"),
        ("drop:keep=0", "keep is 0"),
        ("drop:kernel=4", "kernel is 4; it must be odd"),
        ("drop:rule=oldest", "rule is 'oldest'"),
        ("acache:ratio=-0.1", "ratio is -0.1"),
        ("acache:drop_rest=maybe", "not of type bool"),
        ("bicache:interval=0", "interval is 0"),
        ("bicache:table=9", "percent-layers pairs"),
        ("bicache:table=20-1,5-2", "must ascend"),
        ("polestar:refreshed=9", "refreshed is 9; it must be from 0 to 8"),
        ("entropy:threshold=nan", "threshold is not a number"),
        ("packet:adapters=/nowhere/a.safetensors", "cannot be read as adapters"),
    ],
)
def test_bad_parameters_are_told_in_a_sentence(text, sentence):
    with pytest.raises(InputError) as caught:
        parse_policy(text)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_what_cannot_be_shared_is_refused_in_a_sentence():
    model = row_model()
    causal, mamba = (tiny_model(tiny_config(pattern, 8)).eval() for pattern in ("AA", "MM"))
    prompts = prompts_of(causal)
    for call, sentence in (
        (lambda: decoded(model, ACache()), "shares parts of the prompts: name them"),
        (lambda: decoded(model, ACache(), spans=((0, 10), (10, 40))), "but the prompt holds 16"),
        (lambda: decoded(model, BiCache(), spans=INFIX), "one part that starts at token 0"),
        (lambda: decoded(model, BiCache(layers=7), spans=PREFIX), "the model has 3"),
        (lambda: decoded(model, SharedPrefix(), spans=PREFIX), "no object on a bidirectional model"),
        (lambda: decoded(model, DropKV()), "no object on a bidirectional model"),
        (lambda: blocks(causal, ACache(), prompts, spans=PREFIX), "its committed prefix never drifts"),
        (lambda: blocks(causal, BiCache(), prompts, spans=PREFIX), "its committed prefix never drifts"),
        (lambda: blocks(causal, Polestar(), prompts), "its committed prefix never drifts"),
        (lambda: blocks(causal, SharedPrefix(), prompts, spans=((0, 15),)), "do not share their first 15 tokens"),
        (lambda: blocks(mamba, DropKV(), prompts), "keeps no tokens"),
        (lambda: blocks(mamba, KVPacket(), prompts, spans=PREFIX), "an SSM state of one document"),
        (lambda: blocks(causal, NoCache(), prompts, block=3), "does not divide a block of 8"),
        (lambda: blocks(causal, NoCache(), prompts, new_tokens=0), "new_tokens is 0"),
        (lambda: blocks(causal, NoCache(), [prompts[0], prompts[1][:-1]]), "needs prompts of one length"),
    ):
        with pytest.raises(InputError) as caught:
            call()
        assert sentence in str(caught.value) and "\n" not in str(caught.value)
    store = Store()
    decoded(model, ACache(), spans=PREFIX, store=store)
    with pytest.raises(InputError, match="of another model"):
        decoded(row_model(seed=1), ACache(), spans=PREFIX, store=store)
