"""The formulas of the floor on cards, against a table of known models worked out by hand beforehand."""

import pytest

from mezzotint.eval.floor import decode_tiles, linear_layers
from mezzotint.eval.products import product_flops
from mezzotint.eval.roofline import (
    H100,
    H200,
    Hardware,
    Sizes,
    card_floors,
    largest_batch,
    most_tokens_per_second,
    resident_bytes,
    sizes_of,
    step_flops,
    step_seconds,
)
from mezzotint.models.config import preset, ssd_flops_per_token, state_bytes

G, K = 16, 1024
CONTEXTS = (4 * K, 32 * K, 128 * K, 256 * K)
CPU = Hardware(name="cpu", read_bytes_per_s=19e9, flops_per_s=92e9, usable_bytes=24e9, source="measured")


def attention(parameters: float, layers: int, heads: int, kv_heads: int, head_dim: int) -> Sizes:
    return Sizes(
        parameters=int(parameters), block_length=G, attention_layers=layers, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim,
    )  # fmt: skip


MHA_32 = attention(2.7e9, 32, 32, 32, 80)
MHA_28 = attention(3.0e9, 28, 20, 20, 128)
LLAMA = attention(3.21e9, 28, 24, 8, 128)
SMOL = attention(3.08e9, 36, 16, 4, 128)
QWEN = attention(3.09e9, 36, 16, 2, 128)
MAMBA = Sizes(parameters=int(2.7e9), block_length=G, mamba_layers=64, d_inner=5120, d_state=128)
MIXED = Sizes(
    parameters=int(2.7e9), block_length=G, attention_layers=6, heads=30, kv_heads=30, head_dim=128, mamba_layers=58,
    d_inner=5120, d_state=128,
)  # fmt: skip

# model, KiB of keys and values a token, MB of fixed state, resident GB, ms on an H100, ms on an H200 (at CONTEXTS)
TABLE = [
    (MHA_32, 320, 0, (6.74, 16.1, 48.4, 91.3), (2.01, 4.82, 14.4, 27.3), (1.40, 3.36, 10.1, 19.0)),
    (MHA_28, 280, 0, (7.17, 15.4, 43.6, 81.2), (2.14, 4.60, 13.0, 24.2), (1.49, 3.21, 9.08, 16.9)),
    (LLAMA, 112, 0, (6.89, 10.2, 21.5, 36.5), (2.06, 3.04, 6.40, 10.9), (1.44, 2.12, 4.47, 7.60)),
    (SMOL, 72, 0, (6.46, 8.58, 15.8, 25.5), (1.93, 2.56, 4.72, 7.61), (1.35, 1.79, 3.30, 5.31)),
    (QWEN, 36, 0, (6.33, 7.39, 11.0, 15.8), (1.89, 2.21, 3.29, 4.73), (1.32, 1.54, 2.29, 3.30)),
    (MAMBA, 0, 170, (5.57, 5.57, 5.57, 5.57), (1.66, 1.66, 1.66, 1.66), (1.16, 1.16, 1.16, 1.16)),
    (MIXED, 90, 154, (5.97, 8.61, 17.7, 29.8), (1.78, 2.57, 5.28, 8.88), (1.24, 1.79, 3.68, 6.20)),
]


@pytest.mark.parametrize(("sizes", "per_token", "fixed", "resident", "h100", "h200"), TABLE)
def test_bytes_and_times_of_known_models(sizes, per_token, fixed, resident, h100, h200):
    assert sizes.cache_per_token == per_token * K
    assert sizes.fixed_state / 1e6 == pytest.approx(fixed, rel=0.02)
    assert [resident_bytes(sizes, context=n) / 1e9 for n in CONTEXTS] == pytest.approx(resident, rel=0.02)
    for card, wanted in ((H100, h100), (H200, h200)):
        assert [step_seconds(sizes, card, context=n) * 1e3 for n in CONTEXTS] == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [(MHA_28, (1.3, 2.7, 7.6, 14.1)), (LLAMA, (1.4, 3.1, 9.0, 16.8)), (MAMBA, (0.98, 0.98, 0.98, 0.98))],
)
def test_a_slow_processor_is_bound_by_products(sizes, wanted):
    """The table rounds to two digits, and 1.3 may stand for 1.25: hence 4%."""
    found = [step_seconds(sizes, CPU, context=n) for n in CONTEXTS]
    assert found == pytest.approx(wanted, rel=0.04)
    assert found == [step_flops(sizes, context=n) / 92e9 for n in CONTEXTS]


@pytest.mark.parametrize(
    ("sizes", "card", "batch", "tokens"),
    [(MHA_28, H100, 1, 41), (LLAMA, H100, 2, 101), (QWEN, H100, 7, 318), (MHA_28, H200, 1, 59), (QWEN, H200, 14, 475)],
)
def test_ceilings_of_the_largest_batch(sizes, card, batch, tokens):
    """The table keeps some GB for workspace, so that one row more may fit here."""
    assert largest_batch(sizes, card, context=256 * K) in (batch, batch + 1)
    found = most_tokens_per_second(sizes, card, context=256 * K, batch=batch, steps=16)
    assert found == pytest.approx(tokens, rel=0.02)


def test_many_rows_of_a_fixed_state_are_bound_by_products():
    assert most_tokens_per_second(MAMBA, H100, context=256 * K, batch=64, steps=16) == pytest.approx(10_937, rel=0.02)


@pytest.mark.parametrize("backbone", ("attention", "attention_gqa", "mamba", "hybrid", "hybrid_gqa"))
def test_sizes_of_our_own_models(backbone):
    """State bytes and FLOPs agree with those of the configuration and of the measured floor, at 256k within a percent."""
    config = preset("3b", backbone)
    sizes, context = sizes_of(config, itemsize=2), 256 * K
    state = state_bytes(config, batch=3, length=context, itemsize=2)
    assert resident_bytes(sizes, context=context, batch=3) == 2 * sizes.parameters + state
    g = config.block_length
    products = product_flops(linear_layers(config, rows=g, logits=g))
    products += product_flops(decode_tiles(config, batch=1, rows=g, context=context)) + g * ssd_flops_per_token(config)
    assert step_flops(sizes, context=context) == pytest.approx(products, rel=0.01)


def test_a_row_keeps_floors_and_what_fits():
    found = card_floors(preset("3b", "attention"), context=256 * K, batch=1, itemsize=2)
    assert found["floor_h100_s"] == pytest.approx(24.2e-3, rel=0.01) and found["floor_h100_fits"]
    assert not card_floors(preset("3b", "attention"), context=512 * K, batch=1, itemsize=2)["floor_h200_fits"]
    untied = preset("debug", "mamba", tie_embeddings=False)
    assert sizes_of(untied, itemsize=4) == sizes_of(preset("debug", "mamba"), itemsize=4)
