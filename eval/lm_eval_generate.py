"""Texts written until a stop string, a token limit or `<eos>`: batches of prompts, no further than they need to go."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from mezzotint.data.tokenizer import Tokenizer
from mezzotint.eval.memory import available_bytes
from mezzotint.models.config import state_bytes
from mezzotint.models.decode import generate
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.errors import InputError
from mezzotint.models.reveal import Reveal, Sampler

MEMORY_SHARE = 0.8  # of what is free, for the states of the prompts that are continued together
FIRST_STAGE = 64  # tokens written before stop strings are looked for; each later stage is twice as long
DEFAULT_TOKENS = 256  # where a task sets no limit, as in lm-eval's own models
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
NEUTRAL: dict[str, tuple[object, ...]] = {  # arguments of other samplers, at values that change nothing
    "num_beams": (1,),
    "top_k": (0, None),
    "repetition_penalty": (1, None),
    "num_return_sequences": (1,),
    "use_cache": (True, False),
}


@dataclass(frozen=True)
class Writing:
    """How a prompt is continued: up to one of the strings `until`, which is left out, or `max_new_tokens`."""

    until: tuple[str, ...]
    max_new_tokens: int
    sampler: Sampler


def parse_writing(arguments: Mapping[str, object]) -> Writing:
    """From a task's generation_kwargs. Raises InputError for those that mean another kind of decoding."""
    left = dict(arguments)
    until = left.pop("until", None) or ()
    stops = (until,) if isinstance(until, str) else tuple(until)  # type: ignore[arg-type]
    if not all(isinstance(stop, str) for stop in stops):
        raise InputError(f"generation argument until is {until!r}; it must be a text or a list of texts")
    limits = [left.pop(name) for name in LIMITS if name in left]
    limit = int(limits[0]) if limits and limits[0] is not None else DEFAULT_TOKENS  # type: ignore[call-overload]
    temperature = float(left.pop("temperature", None) or 0.0)  # type: ignore[arg-type]
    sampled = left.pop("do_sample", None)
    top_p = float(left.pop("top_p", None) or 1.0)  # type: ignore[arg-type]
    if sampled is False:
        temperature = 0.0
    elif sampled and temperature == 0.0 and "temperature" not in arguments:
        temperature = 1.0
    for name, value in left.items():
        if value not in NEUTRAL.get(name, ()):
            raise InputError(f"generation argument {name} = {value!r} is not known here; remove it from the task")
    if limit < 1:
        raise InputError(f"a task asks for {limit} new tokens; it must be at least 1")
    return Writing(tuple(stop for stop in stops if stop), limit, Sampler(temperature=temperature, top_p=top_p))


def write(
    model: Denoiser,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    writing: Writing,
    *,
    reveal: Reveal,
    batch: int,
    seed: int,
) -> Iterator[tuple[int, str]]:
    """(number of the prompt, its continuation), in any order; `batch` prompts at a time, the longest first.

    Sampled texts are written one prompt at a time, each with its own generator of `seed` and the prompt, so that no batch
    changes them. Raises InputError for prompts with control ids and for those whose state memory cannot hold.
    """
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    together = batch if writing.sampler.temperature == 0 else 1
    while order:
        count = min(together, len(order), _most(model, len(prompts[order[0]]) + writing.max_new_tokens))
        part, order = order[:count], order[count:]
        digest = hashlib.sha256(f"{seed}/{prompts[part[0]]}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        texts = _write_batch(model, tokenizer, [prompts[n] for n in part], writing, reveal=reveal, generator=generator)
        yield from zip(part, texts)


def _most(model: Denoiser, length: int) -> int:
    """How many texts of `length` tokens are written together at most: at least 1, which `generate` refuses if need be."""
    weight = model.embed.weight
    one = state_bytes(model.config, batch=1, length=length, itemsize=weight.element_size())
    return max(1, int(MEMORY_SHARE * available_bytes(weight.device) / max(one, 1)))


def _write_batch(
    model: Denoiser,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    writing: Writing,
    *,
    reveal: Reveal,
    generator: torch.Generator,
) -> list[str]:
    """Stage by stage: a text that is stopped is not written on.

    A stage keeps whole blocks only, so that the next one, which reads them as its prompt, writes what a single run
    would have written. With no stop strings there is one stage.
    """
    size, limit = model.config.block_length, writing.max_new_tokens
    written: list[list[int]] = [[] for _ in prompts]
    going = list(range(len(prompts)))
    stage = max(FIRST_STAGE // size, 1) * size if writing.until else limit
    while going:
        left = limit - min(len(written[i]) for i in going)
        last = stage >= left
        found = generate(
            model,
            [prompts[i] + written[i] for i in going],
            max_new_tokens=left if last else stage,
            generator=generator,
            reveal=reveal,
            sampler=writing.sampler,
        )
        still = []
        for i, new, ended in zip(going, found.tokens, found.ended):
            if not (last or ended):
                new = new[: len(new) - (len(prompts[i]) + len(written[i]) + len(new)) % size]
            written[i] = (written[i] + new)[:limit]
            done = last or ended or len(written[i]) >= limit
            if not done and _stop(_text(tokenizer, written[i]), writing.until) is None:
                still.append(i)
        going, stage = still, 2 * stage
    texts = [_text(tokenizer, tokens) for tokens in written]
    return [text[: _stop(text, writing.until)] for text in texts]


def _text(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """Text of the tokens; ids of a padded vocabulary, beyond the tokenizer's, stand for none."""
    return tokenizer.decode([token for token in tokens if token < tokenizer.vocab_size])


def _stop(text: str, until: tuple[str, ...]) -> int | None:
    """Where the first stop string begins, None without one."""
    places = [text.find(stop) for stop in until if stop in text]
    return min(places) if places else None
