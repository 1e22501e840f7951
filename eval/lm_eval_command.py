"""What `mezzotint-eval lm-eval` does once its options are read: find tasks, run what is missing, write, print a table."""

from __future__ import annotations

import argparse
import difflib
import importlib
import tempfile
import traceback
from pathlib import Path
from types import ModuleType

import torch

from mezzotint.data.errors import InputError as DataInputError
from mezzotint.eval.cells import DTYPES, parse_counts, require_threads
from mezzotint.eval.doctor import require_device
from mezzotint.eval.lm_eval_config import PRESET_TASKS, LMEvalConfig, open_release, tokenizer_folder
from mezzotint.eval.lm_eval_scores import BOUNDS, Scores
from mezzotint.eval.memory import is_out_of_memory
from mezzotint.eval.results import ResultsFile, cell_key
from mezzotint.eval.subjects import Subject, build, release_subject
from mezzotint.models.errors import InputError
from mezzotint.models.reveal import parse_reveal


def run(options: argparse.Namespace) -> int:
    subject = release_subject(options.release)
    config = read_config(options)
    require_device(config.device)
    require_threads(options.threads)
    torch.set_num_threads(options.threads)
    runner = Runner(subject, config)
    out = Path(options.out) if options.out else Path("runs/eval") / f"{subject.name[:100]}.jsonl"
    with tempfile.TemporaryDirectory() as folder:
        tasks = runner.find_tasks(Path(folder))  # before the file: a task that is not there leaves none behind
        with ResultsFile(out, subjects={subject.name: subject.fingerprint}) as results:
            rows = runner.run(tasks, results)
    print(table(rows))
    print("written:", out)
    failed = [row for row in rows if row["status"] != "ok"]
    for row in failed:
        print(f"{row['identity']['task']}: {row['status']}, {row['values'].get('message', '')}")
    return 2 if failed else 0


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


class Runner:
    """Runs tasks on a subject; the model is built when the first one is not done yet."""

    def __init__(self, subject: Subject, config: LMEvalConfig) -> None:
        self.subject, self.config = subject, config
        self.tokenizer = open_release(subject)
        self.module = import_harness()
        self._lm = None

    def find_tasks(self, folder: Path):
        """lm-eval's tasks. `folder` is for files that live as long as they. InputError for a name that is none of theirs."""
        harness = self.module.Harness(
            self.config.tasks,
            include_path=self.config.include_path,
            tokenizer=tokenizer_folder(self.subject, folder / "tokenizer"),
            lengths=self.config.lengths,
        )
        unknown = [name for name in self.config.tasks if name not in harness.names]
        if unknown:
            near = difflib.get_close_matches(unknown[0], harness.names, n=1, cutoff=0.0)[0]
            raise InputError(f"lm-eval has no task {unknown[0]!r}; the nearest is {near!r}")
        return harness

    def run(self, harness, results: ResultsFile) -> list[dict]:
        """The results row of every task, run now or before."""
        rows = []
        for name in self.config.tasks:
            if harness.is_task(name) and results.done(self._identity(name)):  # its data need not be loaded
                rows.append(results.get(self._identity(name)) or {})
                continue
            for task_name, task in harness.load(name).items():
                if not results.done(self._identity(task_name)):
                    self._run_task(harness, task_name, task, results)
                rows.append(results.get(self._identity(task_name)) or {})
        return rows

    def _identity(self, task: str) -> dict[str, object]:
        return self.config.identity(self.subject, task, version=self.module.VERSION)

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
    lines = ["| task | metric | | value | standard error | n |", "|---|---|---|---:|---:|---:|"]
    for row in rows:
        for metric, found in (row["values"].get("metrics") or {}).items():
            sign = "<=" if metric.partition(",")[0] in BOUNDS else ""
            error = "" if found["stderr"] is None else f"{found['stderr']:.4f}"
            task = row["identity"]["task"].removeprefix("lm-eval/")
            value = "not finite" if found["value"] is None else f"{found['value']:.4f}"
            lines.append(f"| {task} | {metric} | {sign} | {value} | {error} | {row['values']['n']} |")
    return "\n".join(lines)
