"""What `mezzotint-eval doctor` and `mezzotint-eval generate` do once their options are read."""

from __future__ import annotations

import argparse
import json

import torch

from mezzotint.eval import doctor as examination
from mezzotint.eval import generate as generation
from mezzotint.eval.cells import DTYPES, parse_counts, require_threads
from mezzotint.eval.doctor import require_device
from mezzotint.eval.subjects import release_subject
from mezzotint.models.errors import InputError
from mezzotint.models.reveal import Sampler


def doctor(options: argparse.Namespace) -> int:
    found = examination.examine()
    print(json.dumps(found, indent=2) if options.json else examination.describe(found))
    return 0


def generate(options: argparse.Namespace) -> int:
    require_device(options.device)
    _set_threads(options.threads)
    config = generation.GenerateConfig(
        release=options.release,
        prompt=generation.read_prompt(text=options.prompt, file=options.prompt_file),
        prompt_ids=parse_counts(options.prompt_ids) if options.prompt_ids else None,
        max_new_tokens=options.max_new_tokens,
        reveal=generation.reveal_rule(
            steps=options.steps,
            threshold=options.threshold,
            entropy=options.entropy_bound,
            ancestral=options.ancestral,
            first_hitting=options.first_hitting,
        ),
        sampler=Sampler(temperature=options.temperature, top_p=options.top_p),
        samples=options.samples,
        seed=options.seed,
        dtype=_dtype(options.dtype),
        device=options.device,
        compiled=options.compile,
    )
    release_subject(options.release)  # says what is missing before anything is loaded
    found = generation.sample(config)
    if options.json:
        print(json.dumps(generation.report(found), indent=2))
        return 0
    for number, text in enumerate(found.texts, start=1):
        if len(found.texts) > 1:
            print(f"--- sample {number} of {len(found.texts)}")
        print(text)
    print(generation.describe(found))
    return 0


def _set_threads(count: int) -> None:
    require_threads(count)
    torch.set_num_threads(count)


def _dtype(name: str | None) -> torch.dtype | None:
    if name is not None and name not in DTYPES:
        raise InputError(f"unknown dtype {name!r}; one of {', '.join(DTYPES)}")
    return DTYPES[name] if name else None
