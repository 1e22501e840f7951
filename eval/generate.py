"""Text from a release: prompt in, samples out, with what they cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from mezzotint.data.tokenizer import Tokenizer, load_tokenizer
from mezzotint.eval.timing import load_average
from mezzotint.models.compiled import CompiledLayers
from mezzotint.models.config import ModelConfig
from mezzotint.models.decode import Generation, generate
from mezzotint.models.denoiser import run_layer
from mezzotint.models.errors import InputError
from mezzotint.models.reveal import Ancestral, EntropyBound, FirstHitting, Reveal, Sampler, Threshold, TopK
from mezzotint.models.weights import load_config, load_model


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """What is asked of a release. `reveal` and `sampler` are those of models.reveal."""

    release: str
    prompt: str = ""
    prompt_ids: tuple[int, ...] | None = None  # token ids to continue instead of a text
    max_new_tokens: int
    reveal: Reveal
    sampler: Sampler
    samples: int = 1
    seed: int = 0
    dtype: torch.dtype | None = None
    device: str = "cpu"
    compiled: bool = False  # layers by models.compiled, on a CPU

    def __post_init__(self) -> None:
        if self.compiled and self.device != "cpu":
            raise InputError(
                f"--compile is for a CPU; on {self.device} long texts are decoded by captured graphs anyway"
            )
        if not -(2**63) <= self.seed < 2**63:
            raise InputError(f"--seed is {self.seed}; it must fit into 64 bits")


@dataclass(frozen=True)
class Samples:
    """Texts without the prompt, and the counts behind them."""

    texts: list[str]
    generation: Generation
    prompt_tokens: int


def sample(config: GenerateConfig) -> Samples:
    """Load the release and continue the prompt. Raises InputError for what cannot be decoded."""
    tokenizer = load_tokenizer(config.release)
    require_same_vocabulary(tokenizer, load_config(config.release), release=config.release)
    model = load_model(config.release, dtype=config.dtype, device=config.device).eval()
    prompt = tokenizer.encode(config.prompt) if config.prompt_ids is None else list(config.prompt_ids)
    generation = generate(
        model,
        [prompt],
        max_new_tokens=config.max_new_tokens,
        generator=torch.Generator().manual_seed(config.seed),
        reveal=config.reveal,
        sampler=config.sampler,
        samples_per_prompt=config.samples,
        run=CompiledLayers() if config.compiled else run_layer,
    )
    # ids of a padded vocabulary, beyond the tokenizer's, stand for no text
    known = [[token for token in tokens if token < tokenizer.vocab_size] for tokens in generation.tokens]
    return Samples([tokenizer.decode(tokens) for tokens in known], generation, len(prompt))


def report(samples: Samples) -> dict:
    """Texts and costs as one JSON value."""
    found = samples.generation
    return {
        "texts": samples.texts,
        "ended": found.ended,
        "prompt_tokens": samples.prompt_tokens,
        "new_tokens": [len(tokens) for tokens in found.tokens],
        "nfe": found.nfe,
        "tokens_per_nfe": found.tokens_per_nfe,
        "tokens_per_s": found.tokens_per_second,
        "prefill_passes": found.prefill_passes,
        "prefill_s": found.prefill_seconds,
        "seconds": found.seconds,
        "load": load_average(),
    }


def describe(samples: Samples) -> str:
    """The costs in a line. Tokens/s counts what came out, of all samples, after prefill, sampling included."""
    found = samples.generation
    new = sum(len(tokens) for tokens in found.tokens)
    return (
        f"[{new} tokens, {found.nfe} NFE, {found.tokens_per_nfe:.2f} tokens/NFE, "
        f"{found.tokens_per_second:.1f} tokens/s; "
        f"prompt of {samples.prompt_tokens} tokens in {found.prefill_passes} passes, {found.prefill_seconds:.2f} s; "
        f"{sum(found.ended)} of {len(found.ended)} texts ended; load average {load_average():.1f}]"
    )


def reveal_rule(
    *, steps: int | None, threshold: float | None, entropy: float | None, ancestral: int | None, first_hitting: bool
) -> Reveal:
    """The one rule that was asked for; without any, 8 steps a block. Raises InputError where two were."""
    asked: list[Reveal] = []
    asked += [TopK(steps=steps)] if steps is not None else []
    asked += [Threshold(confidence=threshold)] if threshold is not None else []
    asked += [EntropyBound(bound=entropy)] if entropy is not None else []
    asked += [Ancestral(steps=ancestral)] if ancestral is not None else []
    asked += [FirstHitting()] if first_hitting else []
    if len(asked) > 1:
        raise InputError("give one of --steps, --threshold, --entropy-bound, --ancestral and --first-hitting")
    return asked[0] if asked else TopK(steps=8)


def read_prompt(*, text: str | None, file: str | None) -> str:
    """The prompt itself or the file's text. Raises InputError for a file that is no UTF-8 text, naming it."""
    if file is None:
        return text or ""
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read the prompt file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"the prompt file {file} is no UTF-8 text (byte {error.start})") from error


def require_same_vocabulary(tokenizer: Tokenizer, config: ModelConfig, *, release: str) -> None:
    """Raises InputError where tokenizer and model of a release do not belong together."""
    if tokenizer.vocab_size > config.vocab_size:
        raise InputError(
            f"the tokenizer in {release} has {tokenizer.vocab_size} ids, its model only {config.vocab_size}: "
            "they do not belong together; export the run again"
        )
    ids = (tokenizer.mask_id, tokenizer.eos_id, tokenizer.pad_id)
    own = (config.mask_token_id, config.eos_token_id, config.pad_token_id)
    if ids != own:
        raise InputError(
            f"mask, eos and pad ids of the tokenizer in {release} are {ids}, those of its model {own}: "
            "they do not belong together; export the run again"
        )
