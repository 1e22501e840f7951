"""What `mezzotint-eval lm-eval` does once its options are read: find tasks, run what is missing, write, print a table."""

from __future__ import annotations

import argparse
import difflib
import importlib
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from mezzotint.data.errors import InputError as DataInputError
from mezzotint.data.tokenizer import Tokenizer
from mezzotint.eval.bound_command import release_subjects, results_path
from mezzotint.eval.cells import DTYPES, parse_counts, require_threads
from mezzotint.eval.doctor import require_device
from mezzotint.eval.lm_eval_config import PRESET_TASKS, LMEvalConfig
from mezzotint.eval.lm_eval_release import (
    open_release,
    require_same_kind,
    require_same_kind_as_before,
    tokenizer_folder,
)
from mezzotint.eval.lm_eval_scores import BOUNDS, Scores
from mezzotint.eval.memory import is_out_of_memory
from mezzotint.eval.results import ResultsFile, cell_key
from mezzotint.eval.scoring_plan import Work, dry_run, scoring_bytes, scoring_flops
from mezzotint.eval.subjects import Subject, build
from mezzotint.models.errors import InputError
from mezzotint.models.reveal import parse_reveal


def run(options: argparse.Namespace) -> int:
    subjects = release_subjects(options.releases)
    config = read_config(options)
    require_device(config.device)
    require_threads(options.threads)
    torch.set_num_threads(options.threads)
    tokenizers = [open_release(subject) for subject in subjects]
    require_same_kind(subjects, tokenizers)
    module = import_harness()
    if options.dry_run:
        with tempfile.TemporaryDirectory() as folder:
            harness = find_tasks(module, subjects[0], config, Path(folder))
            print(dry_run(planned(harness, subjects, tokenizers, config), dtype=config.dtype, device=config.device))
        return 0
    out, rows = results_path(options.out, subjects), []
    named = {subject.name: subject.fingerprint for subject in subjects}
    with tempfile.TemporaryDirectory() as folder:
        harness = find_tasks(
            module, subjects[0], config, Path(folder)
        )  # a task that is not there leaves no file behind
        with ResultsFile(out, subjects=named, retry_failed=options.retry_failed) as results:
            require_same_kind_as_before(results, subjects[0], tokenizers[0])
            for subject, tokenizer in zip(subjects, tokenizers):
                rows += Runner(subject, tokenizer, config, module).run(harness, results)
    print(table(rows))
    print("written:", out)
    failed = [row for row in rows if row["status"] != "ok"]
    for row in failed:
        identity = row["identity"]
        print(f"{identity['subject']}, {identity['task']}: {row['status']}, {row['values'].get('message', '')}")
    return 2 if failed else 0


def planned(harness, subjects: list[Subject], tokenizers: list[Tokenizer], config: LMEvalConfig) -> list[Work]:
    """The cells of a dry run: every task with each release. The data are loaded, as they would be for the run."""
    asked = {
        name: harness.requests(name, task, limit=config.limit, num_fewshot=config.num_fewshot)
        for given in config.tasks
        for name, task in harness.load(given).items()
    }
    return [
        work(subject, name, [tuple(len(tokenizer.encode(text)) for text in pair) for pair in pairs], config)
        for subject, tokenizer in zip(subjects, tokenizers)
        for name, pairs in asked.items()
    ]


def work(subject: Subject, task: str, sizes: Sequence[tuple[int, ...]], config: LMEvalConfig) -> Work:
    """One cell from the tokens of (context, what is scored) of its requests; a text to be written counts as one block."""
    model, size = subject.config, subject.config.block_length
    longest = max((sum(pair) for pair in sizes), default=0)
    draws = config.draws_of(model)
    rows = min(config.batch_size, max(1, len(sizes)))
    return Work(
        subject=subject.name,
        what=task,
        texts=len(sizes),
        longest=longest,
        bytes=scoring_bytes(model, rows=rows, length=longest, canvases=draws.batch, itemsize=config.dtype.itemsize),
        flops=sum(
            scoring_flops(model, context=context, scored=scored or size, draws=draws.per_block if scored else 1)
            for context, scored in sizes
        ),
    )


def read_config(options: argparse.Namespace) -> LMEvalConfig:
    if options.dtype is not None and options.dtype not in DTYPES:
        raise InputError(f"unknown dtype {options.dtype!r}; one of {', '.join(DTYPES)}")
    default = torch.bfloat16 if options.device.startswith("cuda") else torch.float32
    named = tuple(name.strip() for name in options.tasks.split(",") if name.strip())
    preset = PRESET_TASKS[options.preset] if options.preset else ()
    return LMEvalConfig(
        tasks=tuple(dict.fromkeys((*named, *preset))),
        reveal=parse_reveal(options.reveal),
        limit=options.limit,
        num_fewshot=options.num_fewshot,
        draws=options.draws,
        seed=options.seed,
        batch_size=options.batch_size,
        draw_batch=options.draw_batch,
        greedy=options.greedy,
        lengths=parse_counts(options.lengths) if options.lengths else (),
        include_path=options.include_path,
        use_cache=options.use_cache,
        dtype=DTYPES[options.dtype] if options.dtype else default,
        device=options.device,
    )


def import_harness() -> ModuleType:
    """The module that imports lm_eval. InputError where that package is not there, or does not load."""
    try:
        return importlib.import_module("mezzotint.eval.lm_eval_model")
    except ImportError as error:
        raise InputError(
            f"this command needs lm-eval ({error.msg}): install it with pip install 'mezzotint[eval]'"
        ) from error
    except Exception as error:  # an old lm-eval beside a new transformers raises AttributeError
        raise InputError(
            f"lm-eval does not load beside the packages here ({type(error).__name__}: {error}): update it with "
            "pip install -U 'mezzotint[eval]'"
        ) from error


def find_tasks(module: ModuleType, subject: Subject, config: LMEvalConfig, folder: Path):
    """lm-eval's tasks, with a copy of the tokenizer in `folder`. InputError for a name that is none of theirs."""
    harness = module.Harness(
        config.tasks,
        include_path=config.include_path,
        tokenizer=tokenizer_folder(subject, folder / "tokenizer"),
        lengths=config.lengths,
    )
    unknown = [name for name in config.tasks if name not in harness.names]
    if unknown:
        near = difflib.get_close_matches(unknown[0], harness.names, n=1, cutoff=0.0)[0]
        raise InputError(f"lm-eval has no task {unknown[0]!r}; the nearest is {near!r}")
    return harness


class Runner:
    """Runs tasks on a subject; the model is built when the first one is not done yet."""

    def __init__(self, subject: Subject, tokenizer: Tokenizer, config: LMEvalConfig, module: ModuleType) -> None:
        self.subject, self.tokenizer, self.config, self.module = subject, tokenizer, config, module
        self._lm = None

    def run(self, harness, results: ResultsFile) -> list[dict]:
        """The results row of every task, run now or before. All data are loaded before the first task is run."""
        loaded: dict[str, object] = {}
        for name in self.config.tasks:
            known = harness.is_task(name) and results.done(self._identity(name))  # then its data are not needed
            loaded |= {name: None} if known else harness.load(name)
        for name, task in loaded.items():
            if not results.done(self._identity(name)):
                self._run_task(harness, name, task, results)
        return [results.get(self._identity(name)) or {} for name in loaded]

    def _identity(self, task: str) -> dict[str, object]:
        return self.config.identity(self.subject, task, version=self.module.VERSION, tokenizer=self.tokenizer)

    def _run_task(self, harness, name: str, task: object, results: ResultsFile) -> None:
        identity = self._identity(name)
        self._lm = self._lm or self._build()
        cache = None
        if self.config.use_cache:  # answers of other weights or settings have another file
            settings = {key: value for key, value in identity.items() if key not in ("task", "limit", "num_fewshot")}
            cache = f"{self.config.use_cache}-{self.subject.fingerprint}-{cell_key(settings)}"
        config = self.config
        try:
            scores = harness.run(
                self._lm, name, task, limit=config.limit, num_fewshot=config.num_fewshot, use_cache=cache
            )
        except (InputError, DataInputError):
            raise
        except Exception as error:  # a task's own functions may raise anything; the other tasks go on
            status = "oom" if is_out_of_memory(error) else "error"
            message = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
            results.append(identity, status=status, values={"message": message, "traceback": traceback.format_exc()})
            return
        results.append(identity, status="ok", values=values_of(scores))

    def _build(self):
        model = build(self.subject, dtype=self.config.dtype, device=self.config.device)
        return self.module.MezzotintLM(
            model,
            self.tokenizer,
            draws=self.config.draws_of(self.subject.config),
            batch_size=self.config.batch_size,
            reveal=self.config.reveal,
            decode_greedy=self.config.greedy == "decode",
        )


def values_of(scores: Scores) -> dict[str, object]:
    """A results row's values: the task's first metric as `value` and `stderr`, and all of them."""
    name, first = next(iter(scores.metrics.items()), ("", {"value": None, "stderr": None}))
    return {
        "metric": name,
        "value": first["value"],
        "stderr": first["stderr"],
        "n": scores.n,
        "metrics": scores.metrics,
        "task_version": scores.task_version,
        "num_fewshot": scores.num_fewshot,
        "prompts": scores.prompts,
        "samples": scores.samples,
    }


def table(rows: list[dict]) -> str:
    """One line a metric, as Markdown; `<=` where the value is an upper bound."""
    lines = ["| release | task | metric | | value | standard error | n |", "|---|---|---|---|---:|---:|---:|"]
    for row in rows:
        for metric, found in (row["values"].get("metrics") or {}).items():
            sign = "<=" if metric.partition(",")[0] in BOUNDS else ""
            error = "" if found["stderr"] is None else f"{found['stderr']:.4f}"
            subject, task = row["identity"]["subject"], row["identity"]["task"].removeprefix("lm-eval/")
            value = "not finite" if found["value"] is None else f"{found['value']:.4f}"
            lines.append(f"| {subject} | {task} | {metric} | {sign} | {value} | {error} | {row['values']['n']} |")
    return "\n".join(lines)
