"""The denoiser: embedding, layers of mixer and MLP, head, and the one pass behind training, prefill and decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from .attention import Attention, AttentionPlan, plan_attention
from .config import NOISE_FEATURES, ModelConfig
from .errors import InputError
from .initialise import Undrawn, initialise
from .layers import RMSNorm, SwiGLU, noise_level_features
from .layout import Layout, make_layout
from .mamba2 import Mamba2
from .ops.linear import linear
from .state import LayerState, SSMState, State


class Layer(nn.Module):
    """Pre-norm residual layer: h += mixer(norm(h)); h += mlp(norm(h)).

    h (B, T + K*G, D), clean tokens first; the output holds noisy tokens alone where the layout wants no others.
    """

    def __init__(self, config: ModelConfig, letter: str) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mixer = Attention(config) if letter == "A" else Mamba2(config)
        self.mlp_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = SwiGLU(config.d_model, config.d_ff)

    def forward(
        self, h: Tensor, layout: Layout, attention: AttentionPlan | None, state: LayerState | None
    ) -> tuple[Tensor, LayerState | None]:
        plan = attention if isinstance(self.mixer, Attention) else layout
        y, state = self.mixer(self.mixer_norm(h), plan, state)
        h = layout.outputs(h) + y
        return h + self.mlp(self.mlp_norm(h)), state


LayerRun = Callable[[Layer, Tensor, Layout, AttentionPlan | None, LayerState | None], tuple[Tensor, LayerState | None]]


def run_layer(
    layer: Layer, h: Tensor, layout: Layout, attention: AttentionPlan | None, state: LayerState | None
) -> tuple[Tensor, LayerState | None]:
    """The plain way to run a layer; training may pass another that computes the same and keeps less."""
    return layer(h, layout, attention, state)


def in_place(run: LayerRun) -> LayerRun:
    """`run`, with SSM states written over those they follow: of new ones only one layer's exist at a time.

    For a caller that owns the state: the old value is consumed, as that of attention layers always is.
    """

    def call(
        layer: Layer, h: Tensor, layout: Layout, attention: AttentionPlan | None, state: LayerState | None
    ) -> tuple[Tensor, LayerState | None]:
        h, after = run(layer, h, layout, attention, state)
        if isinstance(state, SSMState) and isinstance(after, SSMState) and after.ssm is not state.ssm:
            state.ssm.copy_(after.ssm)
            state.conv.copy_(after.conv)
        return h, after if state is None else state

    return call


class Denoiser(nn.Module):
    """A block-diffusion denoiser with any pattern of attention and Mamba-2 layers.

    `forward` (training), `denoise`, `commit` and `advance` are the same pass: a run of clean tokens, possibly none, that
    advances the state, beside noisy blocks, possibly none, that each read it at their own frontier.
    """

    def __init__(self, config: ModelConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        with Undrawn():
            self.embed = nn.Embedding(config.vocab_size, config.d_model)
            self.layers = nn.ModuleList(Layer(config, letter) for letter in config.pattern)
            self.norm = RMSNorm(config.d_model, config.norm_eps)
            if not config.tie_embeddings:
                self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
            if config.noise_level_input:
                self.level_proj = nn.Linear(NOISE_FEATURES, config.d_model, bias=False)
        if not self.embed.weight.is_meta:
            initialise(self, config, generator)

    # -- training ------------------------------------------------------------------------------------------------

    def forward(
        self,
        clean: Tensor,
        noisy: Tensor,
        frontiers: Tensor,
        documents: Tensor | None = None,
        rows: Tensor | None = None,
        levels: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, K, G, V) of the noisy blocks, or (rows.sum(), V) at the True positions of `rows` (B, K, G).

        clean (B, T) and noisy (B, K, G) are token ids, T a multiple of G. frontiers (B, K) on the CPU: noisy block k sees
        the clean blocks before frontiers[:, k] of its own document. documents (B, T'): the document id of each token, T'
        covering the largest frontier; None is one document. levels (B, K): noise levels, if the model takes them.
        """
        hidden = self.hidden(clean, noisy, frontiers, documents, levels)
        return self.logits(hidden if rows is None else hidden[rows])

    def hidden(
        self,
        clean: Tensor,
        noisy: Tensor,
        frontiers: Tensor,
        documents: Tensor | None = None,
        levels: Tensor | None = None,
        run: LayerRun = run_layer,
    ) -> Tensor:
        """Final hidden states (B, K, G, D) of the noisy blocks, before norm and head; arguments as in `forward`.

        run: how each layer is called (activation checkpointing, compilation).
        """
        layout = make_layout(
            block_length=self.config.block_length,
            clean_tokens=clean.shape[1],
            frontiers=frontiers.cpu(),
            documents=documents,
        )
        return self._pass(clean, noisy, layout, None, levels, run)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., V); -inf at the mask token, which is never predicted (SUBS), and at the pad token."""
        weight = self.embed.weight if self.config.tie_embeddings else self.head.weight
        logits = linear(self.norm(hidden), weight)
        for never in (self.config.mask_token_id, self.config.pad_token_id):
            # in place and unseen by autograd: no copy of the logits or of their gradient, which a softmax makes 0 there
            logits.detach()[..., never] = -torch.inf
        return logits

    # -- decoding ------------------------------------------------------------------------------------------------

    def start(
        self,
        batch: int,
        max_length: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> State:
        """An empty state with room for `max_length` tokens a row, rounded up to whole blocks."""
        size = self.config.block_length
        max_length = -(-max_length // size) * size
        dtype = self.embed.weight.dtype if dtype is None else dtype
        device = self.embed.weight.device if device is None else torch.device(device)
        layers = tuple(layer.mixer.start(batch, max_length, dtype, device) for layer in self._layers())
        return State(layers, torch.zeros(batch, dtype=torch.long), max_length, size)

    @torch.no_grad()
    def denoise(self, canvas: Tensor, state: State, levels: Tensor | None = None, run: LayerRun = run_layer) -> Tensor:
        """Logits (B, G, V) of the frontier block `canvas` (B, G); reads the state and leaves it bit-identical.

        run: how each layer is called (compilation).
        """
        layout = self._cached_layout(canvas[:, :0], state, None, noisy=True)
        hidden, _ = self._pass(canvas[:, :0], canvas[:, None], layout, state, levels, run)
        return self.logits(hidden[:, 0])

    @torch.no_grad()
    def commit(self, clean: Tensor, state: State, blocks: Tensor | None = None) -> State:
        """The state after `clean` (B, m*G); blocks (B,): how many of the m blocks are valid in each row, None for all."""
        layout = self._cached_layout(clean, state, blocks, noisy=False)
        _, after = self._pass(clean, clean[:, None, :0], layout, state, None)
        assert after is not None  # a pass that is given a state returns one
        return after

    @torch.no_grad()
    def advance(
        self,
        clean: Tensor,
        canvas: Tensor,
        state: State,
        blocks: Tensor | None = None,
        levels: Tensor | None = None,
        run: LayerRun = run_layer,
    ) -> tuple[Tensor, State]:
        """Commit `clean` (B, m*G) and denoise `canvas` (B, G) behind it, in one pass: (logits (B, G, V), next state)."""
        layout = self._cached_layout(clean, state, blocks, noisy=True)
        hidden, after = self._pass(clean, canvas[:, None], layout, state, levels, run)
        assert after is not None  # a pass that is given a state returns one
        return self.logits(hidden[:, 0]), after

    # -- the one pass --------------------------------------------------------------------------------------------

    def _pass(
        self,
        clean: Tensor,
        noisy: Tensor,
        layout: Layout,
        state: State | None,
        levels: Tensor | None,
        run: LayerRun = run_layer,
    ) -> tuple[Tensor, State | None]:
        """Hidden states (B, K, G, D) of the noisy blocks and the state behind the clean ones."""
        h = self._embed(clean, noisy, levels)
        attention = None
        if "A" in self.config.pattern:
            autocast = torch.is_autocast_enabled(h.device.type)
            dtype = torch.get_autocast_dtype(h.device.type) if autocast else h.dtype
            attention = plan_attention(self.config, layout, cached=state is not None, device=h.device, dtype=dtype)
        layers: list[LayerState | None] = []
        for index, layer in enumerate(self._layers()):
            if index == len(self.layers) - 1:  # behind it the clean stream is of no use
                layout = replace(layout, clean_output=False)
                attention = None if attention is None else replace(attention, layout=layout)
            h, layer_state = run(layer, h, layout, attention, None if state is None else state.layers[index])
            layers.append(layer_state)
        hidden = h.unflatten(1, (layout.noisy_blocks, layout.block_length))
        if state is None:
            return hidden, None
        length = state.length + layout.reached()[:, 0] * layout.block_length
        return hidden, State(cast(tuple[LayerState, ...], tuple(layers)), length, state.max_length, state.block_length)

    def _layers(self) -> list[Layer]:
        return cast(list[Layer], list(self.layers))

    def _embed(self, clean: Tensor, noisy: Tensor, levels: Tensor | None) -> Tensor:
        """(B, T + K*G, D), clean tokens first; the noise level touches noisy tokens only, so the state stays free of it."""
        h = self.embed(torch.cat([clean, noisy.flatten(1)], dim=1))
        if not self.config.noise_level_input or noisy.numel() == 0:
            return h
        if levels is None:
            levels = (
                (noisy == self.config.mask_token_id).double().mean(-1)
            )  # the share of masks is the level's estimate
        level = self.level_proj(noise_level_features(levels, h.dtype)).repeat_interleave(noisy.shape[2], dim=1)
        return torch.cat([h[:, : clean.shape[1]], h[:, clean.shape[1] :] + level], dim=1)

    def _cached_layout(self, clean: Tensor, state: State, blocks: Tensor | None, *, noisy: bool) -> Layout:
        size = self.config.block_length
        full = torch.full((len(clean),), clean.shape[1] // size)
        valid = full if blocks is None else blocks.cpu()
        if state.batch != len(clean):
            raise InputError(f"the state holds {state.batch} rows, but {len(clean)} rows of tokens were given")
        if not bool(((valid >= 0) & (valid <= full)).all()):
            raise InputError(f"blocks {valid.tolist()} must lie between 0 and the {int(full[0])} clean blocks given")
        longest = int((state.length + valid * size).max())
        if longest > state.max_length:
            raise InputError(
                f"the state has room for {state.max_length} tokens, {longest} are needed; start a larger one"
            )
        frontiers = valid[:, None] if noisy else valid[:, None][:, :0]
        return make_layout(
            block_length=size,
            clean_tokens=clean.shape[1],
            frontiers=frontiers,
            blocks=None if blocks is None else valid,
            lengths=state.length,
        )
