"""Which cells a comparison of cache policies has: subjects, policies, lengths, batches; and how a row of it is named."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from mezzotint.data.tasks.catalog import spelled as spelled_task
from mezzotint.data.tasks.sample import Task
from mezzotint.eval.caches_file import PromptFile
from mezzotint.eval.cells import DTYPES
from mezzotint.eval.draws import DESIGN
from mezzotint.eval.retrieval_subjects import training_length
from mezzotint.eval.subjects import Subject
from mezzotint.models.errors import InputError
from mezzotint.models.policies.interface import Policy
from mezzotint.models.policies.none import NoCache
from mezzotint.models.policies.shared_prefix import SharedPrefix
from mezzotint.models.policies.table import options_of, parse_policy, spelled
from mezzotint.models.reveal import Ancestral, FirstHitting, Reveal, parse_reveal

PLACES = ("prefix", "infix", "suffix")
BIDIRECTIONAL, CAUSAL = "bidirectional", "block-causal"
BLOCK = 32  # columns that a bidirectional model reveals at a time


@dataclass(frozen=True)
class Shared:
    """Which part of a prompt is shared: the first, middle or last `share` of its tokens."""

    place: str
    share: float

    def span(self, prompt_tokens: int) -> tuple[int, int]:
        count = max(1, round(self.share * prompt_tokens))
        room = prompt_tokens - count
        start = {"prefix": 0, "infix": room // 2, "suffix": room}[self.place]
        return start, start + count


def parse_shared(text: str) -> Shared:
    """`prefix=0.5`. Raises InputError."""
    place, _, share = text.partition("=")
    try:
        value = float(share)
    except ValueError:
        value = -1.0
    if place not in PLACES or not 0 < value <= 1:
        raise InputError(
            f"--shared is {text!r}; write prefix, infix or suffix and a share above 0 and at most 1, as in prefix=0.5"
        )
    return Shared(place, value)


def parse_policies(texts: list[str]) -> list[Policy]:
    """All policies of all texts, `none` first, each once; values apart by slashes are as many policies."""
    found: list[Policy] = [NoCache()]
    for text in texts:
        name, options = options_of(text)
        choices = [[(key, value) for value in values.split("/")] if key != "adapters" else [(key, values)]
                   for key, _, values in (option.partition("=") for option in options)]  # fmt: skip
        for chosen in itertools.product(*choices):
            found.append(parse_policy(":".join([name, *(f"{key}={value}" for key, value in chosen)])))
    unique: dict[str, Policy] = {spelled(policy): policy for policy in reversed(found)}
    return [unique[name] for name in dict.fromkeys(spelled(policy) for policy in found)]


@dataclass(frozen=True, kw_only=True)
class CachesConfig:
    """What is compared, on what, and how it is decoded and scored."""

    policies: tuple[Policy, ...]
    lengths: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    data: str | None = None
    task: Task | None = None
    prompts: PromptFile | None = None
    new_tokens: int = 64
    samples: int = 16
    shared: Shared | None = None
    seed: int = 0
    block: int = BLOCK
    sub_block: int | None = None
    reveal: str = "threshold=0.9"
    draws: int = 8
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1

    def __post_init__(self) -> None:
        if sum(source is not None for source in (self.data, self.task, self.prompts)) != 1:
            raise InputError(
                "give either --data, a folder of prepared text, --task, a retrieval task, or --prompts, a file of your own"
            )
        if self.prompts is not None:
            self._check_prompts(self.prompts)
        for name in ("new_tokens", "samples", "block"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")
        if self.draws < 0:
            raise InputError(f"--draws is {self.draws}; it must be 0 (no bound) or more")
        for batch in self.batches:
            if batch < 1 or self.samples % batch:
                raise InputError(
                    f"--samples {self.samples} is no multiple of the batch {batch}: every batch must be full"
                )
        if min(self.lengths) <= self.new_tokens and self.data is not None:
            raise InputError(
                f"--lengths {min(self.lengths)} leaves no prompt before {self.new_tokens} new tokens; take longer ones"
            )
        if self.dtype not in DTYPES:
            raise InputError(f"unknown dtype {self.dtype!r}; one of {', '.join(DTYPES)}")
        if isinstance(self.rule(), (Ancestral, FirstHitting)):
            raise InputError(
                f"--reveal {self.reveal} draws at random, so no two decodes could be compared: use another"
            )
        if not 0 <= self.seed < 2**63:
            raise InputError(f"--seed is {self.seed}; it must be from 0 to 2^63 - 1")

    def _check_prompts(self, prompts: PromptFile) -> None:
        if self.shared is not None:
            raise InputError(f"{prompts.path} says itself what is shared: leave --shared out")
        if self.lengths != (prompts.length,):
            raise InputError(
                f"prompts and answers of {prompts.path} are {prompts.length} tokens long: leave --lengths out"
            )
        if len(prompts.samples) < self.samples:
            raise InputError(
                f"{prompts.path} holds {len(prompts.samples)} prompts, {self.samples} are asked for: take fewer"
            )

    def rule(self) -> Reveal:
        return parse_reveal(self.reveal)

    @property
    def shares(self) -> bool:
        """Whether any part of the prompts is named as shared."""
        return self.shared is not None or (self.prompts is not None and bool(self.prompts.spans))

    @property
    def shared_name(self) -> str | None:
        """What is shared, in a word."""
        if self.prompts is not None:
            return self.prompts.shared
        return None if self.shared is None else f"{self.shared.place}={self.shared.share:g}"

    def spans(self, prompt_tokens: int) -> tuple[tuple[int, int], ...]:
        """(start, end) of the shared parts of prompts of so many tokens."""
        if self.prompts is not None:
            return self.prompts.spans
        return () if self.shared is None else (self.shared.span(prompt_tokens),)


@dataclass(frozen=True)
class Cell:
    """One subject, policy, length and batch: `samples` rows of results."""

    subject: Subject
    kind: str  # BIDIRECTIONAL or CAUSAL
    policy: Policy
    length: int
    batch: int
    prompts: str  # what the prompts are, with a fingerprint
    config: CachesConfig

    @property
    def spelled(self) -> str:
        return spelled(self.policy)

    @property
    def baseline(self) -> Cell:
        return Cell(self.subject, self.kind, NoCache(), self.length, self.batch, self.prompts, self.config)

    def identity(self, index: int) -> dict[str, object]:
        """What makes a row the same one."""
        config = self.config
        blocks = config.block if self.kind == BIDIRECTIONAL else config.sub_block
        return {
            "task": "caches",
            "subject": self.subject.name,
            "policy": self.spelled,
            "length": self.length,
            "batch": self.batch,
            "index": index,
            "prompts": self.prompts,
            "shared": config.shared_name,
            "block": blocks,
            "decoding": config.reveal,
            "draws": f"{DESIGN}/{config.draws}",
            "seed": config.seed,
            "dtype": config.dtype,
            "device": config.device,
            "threads": config.threads,
        }


def kind_of(subject: Subject, given: str | None) -> str:
    """A model whose block is as long as its training rows is bidirectional. Raises InputError where that is not known."""
    if given == BIDIRECTIONAL and "M" in subject.config.pattern:
        raise InputError(
            f"--kind bidirectional is for attention alone, and {subject.name} has the pattern {subject.config.pattern}"
        )
    if given is not None:
        return given
    trained = training_length(subject)
    if trained is None:
        raise InputError(
            f"{subject.name} does not say how long its training rows were: give --kind bidirectional or --kind block-causal"
        )
    return BIDIRECTIONAL if trained == subject.config.block_length else CAUSAL


def list_cells(
    subjects: list[tuple[Subject, str]], config: CachesConfig, prompts: dict[str, str]
) -> tuple[list[Cell], dict[str, list[str]]]:
    """All cells that have an object, the uncached decode first, and by sentence the subjects where a policy has none.

    subjects with their kinds; prompts: what those of each subject are. Raises InputError where nothing is left but none,
    though something else was asked for, and for policies that share parts where none is named.
    """
    cells: list[Cell] = []
    sentences: dict[str, list[str]] = {}
    for policy in config.policies:
        if policy.spans and not config.shares:
            raise InputError(f"policy {policy.name} shares parts of prompts: say which with --shared, as in prefix=0.5")
    for subject, kind in subjects:
        if kind == BIDIRECTIONAL and config.data is not None and config.new_tokens < config.block:
            raise InputError(
                f"--new-tokens {config.new_tokens} are fewer than a block of {config.block}: write more, or take a smaller "
                "--block"
            )
        able = []
        for policy in config.policies:
            sentence = policy.without_object(subject.config, bidirectional=kind == BIDIRECTIONAL)
            if sentence is None:
                check_policy(policy, subject, config)
                able.append(policy)
            else:
                names = sentences.setdefault(sentence, [])
                names += [] if subject.name in names else [subject.name]
        cells += [
            Cell(subject, kind, policy, length, batch, prompts[subject.name], config)
            for length in sorted(set(config.lengths))
            for batch in sorted(set(config.batches))
            for policy in able
        ]
    if len(config.policies) > 1 and all(isinstance(cell.policy, NoCache) for cell in cells):
        raise InputError("; ".join(sentences))
    return cells, sentences


def check_policy(policy: Policy, subject: Subject, config: CachesConfig) -> None:
    """InputError for what would end a run half-way: parameters or shared parts that do not fit."""
    if isinstance(policy, SharedPrefix) and max(config.batches) > 1:
        _check_one_prefix(config)
    prompt = min(config.lengths) - (config.new_tokens if config.data is not None else 0)
    policy.check(subject.config, config.spans(prompt) if policy.spans else ())


def _check_one_prefix(config: CachesConfig) -> None:
    """InputError where the rows of a batch have no prefix in common."""
    rows = "policy fork shares one prefix among the rows of a batch"
    if config.task is not None:
        raise InputError(f"{rows}, and the prompts of a task share none: take --data, or --batch 1")
    if config.prompts is not None and not config.prompts.share_prefix():
        raise InputError(
            f"{rows}, and the prompts of {config.prompts.path} differ in the part that they name as shared: make it the "
            "same, or take --batch 1"
        )


def beyond_rows(cells: list[Cell]) -> list[str]:
    """A sentence for every bidirectional model that is asked beyond the rows it was trained on."""
    found: dict[Subject, set[int]] = {}
    for cell in cells:
        if cell.kind == BIDIRECTIONAL and cell.length > cell.subject.config.block_length:
            found.setdefault(cell.subject, set()).add(cell.length)
    return [
        f"{subject.name} was trained on rows of {subject.config.block_length} tokens and is asked at "
        f"{', '.join(map(str, sorted(lengths)))}: its positions there are new to it, and no bound is given."
        for subject, lengths in found.items()
    ]


def prompts_name(config: CachesConfig, fingerprint: str) -> str:
    """What the prompts are: the task, the file or the new tokens behind text, and the hash of what they are made of."""
    if config.prompts is not None:
        return f"{config.prompts.name} {config.prompts.fingerprint}"
    what = f"text+{config.new_tokens}" if config.task is None else spelled_task(config.task)
    return f"{what} {fingerprint}"
