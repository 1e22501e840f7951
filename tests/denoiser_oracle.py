"""The whole denoiser as an independent oracle: one row at a time, one token at a time, from parameters by name."""

from __future__ import annotations

import math

import torch
from oracles import attention_row, ssd_row
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotary embedding of one head vector (P,): entry i pairs with entry i + P/2."""
    half = x.numel() // 2
    out = [torch.zeros(()) for _ in range(2 * half)]
    for i in range(half):
        angle = position * theta ** (-i / half)
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return torch.stack(out)


class RowOracle:
    """The denoiser on one row: `clean` tokens in documents, and noisy blocks at frontiers, from parameters by name."""

    def __init__(self, config, parameters: dict[str, Tensor], documents: list[int]) -> None:
        """`documents`: one id per token for at least the clean tokens and the last frontier's block."""
        self.config, self.p, self.documents = config, parameters, documents
        self.length = config.block_length

    def position(self, token: int) -> int:
        """Tokens of the same document before this one; a document is one run of equal ids."""
        first = token
        while first > 0 and self.documents[first - 1] == self.documents[token]:
            first -= 1
        return token - first

    def same(self, a: int, b: int) -> bool:
        """Whether two token places lie in one run of equal document ids."""
        lo, hi = min(a, b), max(a, b)
        return lo >= 0 and all(self.documents[t] == self.documents[lo] for t in range(lo, hi + 1))

    def logits(self, clean: Tensor, noisy: Tensor, frontiers: list[int]) -> Tensor:
        """clean (T,), noisy (K, G), frontiers K ints -> (K, G, V)."""
        embed = self.p["embed.weight"]
        h_clean, h_noisy = embed[clean], embed[noisy]
        eps = self.config.norm_eps
        for layer, letter in enumerate(self.config.pattern):
            name = f"layers.{layer}."
            norm = self.p[name + "mixer_norm.weight"]
            mixer = self.attention if letter == "A" else self.mamba
            out_clean, out_noisy = mixer(
                name + "mixer.", rms_norm(h_clean, norm, eps), rms_norm(h_noisy, norm, eps), frontiers
            )
            h_clean, h_noisy = h_clean + out_clean, h_noisy + out_noisy
            h_clean, h_noisy = self.mlp(name, h_clean), self.mlp(name, h_noisy)
        head = embed if self.config.tie_embeddings else self.p["head.weight"]
        logits = rms_norm(h_noisy, self.p["norm.weight"], eps) @ head.T
        for never in (self.config.mask_token_id, self.config.pad_token_id):
            logits = logits.index_fill(-1, torch.tensor([never]), -math.inf)
        return logits

    def mlp(self, name: str, h: Tensor) -> Tensor:
        x = rms_norm(h, self.p[name + "mlp_norm.weight"], self.config.norm_eps)
        gate = F.silu(x @ self.p[name + "mlp.gate_proj.weight"].T)
        return h + (gate * (x @ self.p[name + "mlp.up_proj.weight"].T)) @ self.p[name + "mlp.down_proj.weight"].T

    def attention(self, name: str, clean: Tensor, noisy: Tensor, frontiers: list[int]) -> tuple[Tensor, Tensor]:
        config, g = self.config, self.length
        group = config.n_heads // config.n_kv_heads

        def heads(x: Tensor, part: str, count: int, position: int) -> list[Tensor]:
            vectors = list((self.p[name + part + "_proj.weight"] @ x).reshape(count, config.head_dim))
            if config.qk_norm and part != "v":
                vectors = [rms_norm(u, self.p[name + part + "_norm.weight"], config.norm_eps) for u in vectors]
            if config.positions == "rope" and part != "v":
                vectors = [rotate(u, position, config.rope_theta) for u in vectors]
            return vectors

        def project(x: Tensor, place: int):
            at = self.position(place)
            return (
                heads(x, "q", config.n_heads, at),
                heads(x, "k", config.n_kv_heads, at),
                heads(x, "v", config.n_kv_heads, 0),
            )

        def mix(query: list[Tensor], seen: list) -> Tensor:
            out = [
                attention_row(query[n], [k[n // group] for _, k, _ in seen], [v[n // group] for _, _, v in seen])
                for n in range(config.n_heads)
            ]
            return self.p[name + "o_proj.weight"] @ torch.cat(out)

        tokens = [project(x, t) for t, x in enumerate(clean)]
        out_clean = []
        for t in range(len(tokens)):
            visible = [tokens[s] for s in range(len(tokens)) if s // g <= t // g and self.same(s, t)]
            out_clean.append(mix(tokens[t][0], visible))
        out_noisy = []
        for k, f in enumerate(frontiers):
            own = [project(noisy[k, i], f * g + i) for i in range(g)]
            out_noisy.append(torch.stack([mix(own[i][0], self.seen_from(f, i, tokens, own)) for i in range(g)]))
        return _stack_tokens(out_clean, clean), torch.stack(out_noisy) if out_noisy else torch.zeros_like(noisy)

    def seen_from(self, frontier: int, i: int, tokens: list, own: list) -> list:
        """What token i of a noisy block sees: clean tokens before the block and noisy ones of it, of its document."""
        first = frontier * self.length
        prefix = [tokens[s] for s in range(first) if self.same(s, first + i)]
        return prefix + [own[j] for j in range(self.length) if self.same(first + j, first + i)]

    def mamba(self, name: str, clean: Tensor, noisy: Tensor, frontiers: list[int]) -> tuple[Tensor, Tensor]:
        config, g = self.config, self.length
        inner, n, heads = config.d_inner, config.d_state, config.ssm_heads
        sizes = [inner, inner + 2 * n, 2 * heads]
        z_clean, u_clean, dt_clean = (clean @ self.p[name + "in_proj.weight"].T).split(sizes, dim=-1)
        z_noisy, u_noisy, dt_noisy = (noisy @ self.p[name + "in_proj.weight"].T).split(sizes, dim=-1)
        clean_blocks = clean.shape[0] // g

        def convolve(line: list[Tensor]) -> Tensor:
            weight = self.p[name + "conv1d.weight"][:, 0]
            return F.silu(
                sum((weight[:, w] * line[w] for w in range(config.d_conv)), start=self.p[name + "conv1d.bias"])
            )

        nothing = torch.zeros_like(self.p[name + "conv1d.bias"])
        taps = range(config.d_conv - 1, -1, -1)
        conv = [
            convolve([u_clean[t - w] if t - w >= 0 and self.same(t - w, t) else nothing for w in taps])
            for t in range(clean.shape[0])
        ]
        for k, f in enumerate(frontiers):
            for i in range(g):
                place = f * g + i
                line = []
                for w in taps:
                    if w <= i:
                        line.append(u_noisy[k, i - w])
                    else:
                        line.append(u_clean[place - w] if self.same(place - w, place) else nothing)
                conv.append(convolve(line))
        if not conv:
            return torch.zeros_like(clean), torch.zeros_like(noisy)
        x, B, C = torch.stack(conv).reshape(-1, g, inner + 2 * n).split([inner, n, n], dim=-1)
        x = x.reshape(*x.shape[:2], heads, config.ssm_head_dim)
        dt = torch.cat([dt_clean.reshape(-1, g, 2, heads), dt_noisy.reshape(-1, g, 2, heads)])
        dt = F.softplus(dt + self.p[name + "dt_bias"])
        last = max([clean_blocks, *(f + 1 for f in frontiers)])
        starts = [next(s for s in range(b + 1) if self.same(s * g, b * g)) for b in range(last)]
        empty = torch.zeros(n, heads, config.ssm_head_dim, dtype=x.dtype)
        A = -torch.exp(self.p[name + "A_log"])
        y, _ = ssd_row(x, dt, A, B, C, clean_blocks=clean_blocks, frontiers=frontiers, starts=starts, state=empty)
        y = (y + self.p[name + "D"][:, None] * x).reshape(-1, inner)
        z = torch.cat([z_clean, z_noisy.reshape(-1, inner)])
        out = (
            rms_norm(y * F.silu(z), self.p[name + "norm.weight"], config.norm_eps) @ self.p[name + "out_proj.weight"].T
        )
        return out[: clean.shape[0]], out[clean.shape[0] :].reshape(noisy.shape)


def _stack_tokens(tokens: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(tokens) if tokens else torch.zeros_like(like)


def denoiser_oracle(config, parameters, clean: Tensor, noisy: Tensor, frontiers: Tensor, documents=None) -> Tensor:
    """The training pass: clean (B, T), noisy (B, K, G), frontiers (B, K), documents (B, >= last block's end) or None.

    Returns logits (B, K, G, V); row r is computed from its own tokens only.
    """
    places = max(clean.shape[1], (int(frontiers.max()) + 1) * config.block_length)
    rows = []
    for r in range(clean.shape[0]):
        ids = [0] * places if documents is None else documents[r].tolist()
        rows.append(RowOracle(config, parameters, ids).logits(clean[r], noisy[r], frontiers[r].tolist()))
    return torch.stack(rows)


def autoregressive_log_likelihood(config, parameters, tokens: Tensor) -> Tensor:
    """log p(tokens) of one sequence (T,) with blocks of one token: the chain rule, each factor from its own prefix."""
    total = torch.zeros((), dtype=torch.float64)
    mask = torch.tensor([[config.mask_token_id]])
    for t in range(tokens.numel()):
        logits = RowOracle(config, parameters, [0] * (t + 1)).logits(tokens[:t], mask, [t])
        total = total + torch.log_softmax(logits[0, 0], dim=-1)[tokens[t]]
    return total
