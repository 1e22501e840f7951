"""Study of confidence: tokens per pass against quality when a block is revealed by confidence instead of in fixed steps.

    python eval/studies/confidence.py                    the three releases of `make demo`
    python eval/studies/confidence.py --release R --data P  another release, on prepared text; may be given several times
    python eval/studies/confidence.py --report           the table and the figure of what there is

Every rule continues the same starts of held-out rows on the exact cache. Quality is the likelihood bound of what was written
under the model that wrote it, with the same masks for every rule, and beside it how much the text repeats itself, since a
bound alone rewards repetition. <eos> is never drawn, so that all texts are equally long. Goes on where it stopped.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import confidence_report  # beside this file
import torch
from torch import Tensor
from tqdm import tqdm

from mezzotint.data.cli import run_command
from mezzotint.data.rows import RowSource
from mezzotint.eval.bound import Draws
from mezzotint.eval.canvases import Job, measure
from mezzotint.eval.draws import DESIGN
from mezzotint.eval.results import ResultsFile
from mezzotint.eval.subjects import Subject, build, release_subject
from mezzotint.models.decode import generate
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.errors import InputError
from mezzotint.models.reveal import Proposal, Sampler, parse_reveal

RELEASES = tuple(f"runs/demo/releases/{arm}" for arm in ("attention", "hybrid", "mamba"))
FIXED = tuple(f"topk={steps}" for steps in (16, 12, 8, 6, 5, 4, 3, 2))
SURE = tuple(f"threshold={least}" for least in (0.5, 0.2, 0.12, 0.08, 0.06, 0.05, 0.04, 0.03))
ENTROPY = tuple(f"entropy={nats}" for nats in (4, 12, 24))
BATCH = 128  # canvases of the bound that are denoised in one pass


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """What is asked of every release: rules by temperature, and sizes, which are part of a row's identity."""

    samples: int = 32
    prompt_tokens: int = 64
    new_tokens: int = 96
    draws: int = 8  # of the bound, a block
    seed: int = 0
    asked: tuple[tuple[float, tuple[str, ...]], ...] = ((0.7, (*FIXED, *SURE, *ENTROPY)), (0.0, (*FIXED, *SURE)))


@dataclass(frozen=True, kw_only=True)
class Unending(Sampler):
    """A sampler that never draws <eos>: texts of equal length, whose repetition and tokens per pass compare."""

    eos: int

    def __call__(self, logits: Tensor, generator: torch.Generator) -> Proposal:
        end = torch.tensor([self.eos], device=logits.device)
        return super().__call__(logits.index_fill(-1, end, -torch.inf), generator)


def repeated(tokens: Sequence[int], length: int = 4) -> float:
    """Share of the `length`-grams of a text that stood in it before; 0 for a text shorter than that."""
    return 1 - distinct(tokens, length)


def distinct(tokens: Sequence[int], length: int) -> float:
    """Distinct `length`-grams over all of them (Li et al. 2016, arXiv 1510.03055); 1 for a text shorter than that."""
    grams = [tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def held_out(data: str | Path, config: StudyConfig, *, block: int) -> Tensor:
    """(samples, prompt + new tokens) int64: rows within one document, evenly over the data. Raises InputError."""
    for name, count in (("prompt", config.prompt_tokens), ("new", config.new_tokens)):
        if count < 1 or count % block:
            raise InputError(f"{count} {name} tokens are no multiple of the block of {block}: take one that is")
    source = RowSource(data, config.prompt_tokens + config.new_tokens, block)
    rows = [source[i] for i in range(len(source))]
    whole = [row.tokens for row in rows if (row.documents == 0).all() and not row.fill.any()]
    if len(whole) < config.samples:
        raise InputError(f"{data} has {len(whole)} rows within one document, not {config.samples}: lower --samples")
    chosen = [whole[i * len(whole) // config.samples] for i in range(config.samples)]
    return torch.stack([torch.from_numpy(tokens) for tokens in chosen])


@torch.inference_mode()
def written_bounds(model: Denoiser, tokens: Tensor, *, start: int, draws: Draws) -> list[float]:
    """Nats that bound -log p(tokens[start:] | tokens[:start]) of each row of (B, T), both parts whole blocks.

    Masks depend on the row's number and the place alone, so they are the same for whatever is written there.
    """
    size, count = model.config.block_length, len(tokens)
    state = model.commit(tokens[:, :start], model.start(count, tokens.shape[1] - size))
    nats = [0.0] * count
    for low in range(start, tokens.shape[1], size):
        block = tokens[:, low : low + size]
        chosen = [draws.of(size, key=f"{row}/{low}", twin=False) for row in range(count)]
        jobs = [Job(block[row], torch.arange(size), chosen[row], row=row) for row in range(count)]
        found = measure(model, jobs, state, batch=draws.batch)
        nats = [sum_ + each.bound(own) for sum_, each, own in zip(nats, found, chosen)]
        if low + size < tokens.shape[1]:
            state = model.commit(block, state)
    return nats


def written(model: Denoiser, rows: Tensor, config: StudyConfig, *, rule: str, temperature: float) -> Iterator[dict]:
    """The values of each sample under one rule; the rule `held-out` is the text itself, which costs no passes."""
    start = config.prompt_tokens
    texts, passes = rows[:, start:].tolist(), [0] * len(rows)
    if rule != confidence_report.HELD_OUT:
        found = generate(
            model,
            rows[:, :start].tolist(),
            max_new_tokens=config.new_tokens,
            reveal=parse_reveal(rule),
            sampler=Unending(temperature=temperature, eos=model.config.eos_token_id),
            generator=torch.Generator().manual_seed(config.seed),
        )
        texts, passes = found.tokens, found.row_nfe
    tokens = torch.cat([rows[:, :start], torch.tensor(texts)], dim=1)
    draws = Draws(per_block=config.draws, seed=config.seed, batch=BATCH)
    for text, nfe, nats in zip(texts, passes, written_bounds(model, tokens, start=start, draws=draws)):
        yield {
            "tokens": len(text),
            "nfe": nfe,
            "nats": nats,
            "repeated": repeated(text),
            "distinct1": distinct(text, 1),
            "distinct2": distinct(text, 2),
        }


def identities(subject: Subject, config: StudyConfig, rows: Tensor, *, rule: str, temperature: float) -> list[dict]:
    """One a sample. The samples of a call share its random numbers, so their number is part of what each is."""
    prompts = hashlib.sha256(str(rows.tolist()).encode()).hexdigest()[:16]
    same = {"task": "confidence", "subject": subject.name, "rule": rule, "temperature": temperature, "prompts": prompts}
    sizes = {name: getattr(config, name) for name in ("samples", "prompt_tokens", "new_tokens", "draws", "seed")}
    return [same | sizes | {"design": DESIGN, "sample": i} for i in range(config.samples)]


def ask(release: str, data: str, config: StudyConfig, folder: Path) -> None:
    """Run what is missing of one release, into a results file of its own, so that several can be asked side by side."""
    subject = release_subject(release)
    rows = held_out(data, config, block=subject.config.block_length)
    cells = [(confidence_report.HELD_OUT, 1.0)] + [(rule, heat) for heat, rules in config.asked for rule in rules]
    model: Denoiser | None = None
    with ResultsFile(folder / f"{subject.name}.jsonl", subjects={subject.name: subject.fingerprint}) as results:
        for rule, temperature in tqdm(cells, desc=subject.name, unit="rule", disable=None):
            named = identities(subject, config, rows, rule=rule, temperature=temperature)
            if all(results.done(identity) for identity in named):
                continue
            model = build(subject, dtype=torch.float32) if model is None else model
            for identity, values in zip(named, written(model, rows, config, rule=rule, temperature=temperature)):
                if not results.done(identity):
                    results.append(identity, status="ok", values=values)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Tokens per pass against quality, by confidence and in fixed steps.")
    parser.add_argument("--release", action="append", help="release folder (default: the three of make demo)")
    parser.add_argument("--data", default="runs/demo/data/heldout", help="prepared folder (default: %(default)s)")
    parser.add_argument("--out", default="runs/eval/confidence", help="folder of results (default: %(default)s)")
    parser.add_argument(
        "--tables", default=Path(__file__).parent, help="folder of confidence.md and .png (default: here)"
    )
    parser.add_argument("--samples", type=int, default=StudyConfig.samples, help="default: %(default)s")
    parser.add_argument("--prompt-tokens", type=int, default=StudyConfig.prompt_tokens, help="default: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=StudyConfig.new_tokens, help="default: %(default)s")
    parser.add_argument("--draws", type=int, default=StudyConfig.draws, help="of a block's bound; default: %(default)s")
    parser.add_argument("--seed", type=int, default=StudyConfig.seed, help="default: %(default)s")
    parser.add_argument(
        "--report", action="store_true", help="write the table and the figure of what there is, and end"
    )
    options = parser.parse_args(arguments)
    return run_command(lambda: study(options), InputError)


def study(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    names = ("samples", "prompt_tokens", "new_tokens", "draws", "seed")
    config = StudyConfig(**{name: getattr(options, name) for name in names})
    for name in ("samples", "draws"):
        if getattr(config, name) < 1:
            raise InputError(f"--{name} is {getattr(config, name)}; it must be at least 1")
    for release in [] if options.report else options.release or RELEASES:
        ask(release, options.data, config, Path(options.out))
    print(confidence_report.write(Path(options.out), Path(options.tables)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
