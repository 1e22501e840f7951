"""lm-eval's scores in a report: every metric of every task, subjects beneath each other, bounds marked as such."""

from __future__ import annotations

from mezzotint.eval.lm_eval_scores import BOUNDS
from mezzotint.eval.report_section import Section, table

COLUMNS = (
    "task",
    "subject",
    "metric",
    "value",
    "standard error",
    "n",
    "examples",
    "prompts",
    "lm-eval",
    "decoding",
    "status",
)


def sections(rows: list[dict]) -> list[Section]:
    """One section for all tasks; none where there are no rows."""
    if not rows:
        return []
    shown: list[list[str]] = []
    lines: list[dict] = []
    for row in sorted(rows, key=lambda row: (row["identity"]["task"], row["identity"]["subject"])):
        identity, values = row["identity"], row["values"]
        task = identity["task"].removeprefix("lm-eval/")
        about = [identity.get("lm_eval", "-"), identity.get("decoding", "-"), row["status"]]
        if not values.get("metrics"):
            shown.append([task, identity["subject"], *["-"] * 6, *map(str, about)])
        for metric, found in (values.get("metrics") or {}).items():
            sign = "<= " if metric.partition(",")[0] in BOUNDS else ""
            value = "not finite" if found["value"] is None else f"{sign}{found['value']:.4f}"
            error = "-" if found["stderr"] is None else f"{found['stderr']:.4f}"
            counts = [str(values["n"]), str(values["num_fewshot"]), str(values["prompts"])]
            shown.append([task, identity["subject"], metric, value, error, *counts, *map(str, about)])
            lines.append(
                {"task": task, "subject": identity["subject"], "metric": metric, **found, "n": values["n"]}
                | {name: values[name] for name in ("num_fewshot", "prompts")}
                | {name: value for name, value in identity.items() if name not in ("task", "subject")}
            )
    text = (
        "Scores by lm-eval, under its names. Likelihoods are bounds; `<=` marks the values that are themselves upper "
        "bounds. Prompts: a hash, equal where subjects were asked the same."
    )
    return [Section("lm-eval", text + "\n\n" + table(list(COLUMNS), shown, left=3), {"lm-eval.csv": lines})]
