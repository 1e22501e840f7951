"""The reference's published figures of its 3B models beside ours, with ratios where both exist."""

from __future__ import annotations

from dataclasses import dataclass

from mezzotint.eval.memory import GB
from mezzotint.eval.report_section import number, table
from mezzotint.models.config import BACKBONES


@dataclass(frozen=True)
class Published:
    """A row of the reference's table: one H100, 262,144 tokens of context, batch 1, blocks of 32."""

    ms: float
    gb: float
    tokens_per_s: float


# arXiv 2609.11998, "Fixed State, Long Reach: What a Constant-Size Cache Buys Block Diffusion at Scale", 3B models
PUBLISHED = {
    "attention": Published(29.31, 81.91, 114),
    "mamba": Published(6.76, 7.65, 297),
    "hybrid": Published(10.74, 21.52, 231),
}
REFERENCE_CONTEXT = 262_144
REFERENCE = (
    "Beside the reference (arXiv 2609.11998: 3B models, one H100, 262,144 tokens of context, one row). `of "
    "attention`: what attention takes or holds, over this model; the reference's, then ours. GB of ours is the peak "
    "by count of storages; where it does not fit, weights and state. The reference's Mamba decodes 1593 tok/s at "
    "batch 8."
)


def reference_table(rows: list[dict]) -> str:
    """Our 3b presets at 262,144 tokens and one row beside the published figures, with ratios where both exist; else ''."""
    found: dict[str, dict] = {}
    for row in rows:
        identity = row["identity"]
        backbone = identity["subject"].removeprefix("3b-")
        at = (identity["context"], identity["batch"], identity["mode"]) == (REFERENCE_CONTEXT, 1, "eager")
        if at and identity["subject"] != backbone and backbone in BACKBONES:
            found[backbone] = row["values"]
    if not found:
        return ""
    lines: list[list[str]] = []
    for backbone in BACKBONES:
        if backbone not in found:
            continue
        published = PUBLISHED.get(backbone)
        theirs = (published.ms, published.gb, published.tokens_per_s) if published else (None, None, None)
        first = PUBLISHED["attention"]
        theirs_first = (first.ms, first.gb, first.tokens_per_s)
        ours, ours_first = _quantities(found[backbone]), _quantities(found.get("attention", {}))
        for i, name in enumerate(("ms a denoising step", "GB", "tok/s")):
            ratios = (_over(ours[i], theirs[i]), _over(theirs_first[i], theirs[i]), _over(ours_first[i], ours[i]))
            lines.append([f"3b-{backbone}", name, number(theirs[i]), number(ours[i]), *map(number, ratios)])
    columns = [
        "model",
        "quantity",
        "reference",
        "ours",
        "ours / reference",
        "of attention: reference",
        "of attention: ours",
    ]
    return table(columns, lines, left=2)


def _quantities(values: dict) -> tuple[float | None, float | None, float | None]:
    """ms a step, GB, tokens/s as decoded (else of passes alone, 8 steps)."""
    if not values:
        return None, None, None
    step = values["denoise_s"] * 1e3 if "denoise_s" in values else None
    peak = values.get("peak_bytes", values["needed_bytes"]) / GB
    return step, peak, values.get("block_tokens_per_s", values.get("tokens_per_s_8"))


def _over(top: float | None, bottom: float | None) -> float | None:
    return top / bottom if top is not None and bottom else None
