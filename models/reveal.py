"""Which tokens to propose and which masked positions to reveal: samplers and reveal rules as small frozen callables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import InputError

TILE = 256  # tokens of a vocabulary that are looked at together


@dataclass(frozen=True)
class Proposal:
    """One token for every position of a canvas, with what the model thinks of it. All (B, G).

    Confidence and entropy (nats) are of the model's own distribution, before temperature and top-p, so that a threshold
    means the same at every temperature.
    """

    tokens: Tensor
    confidence: Tensor
    entropies: Callable[[], Tensor]  # a logarithm of every probability: made for the rules that ask

    @property
    def entropy(self) -> Tensor:
        return self.entropies()


def uniform(shape: tuple[int, ...], *, generator: torch.Generator, device: torch.device) -> Tensor:
    """Uniform float64 noise in [0, 1), drawn on the generator's device: a CPU generator is the same on any device."""
    return torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device).to(device)


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Draws a token per position: greedy at temperature 0, else from softmax(logits / temperature) cut to its nucleus.

    top_p keeps the most likely tokens until their mass reaches it (Holtzman et al. 2020, arXiv 1904.09751). Drawing
    inverts the cumulative distribution, summed in float64: float32 Gumbel noise truncates the tail, which acts as a lower
    temperature (Zheng et al. 2024, arXiv 2409.02908). Single probabilities are float32, or float64 if the logits are.
    """

    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        _require(self.temperature >= 0, f"temperature is {self.temperature}; it must be 0 (greedy) or more")
        _require(0 < self.top_p <= 1, f"top_p is {self.top_p}; it must be above 0 and at most 1")

    def __call__(self, logits: Tensor, generator: torch.Generator) -> Proposal:
        """Logits (B, G, V), -inf where a token must never come, to one Proposal."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        own = logits.softmax(dim=-1)
        if self.temperature == 0:
            tokens = _largest(logits)  # of the logits: two of them may round to one probability
        else:
            hot = own if self.temperature == 1 else (logits / self.temperature).softmax(dim=-1)
            noise = uniform(logits.shape[:2], generator=generator, device=logits.device)
            tokens = _invert(_nucleus(hot, self.top_p), noise)
        confidence = own.gather(-1, tokens[..., None])[..., 0]
        return Proposal(tokens, confidence, lambda: torch.special.entr(own).sum(dim=-1))


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero outside the smallest set of most likely tokens whose mass reaches top_p; never empty."""
    if top_p == 1:
        return probabilities
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    before = F.pad(ordered.cumsum(dim=-1, dtype=torch.float64)[..., :-1], (1, 0))
    kept = torch.where(before < top_p, ordered, 0.0)
    return torch.zeros_like(kept).scatter(-1, order, kept)


def _largest(logits: Tensor) -> Tensor:
    """Tokens (B, G) of the largest of `logits` (B, G, V), the first of equals: the tile first, which is vectorized."""
    tiles = _tiles(logits, -torch.inf)
    tile = tiles.amax(dim=-1).argmax(dim=-1)
    return tile * TILE + _at(tiles, tile).argmax(dim=-1)


def _invert(mass: Tensor, noise: Tensor) -> Tensor:
    """Tokens (B, G) drawn from unnormalized `mass` (B, G, V) by uniform float64 `noise` (B, G): a tile, then inside it.

    Only sums of tiles and the chosen tile are summed up in float64: a running sum of all tokens takes twenty times as long.
    """
    tiles = _tiles(mass, 0.0)
    cumulative = tiles.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = noise * cumulative[..., -1]
    tile = _first_above(cumulative, target)
    rest = target - F.pad(cumulative, (1, 0)).gather(-1, tile[..., None])[..., 0]
    return tile * TILE + _first_above(_at(tiles, tile).cumsum(dim=-1, dtype=torch.float64), rest)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """First index (B, G) at which sums (B, G, n) exceed `target`; the last that adds to them if rounding leaves none."""
    found = torch.searchsorted(cumulative, target[..., None], right=True)
    last = torch.searchsorted(cumulative, cumulative[..., -1:].contiguous())
    return torch.minimum(found, last)[..., 0]


def _tiles(values: Tensor, fill: float) -> Tensor:
    """(B, G, V) as (B, G, tiles, TILE), filled up at the end."""
    missing = -values.shape[-1] % TILE
    return (F.pad(values, (0, missing), value=fill) if missing else values).unflatten(-1, (-1, TILE))


def _at(tiles: Tensor, tile: Tensor) -> Tensor:
    """The chosen tile (B, G) of each position, (B, G, TILE)."""
    return tiles.take_along_dim(tile[..., None, None], dim=-2)[..., 0, :]


class Reveal(Protocol):
    """A rule that picks positions to reveal in one step.

    Takes a Proposal, `masked` (B, G) bool, `step` (B,) int64 (steps this row's block has had) and a generator; returns
    `chosen` (B, G) bool, a subset of `masked` with at least one position in every row that has a mask, and the row's
    next step (B,). A rule never loops over rows.
    """

    def __call__(
        self, proposal: Proposal, *, masked: Tensor, step: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]: ...

    def left(self, masks: Tensor, step: Tensor) -> Tensor | None:
        """Of rows with so many masks (B,) at that step (B,), both on the CPU: how many are left after it.

        None where that depends on the logits or on chance: the decoder then waits for the device to say so.
        """


@dataclass(frozen=True, kw_only=True)
class TopK:
    """The most confident positions, an equal share each step, so that a block takes at most `steps` (MaskGIT).

    Chang et al. 2022, arXiv 2202.04200, with a linear instead of a cosine share.
    """

    steps: int

    def __post_init__(self) -> None:
        _require(self.steps >= 1, f"steps is {self.steps}; a block needs at least 1")

    def __call__(
        self, proposal: Proposal, *, masked: Tensor, step: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        left = (self.steps - step).clamp(min=1)
        count = -(-masked.sum(dim=1) // left)  # rounded up: the last step takes what is left
        return masked & (_rank(-proposal.confidence, masked) < count[:, None]), step + 1

    def left(self, masks: Tensor, step: Tensor) -> Tensor | None:
        steps = (self.steps - step).clamp(min=1)
        return masks - -(-masks // steps)


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """Every position at least `confidence` sure, and always the surest one (Fast-dLLM, arXiv 2505.22618)."""

    confidence: float

    def __post_init__(self) -> None:
        _require(
            self.confidence > 0, f"confidence is {self.confidence}; it must be above 0 (above 1: one token a step)"
        )

    def __call__(
        self, proposal: Proposal, *, masked: Tensor, step: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        sure = proposal.confidence >= self.confidence
        surest = _rank(-proposal.confidence, masked) == 0
        return masked & (sure | surest), step + 1

    def left(self, masks: Tensor, step: Tensor) -> Tensor | None:
        return None


@dataclass(frozen=True, kw_only=True)
class Factor:
    """The n surest positions, n the largest whose nth confidence is above 1 - factor / (n + 1), and always the surest one.

    The more are revealed at once, the surer each must be (Fast-dLLM, arXiv 2505.22618, factor-based decoding).
    """

    factor: float

    def __post_init__(self) -> None:
        _require(self.factor >= 0, f"factor is {self.factor}; it must be 0 (one token a step) or more")

    def __call__(
        self, proposal: Proposal, *, masked: Tensor, step: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        rank = _rank(
            -proposal.confidence, masked
        )  # confidence falls and the bar rises with it: those above are the first
        sure = proposal.confidence > 1 - self.factor / (rank + 2)
        return masked & (sure | (rank == 0)), step + 1

    def left(self, masks: Tensor, step: Tensor) -> Tensor | None:
        return None


@dataclass(frozen=True, kw_only=True)
class EntropyBound:
    """The lowest-entropy positions while the entropies of all but the largest of them sum to at most `bound` nats.

    That sum bounds the dependence that revealing them together ignores (EB-Sampler, Ben-Hamu et al. 2025, arXiv
    2505.24857).
    """

    bound: float

    def __post_init__(self) -> None:
        _require(self.bound >= 0, f"entropy bound is {self.bound}; it must be 0 or more")

    def __call__(
        self, proposal: Proposal, *, masked: Tensor, step: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        key = torch.where(masked, proposal.entropy, torch.inf)
        ordered, order = key.sort(dim=1, stable=True)
        within = F.pad(ordered.cumsum(dim=1)[:, :-1], (1, 0)) <= self.bound  # the first always is
        return masked & torch.zeros_like(masked).scatter(1, order, within), step + 1

    def left(self, masks: Tensor, step: Tensor) -> Tensor | None:
        return None


@dataclass(frozen=True, kw_only=True)
class Ancestral:
    """Exact ancestral sampling of the absorbing process on `steps` equal times, without its idle passes.

    From time t to s every mask is revealed independently with probability (alpha_s - alpha_t) / (1 - alpha_t) (the
    reverse posterior of MDLM, Sahoo et al. 2024, arXiv 2406.07524); on the linear schedule that is 1 / (steps - i) at
    step i. So the step of each mask is uniform over those left, and a step at which a row reveals nothing has no
    effect: the row jumps to its next step that reveals something.
    """

    steps: int

    def __post_init__(self) -> None:
        _require(self.steps >= 1, f"steps is {self.steps}; a block needs at least 1")

    def __call__(
        self, proposal: Proposal, *, masked: Tensor, step: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        noise = uniform(tuple(masked.shape), generator=generator, device=masked.device)
        left = (self.steps - step).clamp(min=1)[:, None]
        when = step[:, None] + (noise * left).floor().long().clamp(max=left - 1)
        when = torch.where(masked, when, torch.iinfo(torch.long).max)
        first = when.amin(dim=1)
        return masked & (when == first[:, None]), torch.where(masked.any(dim=1), first, step) + 1

    def left(self, masks: Tensor, step: Tensor) -> Tensor | None:
        return None


@dataclass(frozen=True)
class FirstHitting:
    """One mask a step, each equally likely: exact ancestral sampling in continuous time.

    The first-hitting sampler of Zheng et al. 2024, arXiv 2409.02908; the hitting times themselves are not needed, since
    no two masks are revealed at once and the order is uniform.
    """

    def __call__(
        self, proposal: Proposal, *, masked: Tensor, step: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        noise = uniform(tuple(masked.shape), generator=generator, device=masked.device)
        return masked & (_rank(noise, masked) == 0), step + 1

    def left(self, masks: Tensor, step: Tensor) -> Tensor | None:
        return (masks - 1).clamp(min=0)


def parse_reveal(text: str) -> Reveal:
    """The rule that `topk=8`, `threshold=0.9`, `factor=1`, `entropy=0.5`, `ancestral=16` or `first-hitting` means."""
    name, _, value = text.partition("=")
    try:
        if name == "topk":
            return TopK(steps=int(value))
        if name == "threshold":
            return Threshold(confidence=float(value))
        if name == "factor":
            return Factor(factor=float(value))
        if name == "entropy":
            return EntropyBound(bound=float(value))
        if name == "ancestral":
            return Ancestral(steps=int(value))
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"reveal rule {text!r}: {value!r} is no number") from error
    if text == "first-hitting":
        return FirstHitting()
    raise InputError(
        f"unknown reveal rule {text!r}; use topk=N, threshold=P, factor=F, entropy=H, ancestral=N or first-hitting"
    )


def _rank(key: Tensor, masked: Tensor) -> Tensor:
    """Rank (B, G) of every position by ascending key, masked ones first, ties by position."""
    order = torch.where(masked, key, torch.inf).argsort(dim=1, stable=True)
    return torch.empty_like(order).scatter(1, order, torch.arange(key.shape[1], device=key.device).expand_as(order))


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise InputError(sentence)
