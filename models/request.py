"""What `generate` refuses before it starts: control ids in prompts, limits without room, states beyond memory."""

from __future__ import annotations

import torch

from .config import state_bytes
from .denoiser import Denoiser
from .errors import InputError


def check_prompts(model: Denoiser, prompts: list[list[int]]) -> None:
    """InputError for no prompts at all, mask or pad ids in a prompt, and ids outside the vocabulary."""
    config = model.config
    if not prompts:
        raise InputError("no prompts were given; an empty prompt is an empty list of tokens")
    for number, prompt in enumerate(prompts):
        for name, token in (("<mask>", config.mask_token_id), ("<pad>", config.pad_token_id)):
            if token in prompt:
                raise InputError(
                    f"prompt {number} holds the {name} id {token} at token {prompt.index(token)}; leave it out"
                )
        if prompt and not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < config.vocab_size)
            raise InputError(f"prompt {number} holds token id {wrong}, outside the vocabulary of {config.vocab_size}")


def new_tokens(prompts: list[list[int]], *, max_new_tokens: int, max_length: int | None) -> list[int]:
    """New tokens allowed for each prompt. InputError for limits that allow none."""
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    if max_length is None:
        return [max_new_tokens] * len(prompts)
    longest = max(map(len, prompts))
    if longest >= max_length:
        raise InputError(f"max_length {max_length} leaves no room behind a prompt of {longest} tokens; raise it")
    return [min(max_new_tokens, max_length - len(prompt)) for prompt in prompts]


def check_memory(model: Denoiser, *, prompts: int, samples: int, length: int) -> None:
    """InputError if the states of prefill and of its forks cannot be held at once."""
    if samples < 1:
        raise InputError(f"samples_per_prompt is {samples}; it must be at least 1")
    weight = model.embed.weight
    batch = prompts * (1 if samples == 1 else samples + 1)
    needed = state_bytes(model.config, batch=batch, length=length, itemsize=weight.element_size())
    free = available_bytes(weight.device)
    if free is not None and needed > free:
        raise InputError(
            f"a state of {length} tokens for {batch} rows needs {needed / 2**30:.1f} GiB, but "
            f"{free / 2**30:.1f} GiB are free on {weight.device}; use a shorter text or fewer rows"
        )


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on `device`, or None where the system does not say."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    if device.type != "cpu":
        return None
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
    except OSError:  # not Linux
        return None
    return int(lines["MemAvailable"].split()[0]) * 1024
