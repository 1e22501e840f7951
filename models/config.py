"""What a denoiser is made of: the frozen configuration, its presets, counts of parameters, state bytes and FLOPs."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass

from .errors import InputError

BACKBONES = ("attention", "attention_gqa", "mamba", "hybrid", "hybrid_gqa")
POSITIONS = ("rope", "none")
ROPE_SCALINGS = ("none", "linear", "ntk", "yarn")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and options of a denoiser. Raises InputError, naming the field, for values that cannot work together."""

    pattern: str  # one letter a layer: A attention, M Mamba-2
    vocab_size: int
    d_model: int
    d_ff: int
    block_length: int = 32
    # special tokens; ids of the tokenizer
    mask_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    # attention
    n_heads: int = 8
    n_kv_heads: int = 8
    head_dim: int = 64
    qk_norm: bool = False
    positions: str = "rope"
    rope_theta: float = 10_000.0
    rope_scaling: str = "none"
    rope_factor: float = 1.0  # how many times longer than rope_trained_length the scaled positions reach
    rope_trained_length: int = 1024
    # Mamba-2
    expand: int = 2
    d_state: int = 128
    ssm_head_dim: int = 64
    d_conv: int = 4
    chunk_length: int = 32  # Q: tokens between materialized states, a multiple of block_length; a matter of speed only
    # all layers
    tie_embeddings: bool = True
    noise_level_input: bool = False  # condition noisy tokens on their noise level
    norm_eps: float = 1e-5
    init_std: float = 0.02

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "d_model", "d_ff", "block_length", "n_heads", "n_kv_heads", "head_dim")
        for name in (*sizes, "expand", "d_state", "ssm_head_dim"):
            _require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("rope_theta", "rope_trained_length", "norm_eps", "init_std"):
            _require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; it must be above 0")
        letters = set(self.pattern)
        _require(bool(letters) and letters <= set("AM"), f"pattern {self.pattern!r} may hold only the letters A and M")
        _require(
            self.n_heads % self.n_kv_heads == 0,
            f"n_heads {self.n_heads} is no multiple of n_kv_heads {self.n_kv_heads}",
        )
        _require(self.head_dim % 2 == 0, f"head_dim {self.head_dim} must be even for rotary positions")
        _require(self.positions in POSITIONS, f"positions {self.positions!r} must be one of {', '.join(POSITIONS)}")
        _require(
            self.rope_scaling in ROPE_SCALINGS,
            f"rope_scaling {self.rope_scaling!r} must be one of {', '.join(ROPE_SCALINGS)}",
        )
        _require(self.rope_factor >= 1, f"rope_factor {self.rope_factor} must be at least 1")
        _require(
            self.d_inner % self.ssm_head_dim == 0,
            f"expand * d_model = {self.d_inner} is no multiple of ssm_head_dim {self.ssm_head_dim}",
        )
        _require(self.d_conv >= 2, f"d_conv {self.d_conv} must be at least 2")
        _require(
            self.chunk_length % self.block_length == 0 and self.chunk_length > 0,
            f"chunk_length {self.chunk_length} is no multiple of block_length {self.block_length}",
        )
        special = (self.mask_token_id, self.eos_token_id, self.pad_token_id)
        _require(len(set(special)) == 3, f"mask, eos and pad token ids {special} must differ")
        _require(
            all(0 <= token < self.vocab_size for token in special),
            f"vocab_size {self.vocab_size} does not hold the special token ids {special}",
        )

    @property
    def d_inner(self) -> int:
        return self.expand * self.d_model

    @property
    def ssm_heads(self) -> int:
        return self.d_inner // self.ssm_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the Mamba convolution: x, B and C."""
        return self.d_inner + 2 * self.d_state

    def to_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> ModelConfig:
        """The inverse of to_dict; InputError for an unknown key, naming the nearest one, and for a value of another type."""
        kinds = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
        known = {field.name: kinds[str(field.type)] for field in dataclasses.fields(cls)}
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
                raise InputError(f"unknown model key {key!r}; the nearest is {near!r}")
            if not isinstance(values[key], known[key]) or (isinstance(values[key], bool) and bool not in known[key]):
                raise InputError(f"model key {key!r} is {values[key]!r}, not of type {known[key][-1].__name__}")
        return cls(**values)


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise InputError(f"model configuration: {sentence}")


_SIZES: dict[str, dict] = {
    "debug": dict(
        d_model=64, d_ff=128, layers=4, head_dim=16, d_state=16, ssm_head_dim=16, block_length=8, chunk_length=8
    ),
    "10m": dict(d_model=384, d_ff=1024, layers=4, head_dim=64, d_state=64, ssm_head_dim=64),
    "125m": dict(d_model=768, d_ff=2560, layers=12, head_dim=64, d_state=64, ssm_head_dim=64),
    "1b": dict(d_model=2048, d_ff=5632, layers=20, head_dim=128, d_state=128, ssm_head_dim=64),
    "3b": dict(d_model=2560, d_ff=10_240, layers=28, head_dim=128, d_state=128, ssm_head_dim=64),
}
_VOCAB = {"debug": 512, "10m": 8192}
PRESETS = tuple(_SIZES)


def hybrid_pattern(layers: int) -> str:
    """Evenly spread attention, about one layer in six (five among 28), never the first layer."""
    attention = max(1, round(layers * 5 / 28))
    places = {round((i + 0.5) * layers / attention) for i in range(attention)}
    return "".join("A" if i in places else "M" for i in range(layers))


def preset(name: str, backbone: str, **overrides: object) -> ModelConfig:
    """The configuration `name` (PRESETS) with `backbone` (BACKBONES); keyword overrides replace single fields."""
    for value, known in ((name, PRESETS), (backbone, BACKBONES)):
        if value not in known:
            near = difflib.get_close_matches(value, known, n=1, cutoff=0.0)[0]
            raise InputError(f"unknown preset {value!r}; the nearest of {', '.join(known)} is {near!r}")
    size = dict(_SIZES[name])
    layers = size.pop("layers")
    grouped = backbone.endswith("_gqa")
    kind = backbone.removesuffix("_gqa")
    if grouped and (size["d_model"] // size["head_dim"]) % 8:
        size["head_dim"] = min(size["head_dim"], 64)  # at 3b: 40 heads of 64, so that 8 key-value heads divide them
    heads = size["d_model"] // size["head_dim"]
    pattern = {"attention": "A" * layers, "mamba": "M" * layers, "hybrid": hybrid_pattern(layers)}[kind]
    # eight key-value heads where they divide the heads, else the largest divisor below
    kv_heads = max(k for k in range(1, 9) if heads % k == 0 and k < heads) if grouped and heads > 1 else heads
    values = dict(pattern=pattern, vocab_size=_VOCAB.get(name, 32_768), n_heads=heads, n_kv_heads=kv_heads, **size)
    return ModelConfig.from_dict(values | overrides)


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters, from sizes alone; a test compares it with the modules on the meta device."""
    d = config.d_model
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    attention = d * (q + 2 * kv) + q * d + (2 * config.head_dim if config.qk_norm else 0)
    heads, channels = config.ssm_heads, config.conv_channels
    mamba = d * (config.d_inner + channels + 2 * heads) + config.d_inner * d
    mamba += channels * (config.d_conv + 1) + 4 * heads + config.d_inner  # conv, A_log, D, two dt_bias, gated norm
    mlp = 3 * d * config.d_ff + 2 * d  # with the two norms of a layer
    mixers = {"A": attention, "M": mamba}
    embeddings = config.vocab_size * d * (1 if config.tie_embeddings else 2)
    level = NOISE_FEATURES * d if config.noise_level_input else 0
    return sum(mixers[letter] + mlp for letter in config.pattern) + embeddings + d + level


NOISE_FEATURES = 64


def linear_flops_per_token(config: ModelConfig) -> int:
    """Forward FLOPs of all linear layers of the stack for one token, without the head (2 per multiply-add)."""
    d, q, kv = config.d_model, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    attention = d * (2 * q + 2 * kv)
    mamba = d * (config.d_inner + config.conv_channels + 2 * config.ssm_heads) + config.d_inner * d
    mixers = {"A": attention, "M": mamba}
    return sum(2 * (mixers[letter] + 3 * d * config.d_ff) for letter in config.pattern)


def head_flops_per_token(config: ModelConfig) -> int:
    """Forward FLOPs of the output head for one token."""
    return 2 * config.d_model * config.vocab_size


def attention_flops_per_pair(config: ModelConfig) -> int:
    """Forward FLOPs of QK^T and PV, summed over the attention layers, for one visible (query, key) pair."""
    return 4 * config.n_heads * config.head_dim * config.pattern.count("A")


def ssd_flops_per_token(config: ModelConfig) -> int:
    """Forward FLOPs of the SSD products for one token, summed over the Mamba layers, at Q = G.

    In-block scores and their product with x, the update of the state and the read from it.
    """
    per_layer = 2 * config.block_length * (config.d_state + config.d_inner) + 4 * config.d_state * config.d_inner
    return per_layer * config.pattern.count("M")


def pass_flops(config: ModelConfig, *, clean_tokens: int, noisy_tokens: int, pairs: int, logits: int) -> int:
    """Forward FLOPs of one pass: `pairs` visible attention pairs per layer, `logits` rows of the head.

    Every layer counts in full, though of the last layer's clean stream only what feeds the state is run: at most 1/(2L)
    of the whole less.
    """
    tokens = clean_tokens + noisy_tokens
    return (
        tokens * (linear_flops_per_token(config) + ssd_flops_per_token(config))
        + pairs * attention_flops_per_pair(config)
        + logits * head_flops_per_token(config)
    )


def visible_pairs(config: ModelConfig, *, clean_blocks: int, frontiers: list[int], prefix_tokens: int = 0) -> int:
    """Visible (query, key) pairs of one row without document borders.

    A clean block `b` sees `b + 1` blocks, a frontier `f` sees `f` clean blocks and itself; both see the prefix.
    """
    g = config.block_length
    clean = sum(b + 1 for b in range(clean_blocks)) * g * g + clean_blocks * g * prefix_tokens
    noisy = sum(f + 1 for f in frontiers) * g * g + len(frontiers) * g * prefix_tokens
    return clean + noisy


def state_bytes(config: ModelConfig, *, batch: int, length: int, itemsize: int) -> int:
    """Bytes of a decoding state with room for `length` tokens; SSM states are float32 or wider."""
    kv = 2 * length * config.n_kv_heads * config.head_dim * itemsize
    ssm = config.d_inner * config.d_state * max(itemsize, 4) + (config.d_conv - 1) * config.conv_channels * itemsize
    return batch * (kv * config.pattern.count("A") + ssm * config.pattern.count("M"))
