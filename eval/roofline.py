"""The least time a denoising step can take on given hardware: its bytes over the bandwidth, its FLOPs over the peak.

    bytes = P w + b [ 2 n L_a H_kv P_a w_kv + L_m (d_i N w_s + (d_i + 2 N)(k - 1) w_c) ]
    FLOPs = b [ 2 P G + 4 L_a H_q P_a G (n + G) + 6 L_m d_i N G ]
    time >= max(bytes / bandwidth, FLOPs / peak)

P parameters that a pass reads, w their bytes each, b rows, n tokens of context, L_a and L_m attention and Mamba layers, H
heads, P_a their size, d_i inner width, N state size, k taps of the convolution, G tokens of a block. Left out: activations,
and a Mamba layer's products inside the block.
"""

from __future__ import annotations

from dataclasses import dataclass

from mezzotint.models.config import ModelConfig, parameter_count


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the formulas need of a model, with the bytes of one weight, key or value, SSM state and convolution input."""

    parameters: int
    block_length: int
    attention_layers: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    mamba_layers: int = 0
    d_inner: int = 0
    d_state: int = 0
    d_conv: int = 4
    weight_bytes: int = 2
    cache_bytes: int = 2
    state_bytes: int = 4

    @property
    def cache_per_token(self) -> int:
        """Bytes of keys and values of one token."""
        return 2 * self.attention_layers * self.kv_heads * self.head_dim * self.cache_bytes

    @property
    def fixed_state(self) -> int:
        """Bytes of the state of the Mamba layers, whatever the context."""
        conv = (self.d_inner + 2 * self.d_state) * (self.d_conv - 1) * self.cache_bytes
        return self.mamba_layers * (self.d_inner * self.d_state * self.state_bytes + conv)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Peak rates as `source` states them, and the bytes that a process can use."""

    name: str
    read_bytes_per_s: float
    flops_per_s: float
    usable_bytes: float
    source: str


H100 = Hardware(
    name="H100",
    read_bytes_per_s=3.35e12,
    flops_per_s=989.4e12,
    usable_bytes=85.5e9,
    source="NVIDIA H100 Tensor Core GPU data sheet, SXM5 80 GB: 3.35 TB/s, 989.4 TFLOP/s dense bfloat16",
)
H200 = Hardware(
    name="H200",
    read_bytes_per_s=4.8e12,
    flops_per_s=989.4e12,
    usable_bytes=149e9,
    source="NVIDIA H200 Tensor Core GPU data sheet, SXM 141 GB: 4.8 TB/s, 989.4 TFLOP/s dense bfloat16",
)
CARDS = (H100, H200)


def sizes_of(config: ModelConfig, *, itemsize: int) -> Sizes:
    """The sizes of a model in a dtype of `itemsize` bytes. An embedding that is not the head is read at a few rows only."""
    unread = 0 if config.tie_embeddings else config.vocab_size * config.d_model
    return Sizes(
        parameters=parameter_count(config) - unread,
        block_length=config.block_length,
        attention_layers=config.pattern.count("A"),
        heads=config.n_heads,
        kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        mamba_layers=config.pattern.count("M"),
        d_inner=config.d_inner,
        d_state=config.d_state,
        d_conv=config.d_conv,
        weight_bytes=itemsize,
        cache_bytes=itemsize,
        state_bytes=max(itemsize, 4),
    )


def resident_bytes(sizes: Sizes, *, context: int, batch: int = 1) -> int:
    """Weights and state: what a step reads, and the least that must be held."""
    return sizes.parameters * sizes.weight_bytes + batch * (context * sizes.cache_per_token + sizes.fixed_state)


def step_flops(sizes: Sizes, *, context: int, batch: int = 1) -> int:
    """FLOPs of one denoising step of `batch` rows, 2 for a multiply-add."""
    g = sizes.block_length
    attention = 4 * sizes.attention_layers * sizes.heads * sizes.head_dim * g * (context + g)
    mamba = 6 * sizes.mamba_layers * sizes.d_inner * sizes.d_state * g
    return batch * (2 * sizes.parameters * g + attention + mamba)


def step_seconds(sizes: Sizes, hardware: Hardware, *, context: int, batch: int = 1) -> float:
    """The least time of one denoising step."""
    reading = resident_bytes(sizes, context=context, batch=batch) / hardware.read_bytes_per_s
    return max(reading, step_flops(sizes, context=context, batch=batch) / hardware.flops_per_s)


def largest_batch(sizes: Sizes, hardware: Hardware, *, context: int) -> int:
    """Rows whose states fit beside the weights, 0 where not one does."""
    free = hardware.usable_bytes - sizes.parameters * sizes.weight_bytes
    return max(0, int(free // (context * sizes.cache_per_token + sizes.fixed_state)))


def most_tokens_per_second(sizes: Sizes, hardware: Hardware, *, context: int, batch: int, steps: int) -> float:
    """Tokens a second of `batch` rows at `steps` denoising steps a block, commits free."""
    return batch * sizes.block_length / (steps * step_seconds(sizes, hardware, context=context, batch=batch))


def card_floors(config: ModelConfig, *, context: int, batch: int, itemsize: int) -> dict[str, float | bool]:
    """What a results row keeps: `floor_h100_s` and whether weights and state fit there, for every card of CARDS."""
    sizes, found = sizes_of(config, itemsize=itemsize), {}
    for card in CARDS:
        name = f"floor_{card.name.lower()}"
        found[f"{name}_s"] = step_seconds(sizes, card, context=context, batch=batch)
        found[f"{name}_fits"] = resident_bytes(sizes, context=context, batch=batch) <= card.usable_bytes
    return found
