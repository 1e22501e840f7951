"""The prompts that policies are compared on: starts of prepared rows, samples of a retrieval task, or a file of them."""

from __future__ import annotations

from dataclasses import dataclass

from mezzotint.data.manifest import check_vocabulary
from mezzotint.data.rows import RowSource
from mezzotint.data.tasks.catalog import make_sample
from mezzotint.data.tasks.sample import Sample
from mezzotint.data.tasks.vocabulary import Vocabulary
from mezzotint.eval.caches_file import PromptFile
from mezzotint.eval.caches_plan import CachesConfig
from mezzotint.eval.retrieval_subjects import vocabulary_of
from mezzotint.eval.score import spread
from mezzotint.eval.scoring import Marks, mark_symbols, mark_text
from mezzotint.eval.subjects import Subject
from mezzotint.models.errors import InputError

DEPTHS = 10


@dataclass(frozen=True)
class Prompt:
    """Tokens to continue, what stands in the answer from the start (masks elsewhere), and the sample behind them."""

    tokens: list[int]
    standing: list[int]
    sample: Sample | None


@dataclass(frozen=True)
class Prompts:
    """Where one subject's prompts come from."""

    subject: Subject
    vocabulary: Vocabulary | None
    folder: str | None
    file: PromptFile | None = None

    @property
    def fingerprint(self) -> str:
        if self.file is not None:
            return self.file.fingerprint
        if self.vocabulary is not None:
            return self.vocabulary.fingerprint
        assert self.folder is not None
        return RowSource(self.folder, 1, 1).manifest.sha256[:16]


def open_prompts(subject: Subject, config: CachesConfig, *, text: str) -> Prompts:
    """Raises InputError for a task that cannot be made, or text of another vocabulary, at any of the lengths."""
    vocabulary = vocabulary_of(subject, text=text) if config.task is not None else None
    if config.prompts is not None:
        config.prompts.check(subject.config)
    prompts = Prompts(subject, vocabulary, config.data, config.prompts)
    for length in config.lengths:
        make_prompts(prompts, config, length=length, count=1 if config.data is None else config.samples)
    return prompts


def make_prompts(prompts: Prompts, config: CachesConfig, *, length: int, count: int | None = None) -> list[Prompt]:
    """`count` prompts (all of the configuration's) of `length` tokens with their answers, the same for every policy."""
    count = config.samples if count is None else count
    if prompts.file is not None:
        mask = prompts.subject.config.mask_token_id
        return [_prompt(sample, mask) for sample in prompts.file.samples[:count]]
    if config.task is not None:
        assert prompts.vocabulary is not None
        return [_asked(prompts, config, length=length, index=index) for index in range(count)]
    return _started(prompts, config, length=length, count=count)


def _asked(prompts: Prompts, config: CachesConfig, *, length: int, index: int) -> Prompt:
    assert config.task is not None and prompts.vocabulary is not None
    depth = round((index % DEPTHS) / (DEPTHS - 1), 6) if config.task.placed else None
    sample = make_sample(
        config.task, length=length, seed=config.seed, index=index, depth=depth, vocabulary=prompts.vocabulary
    )
    return _prompt(sample, prompts.subject.config.mask_token_id)


def _prompt(sample: Sample, mask: int) -> Prompt:
    standing = [token if given else mask for token, given in zip(sample.target, sample.given)]
    return Prompt(sample.tokens, standing + [mask] * (sample.room - len(standing)), sample)


def _started(prompts: Prompts, config: CachesConfig, *, length: int, count: int) -> list[Prompt]:
    """The first length - new_tokens tokens of rows spread over the text; with --shared, one shared part for all."""
    assert prompts.folder is not None
    rows = RowSource(prompts.folder, length, 1, align=False)
    check_vocabulary(rows.manifest, prompts.subject.config.vocab_size)
    if len(rows) < count:
        raise InputError(
            f"{prompts.folder} holds {len(rows)} rows of {length} tokens, {count} are asked for: take fewer"
        )
    mask, kept = prompts.subject.config.mask_token_id, length - config.new_tokens
    texts = [rows[number].tokens[:kept].tolist() for number in spread(len(rows), count)]
    if config.shared is not None:
        start, stop = config.shared.span(kept)
        texts = [text[:start] + texts[0][start:stop] + text[stop:] for text in texts]
    return [Prompt(text, [mask] * config.new_tokens, None) for text in texts]


def marks_of(prompt: Prompt, written: list[int], vocabulary: Vocabulary | None) -> Marks | None:
    """Whether what was written answers the sample; None without one."""
    sample = prompt.sample
    if sample is None:
        return None
    if sample.kind == "symbols":
        return mark_symbols(sample, written)
    assert vocabulary is not None
    end = sample.target[-1]
    kept = written[: written.index(end)] if end in written else written
    return mark_text(sample, vocabulary.decode([t for t in kept if t not in (vocabulary.mask_id, vocabulary.pad_id)]))


def stacked(prompts: list[Prompt]) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens and standing answers of a batch."""
    return [prompt.tokens for prompt in prompts], [prompt.standing for prompt in prompts]
