"""The one file that imports lm_eval: a release as a model of lm-eval, and lm-eval's tasks loaded and run."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval.api.model import CachingLM, TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from mezzotint.data.tokenizer import Tokenizer
from mezzotint.eval.bound import Draws
from mezzotint.eval.lm_eval_generate import Writing, parse_writing, write
from mezzotint.eval.lm_eval_score import Request, continuation_bounds
from mezzotint.eval.lm_eval_scores import Scores, metrics_of, per_sample, per_token, with_errors
from mezzotint.models.decode import generate
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.errors import InputError
from mezzotint.models.reveal import Reveal, Sampler, TopK

VERSION = installed("lm-eval")
SEEDS = {"random": 0, "numpy": 1234, "fewshot": 1234}  # lm-eval's own
DEFAULT_LENGTH = 4096  # of prompts that tasks make, lm-eval's own
VT_EXAMPLE = 500  # tokens that the example in ruler_vt's prompts may take
TRIES, MARGIN = 20, 10  # random prompts that are measured, and tokens that others may be longer
BOOTSTRAP = 1000  # resamples behind the standard errors of metrics that are no means


class MezzotintLM(TemplateLM):
    """A denoiser as lm-eval sees a model. Log-likelihoods are minus the likelihood bound, never more than the true ones.

    The masks of a request follow from its context (of a rolling one from its text) and the seed alone: choices of one
    question with as many tokens in a block have the same ones, and no batch changes a score. An empty context is an
    empty state: texts start without any token in front of them. Contexts are never cut.
    """

    backend = "causal"

    def __init__(
        self,
        model: Denoiser,
        tokenizer: Tokenizer,
        *,
        draws: Draws,
        batch_size: int,
        reveal: Reveal,
        decode_greedy: bool,
    ) -> None:
        super().__init__()
        self.model, self.text_tokenizer, self.draws, self.batch = model, tokenizer, draws, batch_size
        self.reveal, self.decode_greedy = reveal, decode_greedy

    @property
    def eot_token_id(self) -> int:
        return self.text_tokenizer.eos_id

    @property
    def tokenizer_name(self) -> str:
        return f"mezzotint-{self.text_tokenizer.sha256}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: object) -> list[int]:
        return self.text_tokenizer.encode(string)

    def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        encoded = []
        for context, continuation in (request.args for request in requests):
            before, after = self._encode_pair(context, continuation) if context else ([], self.tok_encode(continuation))
            if not after:  # the continuation's first letters belong to the context's last token
                before, after = self.tok_encode(context), self.tok_encode(continuation)
            encoded.append(((context, continuation), before, after))
        return self._loglikelihood_tokens(encoded, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **options) -> list[tuple[float, bool]]:
        asked = [Request(tuple(before), tuple(after), key=_digest(before)) for _, before, after in requests]
        found: list[tuple[float, bool]] = [(0.0, False)] * len(asked)
        answers = continuation_bounds(self.model, asked, draws=self.draws, contexts=self.batch)
        for number, answer in _progress(answers, len(asked), "loglikelihood", disable_tqdm):
            greedy = self._decodes_to(asked[number]) if self.decode_greedy else answer.greedy
            found[number] = (-answer.nats, greedy)
            self.cache_hook.add_partial("loglikelihood", requests[number][0], found[number])
        return found

    def _decodes_to(self, request: Request) -> bool:
        """Whether greedy decoding, the surest token a pass, writes the continuation."""
        written = generate(
            self.model,
            [list(request.context)],
            max_new_tokens=len(request.continuation),
            generator=torch.Generator().manual_seed(0),
            reveal=TopK(steps=self.model.config.block_length),
            sampler=Sampler(temperature=0.0),
        )
        return tuple(written.tokens[0]) == request.continuation

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        texts = [self.tok_encode(request.args[0]) for request in requests]
        asked = [Request((), tuple(tokens), key=_digest(tokens)) for tokens in texts]
        found = [0.0] * len(asked)
        answers = continuation_bounds(self.model, asked, draws=self.draws, contexts=self.batch)
        for number, answer in _progress(answers, len(asked), "loglikelihood_rolling", disable_tqdm):
            found[number] = -answer.nats
            self.cache_hook.add_partial("loglikelihood_rolling", requests[number].args, found[number])
        return found

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        kinds: dict[Writing, list[int]] = {}
        for number, request in enumerate(requests):
            kinds.setdefault(parse_writing(request.args[1]), []).append(number)
        found = [""] * len(requests)
        for writing, numbers in kinds.items():
            prompts = [self.tok_encode(requests[number].args[0]) for number in numbers]
            texts = write(
                self.model,
                self.text_tokenizer,
                prompts,
                writing,
                reveal=self.reveal,
                batch=self.batch,
                seed=self.draws.seed,
            )
            for place, text in _progress(texts, len(numbers), "generate_until", disable_tqdm):
                found[numbers[place]] = text
                self.cache_hook.add_partial("generate_until", requests[numbers[place]].args, text)
        return found


def _progress(answers: Iterable, total: int, name: str, disable: bool) -> Iterator:
    return iter(tqdm(answers, total=total, desc=name, disable=True if disable else None))


def _digest(tokens: Iterable[int]) -> str:
    return hashlib.sha256(repr(tuple(tokens)).encode()).hexdigest()


class Harness:
    """lm-eval's tasks: those in `include_path` and, unless all of `names` are there, its own.

    `tokenizer` is a folder that transformers can load, None if there is none, and `lengths` are those of the prompts,
    both for tasks that make their own data.
    """

    def __init__(
        self, names: Sequence[str], *, include_path: str | None, tokenizer: Path | None, lengths: Sequence[int]
    ) -> None:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        self.tokenizer, self.lengths = tokenizer, list(lengths) or [DEFAULT_LENGTH]
        metadata: dict = {"max_seq_lengths": self.lengths}
        if tokenizer is not None:
            metadata["tokenizer"] = str(tokenizer)
        try:
            self.manager = TaskManager(
                include_path=include_path, metadata=metadata, include_defaults=include_path is None
            )
            if include_path is not None and not set(names) <= set(self.manager.all_tasks):
                self.manager = TaskManager(include_path=include_path, metadata=metadata)
        except Exception as error:  # a task file of the user's that is no YAML, of any kind
            raise InputError(f"the tasks of lm-eval and in {include_path} cannot be read: {_first(error)}") from error

    @property
    def names(self) -> list[str]:
        """Tasks, groups and tags."""
        return list(self.manager.all_tasks)

    def is_task(self, name: str) -> bool:
        return name in self.manager.all_subtasks

    def load(self, name: str) -> dict[str, Any]:
        """The tasks that `name` means, by name, with their data. Raises InputError where these cannot be had.

        Some tasks make their data from the global generators: these are set anew for each name, so that a task's data do
        not depend on what was loaded before.
        """
        random.seed(SEEDS["random"])
        np.random.seed(SEEDS["numpy"])
        try:
            if self.tokenizer is not None:
                _refuse_endless(name, self.tokenizer, self.lengths)
            with contextlib.redirect_stdout(io.StringIO()):  # some tasks print while they make their data
                return _leaves(self.manager, name)
        except InputError:
            raise
        except Exception as error:  # whatever reading a file, a hub or a generator of data may raise
            raise InputError(
                f"the task {name} cannot be loaded ({type(error).__name__}: {_first(error)}): make its data available "
                "on this machine, or give its files with --include-path"
            ) from error

    def requests(self, name: str, task: Any, *, limit: int | None, num_fewshot: int | None) -> list[tuple[str, str]]:
        """(context, what is scored behind it) of every request of a loaded task; what is to be written is empty."""
        _set_shots(task, num_fewshot)
        with contextlib.redirect_stdout(io.StringIO()):
            task.build_all_requests(limit=limit, rank=0, world_size=1)
        kinds = {"loglikelihood": lambda args: args, "loglikelihood_rolling": lambda args: ("", args[0])}
        return [
            kinds.get(instance.request_type, lambda args: (args[0], ""))(instance.args) for instance in task.instances
        ]

    def run(
        self,
        lm: MezzotintLM,
        name: str,
        task: Any,
        *,
        limit: int | None,
        num_fewshot: int | None,
        use_cache: str | None,
    ) -> Scores:
        """Run one loaded task, by `evaluate`: `simple_evaluate` adds nothing to it but an inventory of the machine."""
        _set_shots(task, num_fewshot)
        answering = CachingLM(lm, f"{use_cache}_rank0.db") if use_cache else lm
        with contextlib.redirect_stdout(io.StringIO()):
            found = evaluate(answering, {name: task}, limit=limit, bootstrap_iters=BOOTSTRAP)  # type: ignore[arg-type]
        assert found is not None  # the only rank gets the results
        values = found["results"][name]
        samples = found["samples"][name]
        metrics = with_errors(metrics_of(values), samples)
        by_document = per_sample(metrics, samples)
        if task.OUTPUT_TYPE == "loglikelihood_rolling":
            by_document["nats"] = [-float(sample["filtered_resps"][0]) for sample in samples]
            by_document["tokens"] = [float(len(lm.tok_encode(sample["arguments"][0][0]))) for sample in samples]
            metrics |= per_token(by_document["nats"], by_document["tokens"])
        return Scores(
            metrics=metrics,
            n=len(samples),
            task_version=found["versions"].get(name),
            num_fewshot=found["n-shot"].get(name),
            prompts=hashlib.sha256("".join(str(sample["prompt_hash"]) for sample in samples).encode()).hexdigest()[:16],
            samples=by_document,
        )


def _set_shots(task: Any, num_fewshot: int | None) -> None:
    own = task.get_config("num_fewshot")
    if own != 0:  # a task that says 0 means it
        task.set_config(key="num_fewshot", value=num_fewshot if num_fewshot is not None else own or 0)
    task.set_fewshot_seed(seed=SEEDS["fewshot"])


def _refuse_endless(name: str, folder: Path, lengths: Sequence[int]) -> None:
    """InputError where lm-eval (0.4.9 to 0.4.13) would look for ever, or in vain, for a prompt that is short enough.

    Its generators of three of RULER's tasks shorten a prompt that is too long by a fixed step, and have no way out where
    their first and smallest one is. The sizes are measured as they measure them.
    """
    if name not in ("ruler_vt", "ruler_cwe", "ruler_fwe"):
        return
    import tokenizers
    from lm_eval.tasks.ruler import cwe_utils, fwe_utils, vt_utils

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    shortest = min(lengths)

    def most(make: Callable[[], str]) -> int:
        return max(len(tokenizer.encode(make()).ids) for _ in range(TRIES)) + MARGIN

    def vt(noises: int, example: bool) -> str:
        text, answer = vt_utils.generate_input_output(noises, 1, 4, is_icl=example)
        return f"{text} {answer}"

    def cwe() -> str:
        example, text, answer = cwe_utils.generate_input_output(10, shortest)
        return f"{example}\n{text} {' '.join(f'{i + 1}. {word}' for i, word in enumerate(answer))}"

    if name == "ruler_vt":
        example = most(lambda: vt(5, True)) + 30
        if example > VT_EXAMPLE:
            raise InputError(
                f"the task ruler_vt cannot be made with this tokenizer: the example in its prompts, at most {VT_EXAMPLE} "
                f"tokens long, would take {example}; leave the task out"
            )
        least = most(lambda: vt(10, False)) + 30 + example
    elif name == "ruler_cwe":
        least = most(cwe) + 120
    else:
        least = max(
            most(lambda: fwe_utils.TEMPLATE), 200
        )  # its vocabulary is a fiftieth of the length, 4 words at least
    if shortest < least:
        raise InputError(f"--lengths holds {shortest}; the task {name} needs at least {least} with this tokenizer")


def _leaves(manager: TaskManager, name: str) -> dict[str, Any]:
    if hasattr(manager, "load"):  # from 0.4.10 on
        return dict(manager.load([name])["tasks"])
    found: dict[str, Any] = {}
    nested = [manager.load_task_or_group([name])]
    while nested:
        for key, value in nested.pop().items():
            if isinstance(value, dict):
                nested.append(value)
            else:
                found[str(key)] = value[1] if isinstance(value, tuple) else value
    return found


def _first(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
