"""The denoiser as transformers knows models: configuration, loading, generation; the one user of transformers here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import MaskedLMOutput

from .config import ModelConfig
from .decode import Generation, generate
from .denoiser import Denoiser
from .errors import InputError
from .reveal import Sampler, parse_reveal
from .weights import WIDE

# where generation_config.json says nothing
DEFAULTS: dict[str, Any] = {"max_new_tokens": 128, "reveal": "first-hitting", "temperature": 1.0, "top_p": 1.0}


class MezzotintConfig(PretrainedConfig):
    """config.json for transformers; the fields of ModelConfig stand in the dictionary `denoiser`."""

    model_type = "mezzotint"

    def __init__(self, denoiser: dict[str, Any] | None = None, **values: Any) -> None:
        self.denoiser = {} if denoiser is None else denoiser  # transformers makes an empty one to see the defaults
        values["tie_word_embeddings"] = False  # the denoiser ties its own: a tied head has no parameter
        super().__init__(**values)

    def core(self) -> ModelConfig:
        """The configuration that the Denoiser takes."""
        return ModelConfig.from_dict(self.denoiser)


class MezzotintModel(PreTrainedModel, GenerationMixin):
    """A Denoiser in `self.denoiser`, with its own `generate` on the exact cache in place of transformers'."""

    config_class = MezzotintConfig
    base_model_prefix = "denoiser"  # weights on disk are named as in the Denoiser
    main_input_name = "input_ids"
    _keep_in_fp32_modules_strict = list(WIDE)  # noqa: RUF012

    def __init__(self, config: MezzotintConfig) -> None:
        super().__init__(config)
        self.denoiser = Denoiser(config.core())
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Nothing: the Denoiser has initialised itself."""

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.denoiser.embed

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> MaskedLMOutput:
        """Logits (B, T, V): row i predicts token i, from the earlier blocks as they stand and from its own block.

        One training pass over input_ids (B, T), where every block is a frontier. T need not be whole blocks: the rest
        of the last counts as masked. Raises InputError for masks before the last block, and for padding (`generate`
        takes padded rows).
        """
        core = self.denoiser.config
        if attention_mask is not None and not bool(attention_mask.all()):
            raise InputError("forward takes no padding: give rows of one length, or use generate")
        size, length = core.block_length, input_ids.shape[1]
        tokens = torch.nn.functional.pad(input_ids, (0, -length % size), value=core.mask_token_id)
        blocks = tokens.shape[1] // size
        clean = tokens[:, : (blocks - 1) * size]
        if bool((clean == core.mask_token_id).any()):
            raise InputError(f"masks may stand only in the last block of {size} tokens: earlier ones count as decided")
        frontiers = torch.arange(blocks).expand(len(tokens), -1)
        logits = self.denoiser(clean, tokens.unflatten(1, (blocks, size)), frontiers)
        return MaskedLMOutput(logits=logits.flatten(1, 2)[:, :length])

    @torch.no_grad()
    def generate(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        reveal: str | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        num_return_sequences: int = 1,
        seed: int = 0,
    ) -> Tensor:
        """input_ids (B, T) and what follows, (B * num_return_sequences, T + new), <eos> included, padded at the end.

        attention_mask (B, T) is 0 at padding, on either side. reveal is `topk=8` (steps a block), `threshold=0.9`,
        `entropy=0.5`, `ancestral=16` or `first-hitting`; temperature 0 is greedy. None: as generation_config.json says.
        """
        core = self.denoiser.config
        keep = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        prompts = [row[kept.bool()].tolist() for row, kept in zip(input_ids.cpu(), keep.cpu())]
        made = self._generation(
            prompts,
            seed=seed,
            samples=num_return_sequences,
            given={"max_new_tokens": max_new_tokens, "reveal": reveal, "temperature": temperature, "top_p": top_p},
        )
        rows = [text + [core.eos_token_id] * ended for text, ended in zip(made.tokens, made.ended)]
        width = max(map(len, rows))
        new = torch.tensor([row + [core.pad_token_id] * (width - len(row)) for row in rows], device=input_ids.device)
        return torch.cat([input_ids.repeat_interleave(num_return_sequences, dim=0), new.long()], dim=1)

    def generate_text(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompts: list[str],
        *,
        max_new_tokens: int | None = None,
        reveal: str | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> list[str]:
        """What follows each prompt, as text; options as in `generate`."""
        made = self._generation(
            [tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts],
            seed=seed,
            samples=1,
            given={"max_new_tokens": max_new_tokens, "reveal": reveal, "temperature": temperature, "top_p": top_p},
        )
        return [str(tokenizer.decode(text)) for text in made.tokens]

    def _generation(self, prompts: list[list[int]], *, seed: int, samples: int, given: dict[str, Any]) -> Generation:
        """`given` over generation_config.json over DEFAULTS, where not None."""
        stored = {} if self.generation_config is None else self.generation_config.to_dict()
        layers = (DEFAULTS, {name: stored.get(name) for name in DEFAULTS}, given)
        options = {name: value for layer in layers for name, value in layer.items() if value is not None}
        return generate(
            self.denoiser,
            prompts,
            max_new_tokens=options["max_new_tokens"],
            reveal=parse_reveal(options["reveal"]),
            sampler=Sampler(temperature=options["temperature"], top_p=options["top_p"]),
            generator=torch.Generator().manual_seed(seed),
            samples_per_prompt=samples,
        )
