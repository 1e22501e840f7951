"""What a retrieval cell asks of a subject: its vocabulary, training length, and variants with other rotary positions."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
import yaml

from mezzotint.data.tasks.vocabulary import Vocabulary
from mezzotint.data.tokenizer import load_tokenizer
from mezzotint.eval.subjects import Subject, build
from mezzotint.models.config import ROPE_SCALINGS
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.errors import InputError

RECORD = "training.yaml"  # the recipe in a release


def vocabulary_of(subject: Subject, *, text: str) -> Vocabulary:
    """That of a release's tokenizer; plain symbols where there is none."""
    config = subject.config
    control = (config.mask_token_id, config.eos_token_id, config.pad_token_id)
    if subject.folder is None or not any(Path(subject.folder).glob("tokenizer.*")):
        return Vocabulary(None, size=config.vocab_size, control=control)
    tokenizer = load_tokenizer(subject.folder)
    if tokenizer.vocab_size > config.vocab_size or control != (tokenizer.mask_id, tokenizer.eos_id, tokenizer.pad_id):
        raise InputError(
            f"the tokenizer in {subject.folder} does not belong to its model: ids and vocabulary differ; export again"
        )
    return Vocabulary.of(tokenizer, text=text)


def training_length(subject: Subject) -> int | None:
    """Tokens of a training row, from the recipe in the release; None where it is not said."""
    path = None if subject.folder is None else Path(subject.folder) / RECORD
    if path is None or not path.is_file():
        return None
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"{path} cannot be read ({str(error).splitlines()[0]}); export the run again") from error
    data = recipe.get("data") if isinstance(recipe, dict) else None
    length = data.get("row_length") if isinstance(data, dict) else None
    return length if isinstance(length, int) and length > 0 else None


def require_trained(subject: Subject, trained: int | None) -> int:
    if trained is None:
        raise InputError(
            f"{subject.name} does not say how long its training rows were: give --training-length, or --lengths"
        )
    return trained


def scaled(subject: Subject, scaling: str, *, trained: int | None) -> Subject:
    """The subject with another rule for rotary positions, `yarn=8` or `linear=4`, named NAME+yarn8.

    The weights are the same; factor and training length (`trained`) go into the configuration. Raises InputError for an
    unknown rule, a factor below 1, and a model without rotary positions.
    """
    rule, _, factor = scaling.partition("=")
    if rule not in ROPE_SCALINGS[1:]:
        raise InputError(f"unknown rope scaling {rule!r}; one of {', '.join(ROPE_SCALINGS[1:])}, as in yarn=8")
    try:
        times = float(factor)
    except ValueError:
        raise InputError(f"rope scaling {scaling!r}: {factor!r} is no factor; write for example yarn=8") from None
    if not has_rope(subject):
        raise InputError(f"{subject.name} has no rotary positions to scale")
    changed = dataclasses.replace(
        subject.config,
        rope_scaling=rule,
        rope_factor=times,
        rope_trained_length=require_trained(subject, trained),
    )
    name = f"{rule}{times:g}"
    return dataclasses.replace(
        subject, name=f"{subject.name}+{name}", fingerprint=f"{subject.fingerprint}+{name}", config=changed
    )


def has_rope(subject: Subject) -> bool:
    return "A" in subject.config.pattern and subject.config.positions == "rope"


def build_variant(subject: Subject, *, dtype: torch.dtype, device: str) -> Denoiser:
    """The model of a subject with the subject's own configuration, which may differ from its folder's in positions."""
    model = build(subject, dtype=dtype, device=device)
    if model.config == subject.config:
        return model
    with torch.device("meta"):
        variant = Denoiser(subject.config)
    variant.load_state_dict(model.state_dict(), assign=True)
    return variant.eval()


def positions(subject: Subject) -> str:
    """The position scheme in words: `rope`, `rope yarn x8`, `none`."""
    config = subject.config
    if not has_rope(subject):
        return "none"
    scaling = "" if config.rope_scaling == "none" else f" {config.rope_scaling} x{config.rope_factor:g}"
    return f"rope{scaling}"
