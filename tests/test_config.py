"""Model configurations: parameter counts of every preset, the reference sizes, and refusals in a sentence."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support import tiny_config, tiny_model

from mezzotint.models.config import (
    BACKBONES,
    PRESETS,
    ModelConfig,
    hybrid_pattern,
    parameter_count,
    preset,
    state_bytes,
    visible_pairs,
)
from mezzotint.models.errors import InputError

every_backbone = pytest.mark.parametrize("backbone", BACKBONES)


@pytest.mark.parametrize("name", PRESETS)
@every_backbone
def test_parameter_count_is_the_modules(name: str, backbone: str):
    from mezzotint.models.denoiser import Denoiser

    config = preset(name, backbone)
    with torch.device("meta"):
        model = Denoiser(config)
    assert sum(p.numel() for p in model.parameters()) == parameter_count(config)
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize(
    "overrides", [{"tie_embeddings": False}, {"qk_norm": True}, {"noise_level_input": True}], ids=str
)
def test_parameter_count_with_options(overrides: dict):
    from mezzotint.models.denoiser import Denoiser

    config = preset("debug", "hybrid", **overrides)
    with torch.device("meta"):
        model = Denoiser(config)
    assert sum(p.numel() for p in model.parameters()) == parameter_count(config)


@pytest.mark.parametrize("backbone, billions", [("attention", 3.033), ("mamba", 3.431), ("hybrid", 3.360)])
def test_reference_sizes(backbone: str, billions: float):
    config = preset("3b", backbone)
    assert parameter_count(config) == pytest.approx(billions * 1e9, rel=0.01)
    assert (config.d_model, len(config.pattern), config.block_length) == (2560, 28, 32)


def test_reference_hybrid_has_five_attention_layers():
    assert hybrid_pattern(28).count("A") == 5
    for layers in range(2, 40):
        pattern = hybrid_pattern(layers)
        assert len(pattern) == layers and pattern[0] == "M" and "A" in pattern


def test_reference_cache_bytes():
    """DESIGN's table: 280 KiB a token for multi-head attention in bf16, 50 KiB for the hybrid, nothing for Mamba."""

    def per_token(backbone: str) -> int:
        config = preset("3b", backbone)
        return state_bytes(config, batch=1, length=2, itemsize=2) - state_bytes(config, batch=1, length=1, itemsize=2)

    assert [per_token(backbone) for backbone in ("attention", "hybrid", "mamba")] == [280 * 1024, 50 * 1024, 0]
    assert per_token("attention_gqa") < 280 * 1024 / 3
    assert per_token("hybrid_gqa") < 50 * 1024 / 3


@pytest.mark.parametrize("pattern", ["A", "M", "MA"])
@pytest.mark.parametrize("length", [4, 20])
def test_state_bytes_are_the_states(pattern: str, length: int):
    config = tiny_config(pattern)
    model = tiny_model(config)
    assert model.start(3, length).nbytes == state_bytes(config, batch=3, length=length, itemsize=8)


def test_visible_pairs_are_the_loops():
    config = tiny_config("A", 3)
    g, blocks, frontiers, prefix = 3, 4, [0, 2, 3], 6
    clean = sum(k // g <= q // g for q in range(blocks * g) for k in range(blocks * g)) + blocks * g * prefix
    noisy = sum(g * (f * g + g + prefix) for f in frontiers)
    assert visible_pairs(config, clean_blocks=blocks, frontiers=frontiers, prefix_tokens=prefix) == clean + noisy


@pytest.mark.parametrize("name", PRESETS)
@every_backbone
def test_presets_round_trip(name: str, backbone: str):
    config = preset(name, backbone)
    assert ModelConfig.from_dict(config.to_dict()) == config
    assert config.head_dim * config.n_heads == config.d_model


def test_presets_that_are_grouped_share_keys():
    for name in PRESETS:
        assert preset(name, "attention_gqa").n_kv_heads < preset(name, "attention").n_kv_heads
    assert preset("3b", "attention_gqa").n_kv_heads == preset("3b", "hybrid_gqa").n_kv_heads == 8


def test_unknown_names_say_the_nearest():
    with pytest.raises(InputError, match="unknown model key 'd_modle'; the nearest is 'd_model'"):
        ModelConfig.from_dict(tiny_config().to_dict() | {"d_modle": 8})
    with pytest.raises(InputError, match=r"'125M'.*'125m'"):
        preset("125M", "mamba")
    with pytest.raises(InputError, match=r"'mamba2'.*'mamba'"):
        preset("debug", "mamba2")
    with pytest.raises(InputError, match=r"'vocabsize'.*'vocab_size'"):
        preset("debug", "mamba", vocabsize=9)


BAD = [
    ({"pattern": "AX"}, "pattern"),
    ({"pattern": ""}, "pattern"),
    ({"n_kv_heads": 3}, "n_kv_heads"),
    ({"head_dim": 5}, "head_dim"),
    ({"d_model": 0}, "d_model"),
    ({"block_length": -4}, "block_length"),
    ({"positions": "alibi"}, "alibi"),
    ({"rope_scaling": "longer"}, "longer"),
    ({"rope_factor": 0.5}, "rope_factor"),
    ({"ssm_head_dim": 7}, "ssm_head_dim"),
    ({"ssm_head_dim": 0}, "ssm_head_dim"),
    ({"expand": 0}, "expand"),
    ({"d_conv": 1}, "d_conv"),
    ({"chunk_length": 6}, "chunk_length"),
    ({"chunk_length": 0}, "chunk_length"),
    ({"mask_token_id": 1}, "must differ"),
    ({"pad_token_id": 40}, "vocab_size"),
    ({"mask_token_id": -1}, "vocab_size"),
    ({"norm_eps": -1.0}, "norm_eps is -1.0"),
    ({"init_std": -0.1}, "init_std is -0.1"),
    ({"rope_theta": 0.0}, "rope_theta is 0.0"),
]


@pytest.mark.parametrize("overrides, named", BAD, ids=[str(o) for o, _ in BAD])
def test_bad_values_are_refused(overrides: dict, named: str):
    with pytest.raises(InputError, match=named) as caught:
        tiny_config(**overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key, value", [("d_model", "64"), ("d_ff", 64.0), ("qk_norm", 1), ("n_heads", True)])
def test_values_of_another_type_name_their_key(key: str, value: object):
    with pytest.raises(InputError, match=f"{key!r} is {value!r}, not of type"):
        ModelConfig.from_dict(tiny_config().to_dict() | {key: value})


def test_configurations_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny_config().d_model = 3  # type: ignore[misc]
