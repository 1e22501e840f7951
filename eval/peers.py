"""Other people's models of the same size, to run beside ours: transformers' Llama and Mamba2, and a dense two-stream mask.

The one file of eval that builds transformers' models. Their plain torch paths are what a user without CUDA kernels gets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from mezzotint.eval.bench_training import TrainingCase, masked_loss
from mezzotint.models.attention import Attention
from mezzotint.models.config import ModelConfig, parameter_count
from mezzotint.models.denoiser import Denoiser, Layer
from mezzotint.models.errors import InputError
from mezzotint.models.layers import rope_tables
from mezzotint.models.ops.rope import rotate

PARAMETERS = 0.02  # how far a peer's parameters may be from ours


@dataclass(frozen=True)
class Peer:
    """A causal language model of transformers and its name."""

    name: str
    model: Any  # of transformers, whose classes make no promise to a type checker

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


def llama(config: ModelConfig, *, length: int) -> Peer:
    """transformers' Llama with the sizes of our attention model; raises InputError where its parameters differ."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        intermediate_size=config.d_ff,
        num_hidden_layers=len(config.pattern),
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=length,
        tie_word_embeddings=config.tie_embeddings,
    )
    return _checked(Peer("transformers Llama", LlamaForCausalLM(sizes)), config)


def mamba2(config: ModelConfig) -> Peer:
    """transformers' Mamba2, whose layers have no MLP: as many of them as come nearest to our parameters."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    def sizes(layers: int) -> Mamba2Config:
        return Mamba2Config(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            num_heads=config.ssm_heads,
            head_dim=config.ssm_head_dim,
            state_size=config.d_state,
            expand=config.expand,
            n_groups=1,
            num_hidden_layers=layers,
            conv_kernel=config.d_conv,
            chunk_size=256,
            tie_word_embeddings=config.tie_embeddings,
        )

    def parameters(layers: int) -> int:
        with torch.device("meta"):
            return Peer("", Mamba2ForCausalLM(sizes(layers))).parameters

    one, wanted = parameters(2) - parameters(1), parameter_count(config)
    layers = max(1, round(1 + (wanted - parameters(1)) / one))
    return _checked(Peer(f"transformers Mamba2, {layers} layers", Mamba2ForCausalLM(sizes(layers))), config)


def _checked(peer: Peer, config: ModelConfig) -> Peer:
    ours = parameter_count(config)
    if abs(peer.parameters - ours) > PARAMETERS * ours:
        raise InputError(f"{peer.name} has {peer.parameters:,} parameters and ours {ours:,}; take a larger preset")
    return peer


def peer_step(peer: Peer, tokens: Tensor, *, autocast: torch.dtype) -> Callable[[], None]:
    """Forward and backward of next-token cross-entropy on tokens (B, T); gradients are dropped each time."""

    def step() -> None:
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=autocast == torch.bfloat16):
            loss = peer.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        peer.model.zero_grad(set_to_none=True)

    return step


class LlamaDecoder:
    """One token after another behind `context` tokens of random keys and values, in transformers' own growing cache."""

    def __init__(self, peer: Peer, *, context: int, dtype: torch.dtype) -> None:
        from transformers import DynamicCache

        self.model, config = peer.model.to(dtype).eval(), peer.model.config
        self.cache, self.context = DynamicCache(config=config), context
        shape = (1, config.num_key_value_heads, context, config.head_dim)
        for layer in range(config.num_hidden_layers):
            self.cache.update(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), layer)
        self.token = torch.ones(1, 1, dtype=torch.long)

    @torch.no_grad()
    def __call__(self) -> None:
        logits = self.model(input_ids=self.token, past_key_values=self.cache, use_cache=True).logits
        self.token = logits[:, -1].argmax(-1, keepdim=True)

    def cut(self) -> None:
        """Back to `context` tokens."""
        self.cache.crop(self.context - self.cache.get_seq_length())  # newer versions take what to remove alone


def dense_mask_step(model: Denoiser, case: TrainingCase, *, autocast: torch.dtype) -> Callable[[], None]:
    """The usual two-stream training step: noisy and clean tokens in one row of 2T, one attention call with a dense mask.

    The model's own weights, norms and MLPs, the same loss: only the attention is another. Forward and backward.
    """
    config = model.config
    size, blocks = config.block_length, case.noisy.shape[1]
    clean = case.clean[:, : (blocks - 1) * size]
    index = torch.cat([torch.arange(clean.shape[1]) // size, torch.arange(blocks * size) // size])
    is_clean = torch.arange(len(index)) < clean.shape[1]
    before = is_clean & (index < index[:, None])
    own = (is_clean == is_clean[:, None]) & (index == index[:, None])
    mask = (before | own).to(case.clean.device)
    positions = torch.cat([torch.arange(clean.shape[1]), torch.arange(blocks * size)])[None].to(case.clean.device)

    def step() -> None:
        with torch.autocast(case.clean.device.type, dtype=torch.bfloat16, enabled=autocast == torch.bfloat16):
            rope = rope_tables(config, positions, autocast)
            h = model.embed(torch.cat([clean, case.noisy.flatten(1)], dim=1))
            for layer in cast(list[Layer], list(model.layers)):
                h = h + _dense_attention(cast(Attention, layer.mixer), layer.mixer_norm(h), rope, mask)
                h = h + layer.mlp(layer.mlp_norm(h))
            noisy = h[:, clean.shape[1] :].unflatten(1, (blocks, size))
            loss = masked_loss(model, noisy[case.masked], case)
        loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def _dense_attention(mixer: Attention, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
    q, k, v = (
        proj(x).unflatten(-1, (-1, mixer.config.head_dim)) for proj in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    )
    if mixer.config.qk_norm:
        q, k = mixer.q_norm(q), mixer.k_norm(k)
    q, k, v = (t.transpose(1, 2) for t in (rotate(q, rope), rotate(k, rope), v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return mixer.o_proj(y.transpose(1, 2).flatten(2))
