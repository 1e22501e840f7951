"""Cache policies: the uncached decode against the model itself, parity where a policy is exact, and what is counted."""

from __future__ import annotations

import pytest
import torch
from support import assert_close, generator, ordinary, tiny_config, tiny_model

from mezzotint.eval.bound import Draws, document_bound
from mezzotint.models.decode import generate
from mezzotint.models.errors import InputError
from mezzotint.models.policies.bidirectional import decode_canvas, make_canvas, new_canvas
from mezzotint.models.policies.canvas import Canvas
from mezzotint.models.policies.causal import decode_blocks
from mezzotint.models.policies.cost import Cost
from mezzotint.models.policies.dllm_cache import DLLMCache
from mezzotint.models.policies.entropy_cache import EntropyCache
from mezzotint.models.policies.fast_dllm import FastDLLM
from mezzotint.models.policies.interface import Plan, Policy, Sight
from mezzotint.models.policies.memory import Pick, held_bytes
from mezzotint.models.policies.none import NoCache
from mezzotint.models.policies.step import make_frame, run_step
from mezzotint.models.reveal import EntropyBound, Factor, Proposal, Sampler, Threshold, TopK, parse_reveal

ROW = 32  # the block of a bidirectional model: its whole row
EXACT = [
    EntropyCache(threshold=-1.0),
    DLLMCache(prompt_interval=1, response_interval=1),
    FastDLLM(mode="prefix", refresh=1),
    FastDLLM(mode="dual", refresh=1),
]
CACHING = [
    EntropyCache(threshold=10.0, recent=4),
    EntropyCache(threshold=2.9, recent=4, masks="block"),
    DLLMCache(prompt_interval=8, response_interval=3),
    FastDLLM(mode="prefix"),
    FastDLLM(mode="dual"),
    FastDLLM(mode="dual", refresh=3),
]


def row_model(pattern: str = "AAA", **overrides):
    return tiny_model(tiny_config(pattern, ROW, **overrides)).eval()


def prompts_of(model, rows: int = 3, length: int = 10) -> list[list[int]]:
    return ordinary(model.config, (rows, length), generator(7)).tolist()


def decoded(model, policy, prompts=None, **changed):
    asked = {"new_tokens": ROW - 10, "block": 8, "reveal": Threshold(confidence=0.3)} | changed
    return decode_canvas(model, prompts or prompts_of(model), policy=policy, **asked)


def by_hand(model, prompt: list[int], *, new: int, block: int, reveal) -> list[int]:
    """Greedy decoding of one row, every step a training pass of the model over its whole row."""
    mask = model.config.mask_token_id
    tokens = torch.tensor([prompt + [mask] * new])
    for low in range(len(prompt), len(prompt) + new, block):
        here = slice(low, low + block)
        step = torch.zeros(1, dtype=torch.long)
        while bool((masked := tokens[:, here] == mask).any()):
            logits = model(tokens[:, :0], tokens[:, None], torch.zeros(1, 1, dtype=torch.long))[:, 0, here]
            proposal = Sampler(temperature=0.0)(logits, generator())
            chosen, step = reveal(proposal, masked=masked, step=step, generator=generator())
            tokens[:, here] = torch.where(chosen & masked, proposal.tokens, tokens[:, here])
    return tokens[0, len(prompt) :].tolist()


RULES = [TopK(steps=3), Threshold(confidence=0.3), Factor(factor=1.0), EntropyBound(bound=3.0)]


@pytest.mark.parametrize("reveal", RULES, ids=str)
def test_the_uncached_decode_is_the_models_own_pass_over_its_row(reveal):
    model = row_model(noise_level_input=True, qk_norm=True)
    prompts = prompts_of(model)
    got = decoded(model, NoCache(), prompts, reveal=reveal)
    with torch.no_grad():
        want = [by_hand(model, prompt, new=ROW - 10, block=8, reveal=reveal) for prompt in prompts]
    assert got.tokens == want
    assert got.cost.share == 1 and got.cost.token_layers == got.cost.full_token_layers


@pytest.mark.parametrize("positions", ["rope", "none"])
def test_a_step_gives_the_models_logits(positions):
    model = row_model(positions=positions, noise_level_input=True)
    tokens = torch.tensor(prompts_of(model))
    canvas = make_canvas(model, tokens, new_canvas(model, len(tokens), ROW - 10, None), block=ROW - 10)
    hidden, _ = run_step(*step_of(model, canvas, NoCache()), None)
    want = model(tokens[:, :0], canvas.tokens[:, None], torch.zeros(3, 1, dtype=torch.long))[:, 0, 10:]
    assert_close(model.logits(hidden), want)


def step_of(model, canvas: Canvas, policy: Policy):
    rows = len(canvas.tokens)
    zeros = torch.zeros(rows, dtype=torch.long)
    masked = canvas.tokens == model.config.mask_token_id
    block = slice(canvas.start, canvas.start + canvas.block)
    sight = Sight(masked, masked[:, block].any(dim=1), block, canvas.response, zeros, zeros, 0, 3)
    frame = make_frame(model, canvas, policy, Cost(layers=3))
    return frame, canvas.tokens, sight, Plan(sight.everything())


def test_row_models_are_scored_and_continued_by_the_ordinary_commands():
    model = row_model()
    text = ordinary(model.config, (ROW,), generator(3))
    assert 0 < document_bound(model, text, draws=Draws(per_block=8), key="text") < 1e4
    got = generate(model, prompts_of(model), max_new_tokens=12, reveal=TopK(steps=3), generator=generator())
    assert all(len(row) <= 12 for row in got.tokens)


@pytest.mark.parametrize("policy", EXACT, ids=str)
def test_a_policy_at_its_exact_setting_writes_what_no_cache_writes(policy):
    model = row_model(noise_level_input=True)
    want, got = decoded(model, NoCache()), decoded(model, policy)
    assert got.tokens == want.tokens
    assert got.cost.token_layers == want.cost.token_layers and got.cost.passes == want.cost.passes


@pytest.mark.parametrize("policy", CACHING, ids=str)
def test_a_policy_otherwise_recomputes_less_and_rows_decode_as_alone(policy):
    model = row_model()
    prompts = prompts_of(model)
    got = decoded(model, policy, prompts)
    assert got.cost.share < 0.9 and got.cost.peak_bytes > 0
    apart = [decoded(model, policy, [prompt]) for prompt in prompts]
    assert got.tokens == [one.tokens[0] for one in apart]
    assert got.cost.token_layers == sum(one.cost.token_layers for one in apart)
    assert all(model.config.mask_token_id not in row for row in got.tokens)


def test_cached_keys_change_what_is_written():
    model = row_model()
    assert decoded(model, FastDLLM(mode="dual")).tokens != decoded(model, NoCache()).tokens


@pytest.mark.parametrize("pattern", ["A", "M", "MAM", "AA"])
def test_the_block_causal_harness_writes_what_generate_writes(pattern):
    model = tiny_model(tiny_config(pattern, 8, noise_level_input=pattern == "AA")).eval()
    reveal = Threshold(confidence=0.3)
    for length in (0, 5, 19):
        prompts = ordinary(model.config, (3, length), generator(5)).tolist()
        got = decode_blocks(model, prompts, policy=NoCache(), new_tokens=20, reveal=reveal)
        want = generate(
            model, prompts, max_new_tokens=20, reveal=reveal, sampler=Sampler(temperature=0.0), generator=generator()
        )
        assert got.texts == want.tokens
        assert all(len(row) == 20 for row in got.tokens)


def test_tokens_that_stand_in_the_answer_stay_and_are_seen():
    model, causal = row_model(), tiny_model(tiny_config("MA", 8)).eval()
    prompts = prompts_of(model)
    standing = [[5 if i % 3 == 0 else 0 for i in range(22)] for _ in prompts]
    reveal = TopK(steps=2)
    for got, plain in (
        (
            decoded(model, NoCache(), prompts, standing=standing, reveal=reveal),
            decoded(model, NoCache(), reveal=reveal),
        ),
        [
            decode_blocks(causal, prompts, policy=NoCache(), new_tokens=22, reveal=reveal, standing=s)
            for s in (standing, None)
        ],
    ):
        assert all(row[i] == 5 for row in got.tokens for i in range(0, 22, 3))
        assert 0 not in [token for row in got.tokens for token in row] and got.tokens != plain.tokens
    with pytest.raises(InputError, match="3 rows of 22 tokens"):
        decoded(model, NoCache(), prompts, standing=standing[:2])


def test_sub_blocks_of_a_block_are_cached_and_exact_when_refreshed():
    model = tiny_model(tiny_config("AAA", 8)).eval()
    prompts = ordinary(model.config, (3, 19), generator(5)).tolist()
    asked = {"new_tokens": 24, "reveal": TopK(steps=2), "block": 2}
    want = decode_blocks(model, prompts, policy=NoCache(), **asked)
    assert decode_blocks(model, prompts, policy=FastDLLM(refresh=1), **asked).tokens == want.tokens
    assert decode_blocks(model, prompts, policy=FastDLLM(), **asked).cost.share < 0.9


# -- parts -----------------------------------------------------------------------------------------------------------


def test_picks_of_runs_and_of_lists_read_and_write_the_same():
    g = generator(2)
    masks = [torch.rand(3, 9, generator=g) < 0.4, torch.ones(3, 9) > 0, (torch.arange(9) // 3 == 1).expand(3, -1)]
    masks.append(torch.tensor([[True] * 9, [False] * 9, [False, True] * 4 + [True]]))
    for chosen in masks:
        values = torch.rand(3, 10, 2, generator=g)
        pick = Pick.of(chosen)
        taken = pick.take(values)
        for row in range(3):
            assert torch.equal(taken[row, : int(pick.counts[row])], values[row, :9][chosen[row]])
        out = torch.full_like(values, -1.0)
        pick.put(out, taken)
        assert torch.equal(out[:, :9], torch.where(chosen[..., None], values[:, :9], -1.0))
        assert pick.total == int(chosen.sum())


def test_held_bytes_count_each_storage_once():
    whole = torch.zeros(4, 8, dtype=torch.float64)
    other = torch.zeros(2)
    assert held_bytes([whole, whole[:2], whole.expand(3, 4, 8)], (other, {"a": other})) == 4 * 8 * 8 + 2 * 4


def test_factor_against_its_formula_written_out():
    g = generator(4)
    for factor in (0.0, 0.5, 1.0, 1.5):
        confidence = torch.rand(20, 8, generator=g, dtype=torch.float64)
        masked = torch.rand(20, 8, generator=g) < 0.7
        proposal = Proposal(torch.zeros(20, 8).long(), confidence, confidence.double)
        got, _ = Factor(factor=factor)(proposal, masked=masked, step=torch.zeros(20).long(), generator=g)
        for row in range(20):
            own = sorted((float(c) for c, m in zip(confidence[row], masked[row]) if m), reverse=True)
            n = max(
                [n for n in range(1, len(own) + 1) if (n + 1) * (1 - own[n - 1]) < factor], default=min(1, len(own))
            )
            assert sorted(confidence[row][got[row]].tolist(), reverse=True) == own[:n]
    assert parse_reveal("factor=1.5") == Factor(factor=1.5)


# -- odd input -------------------------------------------------------------------------------------------------------


def test_what_cannot_be_decoded_is_refused_in_a_sentence():
    model, prompts = row_model(), [[3, 4, 5], [3, 4]]
    for call, sentence in (
        (lambda: decoded(model, NoCache(), prompts), "prompt 0 has 3 tokens, prompt 1 has 2"),
        (lambda: decoded(model, NoCache(), new_tokens=4), "fewer than a block of 8"),
        (lambda: decoded(model, NoCache(), block=0), "block is 0"),
        (lambda: decoded(model, NoCache(), spans=((4, 30),)), "but the prompt holds 10"),
        (lambda: decoded(model, NoCache(), spans=((4, 8), (6, 9))), "starts at token 6, before part 0 ends"),
        (lambda: decoded(model, NoCache(), spans=((4, 4),)), "at least one token"),
        (lambda: decoded(model, FastDLLM(), spans=((0, 4),)), "shares no parts"),
        (lambda: decoded(model, NoCache(), [[3, 0]]), "<mask>"),
        (lambda: decoded(tiny_model(tiny_config("AM", ROW)), NoCache()), "has Mamba layers"),
        (lambda: EntropyCache(recent=-1), "recent is -1"),
        (lambda: EntropyCache(masks="all"), "masks is 'all'"),
        (lambda: DLLMCache(ratio=1.5), "ratio is 1.5"),
        (lambda: DLLMCache(prompt_interval=0), "prompt_interval is 0"),
        (lambda: FastDLLM(mode="suffix"), "mode is 'suffix'"),
        (lambda: FastDLLM(refresh=-2), "refresh is -2"),
        (lambda: Factor(factor=-1.0), "factor is -1.0"),
    ):
        with pytest.raises(InputError) as caught:
            call()
        assert sentence in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("policy", "pattern", "sentence"),
    [
        (EntropyCache(), "AA", "its committed prefix never drifts"),
        (DLLMCache(), "AA", "its committed prefix never drifts"),
        (FastDLLM(mode="prefix"), "AA", "its prefix is exact already"),
        (FastDLLM(), "MAM", "a Mamba layer reads a block as one run"),
    ],
    ids=str,
)
def test_a_policy_without_an_object_on_a_block_causal_model_says_so(policy, pattern, sentence):
    model = tiny_model(tiny_config(pattern, 8))
    with pytest.raises(InputError, match=sentence):
        decode_blocks(model, [[3, 4, 5]], policy=policy, new_tokens=8, reveal=TopK(steps=2))
