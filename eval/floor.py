"""The floor: what a step costs if only its matrix products ran, and a decoding step also read its state once.

Floor = the linear layers plus QK^T and PV over visible tiles, as bare products at the same shapes, dtype and threads,
plus, for a decoding step, state bytes over the measured read bandwidth. Norms, activations, softmax, convolutions,
the embedding, every copy and cast, and all of SSD (its own products included) are left out: they are what an
implementation can hide or fuse. Projections that share an input are one product (q with k and v; gate with up).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from mezzotint.eval.products import Linear, Tiles, forward_products, training_products
from mezzotint.models.config import ModelConfig, state_bytes

TILE_KEYS = 512  # keys of one product of a decoding step: its operands stay in the cache


def linear_layers(config: ModelConfig, *, rows: int, logits: int) -> list[Linear]:
    """The linear layers of one pass over `rows` tokens, the head at `logits` rows."""
    d, q, kv = config.d_model, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    a, m, layers = config.pattern.count("A"), config.pattern.count("M"), len(config.pattern)
    mamba_in = config.d_inner + config.conv_channels + 2 * config.ssm_heads
    products = [
        Linear(rows, d, q + 2 * kv, a),
        Linear(rows, q, d, a),
        Linear(rows, d, mamba_in, m),
        Linear(rows, config.d_inner, d, m),
        Linear(rows, d, 2 * config.d_ff, layers),
        Linear(rows, config.d_ff, d, layers),
        Linear(logits, d, config.vocab_size),
    ]
    return [product for product in products if product.count and product.rows]


def decode_tiles(config: ModelConfig, *, batch: int, rows: int, context: int) -> list[Tiles]:
    """The tiles of a pass of `rows` tokens a batch row: all see the context and each other, TILE_KEYS keys at a time.

    Query heads that share a key head are one product. Products of the same shape run on the same operands, which stay
    in the cache: reading the state from memory is counted by its bytes, once.
    """
    heads, queries = batch * config.n_kv_heads, rows * (config.n_heads // config.n_kv_heads)
    whole, rest = divmod(context + rows, TILE_KEYS)
    layers = config.pattern.count("A")
    sizes = [(TILE_KEYS, whole * layers), (rest, layers)]
    return [Tiles(heads, queries, keys, config.head_dim, count) for keys, count in sizes if keys and count]


def training_tiles(config: ModelConfig, *, batch: int, blocks: int) -> list[Tiles]:
    """The tiles of two streams with all frontiers: clean and noisy block `b` each see `b + 1` blocks.

    The last clean block is cut off: no frontier sees it.
    """
    g, groups, a = config.block_length, config.n_heads // config.n_kv_heads, config.pattern.count("A")
    heads, streams = batch * config.n_kv_heads, [2] * (blocks - 1) + [1]
    return [Tiles(heads, s * g * groups, (b + 1) * g, config.head_dim, a) for b, s in enumerate(streams) if a]


def decode_floor(
    config: ModelConfig,
    *,
    batch: int,
    context: int,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    passes: int = 1,
) -> Callable[[], None]:
    """The products of a denoising step at `context` tokens (`passes` 2: of an advance, G clean and G noisy tokens).

    The head runs at the noisy rows. The state's bytes over the bandwidth come on top (state_read_seconds).
    """
    rows = batch * config.block_length
    linears = linear_layers(config, rows=passes * rows, logits=rows)
    tiles = decode_tiles(config, batch=batch, rows=passes * config.block_length, context=context)
    return forward_products(linears, tiles, dtype=dtype, device=device)


def prefill_floor(
    config: ModelConfig, *, tokens: int, dtype: torch.dtype, device: str | torch.device = "cpu"
) -> Callable[[], None]:
    """The products of reading one row of `tokens`: block `b` sees `b + 1` blocks. No head.

    The last layer counts in full, though only what feeds the state is needed of it.
    """
    g, groups, a = config.block_length, config.n_heads // config.n_kv_heads, config.pattern.count("A")
    tiles = [Tiles(config.n_kv_heads, g * groups, (b + 1) * g, config.head_dim, a) for b in range(tokens // g) if a]
    return forward_products(linear_layers(config, rows=tokens, logits=0), tiles, dtype=dtype, device=device)


def training_floor(
    config: ModelConfig,
    *,
    batch: int,
    row_length: int,
    masked: int,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
) -> Callable[[], None]:
    """The products of forward and backward of `batch` rows, two streams, all frontiers, head at `masked` rows only.

    The clean stream is cut at the last frontier. Both streams count in every layer, also in the last one, where a
    model need not finish the clean stream.
    """
    linears = linear_layers(config, rows=batch * (2 * row_length - config.block_length), logits=masked)
    tiles = training_tiles(config, batch=batch, blocks=row_length // config.block_length)
    return training_products(linears, tiles, dtype=dtype, device=device)


def state_read_seconds(config: ModelConfig, *, batch: int, context: int, itemsize: int, bandwidth: float) -> float:
    """Seconds to read the state of `context` tokens once, at `bandwidth` bytes a second."""
    return state_bytes(config, batch=batch, length=context, itemsize=itemsize) / bandwidth


def read_bandwidth(device: str | torch.device = "cpu", *, size: int = 2**30, repeats: int = 5) -> float:
    """Bytes a second of reading `size` bytes once (a sum), the fastest of `repeats`: at the current threads."""
    from mezzotint.eval.timing import synchronize

    data = torch.ones(size // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(repeats + 1):
        started = time.perf_counter()
        data.sum()
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    return size / best
