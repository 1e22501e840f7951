"""What is kept of a task that lm-eval ran: metrics with standard errors, which of them are bounds, values by document."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mezzotint.eval.tally import ratio

Metrics = dict[str, dict[str, float | None]]  # {metric: {"value": ..., "stderr": ...}}
# metrics of likelihood, of which ours are bounds: the model's own are at most these
BOUNDS = ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte", "nats_per_token")


@dataclass(frozen=True)
class Scores:
    """A task's metrics {name: {value, stderr}} over `n` documents; samples: {metric: one value a document}."""

    metrics: Metrics
    n: int
    task_version: object
    num_fewshot: object
    prompts: str  # hash of all prompts, in order
    samples: dict[str, list[float]]


def metrics_of(values: dict) -> Metrics:
    """{metric: {value, stderr}} from lm-eval's `metric,filter` keys; the filter is named where it is not `none`.

    A value of None is not finite. RULER's metrics are prompt lengths; -1 stands for those that were not run.
    """
    found: Metrics = {}
    for key, value in values.items():
        metric, _, kind = key.partition(",")
        if not kind or metric.endswith("_stderr") or not isinstance(value, (int, float)):
            continue
        if metric.isdigit() and value == -1:
            continue
        error = values.get(f"{metric}_stderr,{kind}")
        stderr = float(error) if isinstance(error, (int, float)) and math.isfinite(error) else None
        known = float(value) if math.isfinite(value) else None
        found[metric if kind == "none" else f"{metric},{kind}"] = {"value": known, "stderr": stderr}
    return found


def with_errors(metrics: Metrics, samples: list[dict]) -> Metrics:
    """Standard errors over documents for the ratios that lm-eval gives none for, by linearization."""
    found = dict(metrics)
    for name in ("bits_per_byte", "byte_perplexity", "word_perplexity"):
        if name in metrics and metrics[name]["stderr"] is None:
            pairs = [sample[name] for sample in samples]
            value, error = ratio([-float(top) for top, _ in pairs], [float(below) for _, below in pairs])
            scale = 1 / math.log(2) if name == "bits_per_byte" else math.exp(min(value, 700.0))
            found[name] = metrics[name] | {"stderr": error * scale if math.isfinite(error) else None}
    return found


def per_token(nats: list[float], tokens: list[float]) -> Metrics:
    """Nats per token of documents of so many nats and tokens, with its standard error over them."""
    value, error = ratio(nats, tokens)
    finite = math.isfinite(value)
    return {"nats_per_token": {"value": value if finite else None, "stderr": error if math.isfinite(error) else None}}


def per_sample(metrics: dict, samples: list[dict]) -> dict[str, list[float]]:
    """Each document's value of every metric that is a number a document."""
    return {
        name: [float(sample[name]) for sample in samples]
        for name in metrics
        if all(isinstance(sample.get(name), (int, float)) for sample in samples)
    }
