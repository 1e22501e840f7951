"""Tables and figure of the study of cache policies, from the results files of its parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mezzotint.data.errors import InputError
from mezzotint.eval import environment
from mezzotint.eval.caches_table import NOTE, Line, lines_of_rows, paint, panels_of, table_of
from mezzotint.eval.intervals import mean_and_error
from mezzotint.eval.plots import draw
from mezzotint.eval.report_files import write_markdown
from mezzotint.eval.report_read import grouped
from mezzotint.eval.report_section import table
from mezzotint.eval.results import read_results
from mezzotint.models.policies.acache import ACache
from mezzotint.models.policies.table import parse_policy

PLACES = ("prefix", "infix", "suffix")
Rows = list[dict]


def write(answers: Path, folder: Path) -> str:
    """Write caches.md and caches.png of what there is; the text of the first.

    Raises InputError without answers, and where a table that stands there already would be lost.
    """
    found = {path.stem: _rows(path) for path in sorted(answers.glob("*.jsonl"))}
    if not found:
        raise InputError(f"{answers} holds no answers yet: run the study first")
    affixes = {place: found[f"affix-{place}"] for place in PLACES if f"affix-{place}" in found}
    compared = {name: rows for name, rows in found.items() if name.startswith(("recall-", "text-"))}
    lines = [line for rows in compared.values() for line in _lines(rows)]
    inside = [line for name, rows in found.items() if name.startswith("sub-") for line in _lines(rows)]
    made = sorted(
        {environment.describe(made) for path in answers.glob("*.jsonl") for made in read_results(path).environments}
    )
    parts = ["# Cache policies on small trained models", *(f"- {one}" for one in made)]
    if affixes:
        parts += ["## ACache: a shared part at three places", affix_table(affixes)]
    if "packets" in found:
        parts += ["## KV Packet: documents read alone", packet_table(found["packets"])]
    if lines:
        parts += ["## Every policy that has an object", table_of(lines), NOTE]
    if inside:
        parts += ["## Inside a block: decoded in sub-blocks, `none` runs the whole block every step", table_of(inside)]
    _keep_tables(folder / "caches.md", parts)
    folder.mkdir(parents=True, exist_ok=True)
    reading = folder / "reading.md"  # written by hand
    parts += [reading.read_text(encoding="utf-8").strip()] if reading.exists() else []
    text = "\n\n".join([*parts, "![speed and quality](caches.png)"]) + "\n"
    write_markdown(folder / "caches.md", text)
    shown = len(panels_of(lines)) + bool(affixes)
    if shown:
        draw(folder / "caches.png", lambda *axes: _paint(axes, affixes, lines), panels=shown, size=(5.5, 4))
    return text


def _keep_tables(path: Path, parts: list[str]) -> None:
    """InputError where `path` has a table that these parts have not: its answers lie elsewhere."""
    before = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    lost = [line[3:] for line in before if line.startswith("## ") and line != "## Reading" and line not in parts]
    if lost:
        raise InputError(
            f"{path} has tables whose answers are not here ({'; '.join(lost)}): run those parts too, or write to another "
            "--folder"
        )


def _rows(path: Path) -> Rows:
    return [row for row in read_results(path).rows.values() if row["status"] == "ok"]


def _lines(rows: Rows) -> list[Line]:
    names = ("subject", "policy", "length", "batch")
    return lines_of_rows(list(grouped(rows, lambda row: [row["identity"][name] for name in names]).values()))


def by_policy(rows: Rows) -> dict[str, list[float]]:
    """Share of right answers of every prompt, in the order of the prompts."""
    out: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        out.setdefault(row["identity"]["policy"], []).append((row["identity"]["index"], row["values"]["part"]))
    return {name: [share for _, share in sorted(marks)] for name, marks in out.items()}


def ratio_of(policy_name: str) -> float:
    """Anchors of an ACache, as a share of the affix."""
    policy = parse_policy(policy_name)
    assert isinstance(policy, ACache)
    return policy.ratio


def affix_table(affixes: dict[str, Rows]) -> str:
    """Answers right by place and ratio, and their difference from full recomputation prompt by prompt."""
    lines = []
    for place, rows in affixes.items():
        shares = by_policy(rows)
        none = shares["none"]
        for name in sorted((name for name in shares if name != "none"), key=ratio_of):
            lines.append(
                [place, f"{ratio_of(name):g}", str(len(none)), *_right(shares[name]), _difference(shares[name], none)]
            )
        lines.append([place, "full recomputation", str(len(none)), *_right(none), "-"])
    return table(["place", "anchors", "prompts", "right", "95%", "beside full, 95%"], lines, left=2)


def _right(shares: list[float]) -> tuple[str, str]:
    mean, error = mean_and_error(shares)
    return f"{mean:.3f}", f"{mean - 1.96 * error:.3f} to {mean + 1.96 * error:.3f}"


def _difference(ours: list[float], full: list[float]) -> str:
    mean, error = mean_and_error([a - b for a, b in zip(ours, full)])
    return f"{mean:+.3f} ± {1.96 * error:.3f}"


def packet_table(rows: Rows) -> str:
    """Answers right, document tokens recomputed, and what the soft tokens recover of the loss."""
    shares = by_policy(rows)
    trained = next((name for name in shares if "adapters=" in name), None)
    lines = []
    for name, values in shares.items():
        own = [row for row in rows if row["identity"]["policy"] == name]
        again = sum(_documents_recomputed(row) for row in own) if name != "none" else None
        told = [
            *_right(values),
            _difference(values, shares["none"]),
            "-" if again is None else f"{abs(round(again, 6)):g}",
        ]
        lines.append(["packet, trained soft tokens" if name == trained else name, str(len(values)), *told])
    columns = ["policy", "prompts", "right", "95%", "beside none, 95%", "document tokens recomputed"]
    text = table(columns, lines)
    if trained is None:
        return text
    share, low, high = recovered(shares["none"], shares["packet"], shares[trained])
    interval = f"95% {low:.2f} to {high:.2f} (bootstrap over prompts)"
    return f"{text}\n\nRecovered of what plain concatenation loses: {share:.2f}, {interval}."


def _documents_recomputed(row: dict) -> float:
    """Tokens beyond those of a request's own in every pass that its row ran in; 0 where no document was recomputed."""
    shared = sum(end - start for start, end in _spans(row["identity"]["shared"]))
    own = row["identity"]["length"] - shared
    passes = row["values"]["tokens_uncached"] / row["identity"]["length"]
    return row["values"]["tokens_recomputed"] - own * passes


def _spans(shared: str) -> list[tuple[int, int]]:
    return [(int(start), int(end)) for start, _, end in (part.partition("-") for part in shared.split(","))]


def recovered(full: list[float], plain: list[float], trained: list[float]) -> tuple[float, float, float]:
    """(trained - plain) / (full - plain), and its 95% interval by a paired bootstrap over prompts."""
    marks = np.array([full, plain, trained])
    chosen = np.random.default_rng(0).integers(marks.shape[1], size=(2000, marks.shape[1]))
    means = marks[:, chosen].mean(axis=2)  # (3, draws)
    loss = np.where(means[0] == means[1], np.nan, means[0] - means[1])
    low, high = np.nanpercentile((means[2] - means[1]) / loss, [2.5, 97.5])
    a, b, c = marks.mean(axis=1)
    return float((c - b) / (a - b)) if a != b else float("nan"), float(low), float(high)


def _paint(axes: tuple, affixes: dict[str, Rows], lines: list[Line]) -> None:
    if affixes:
        _paint_affixes(axes[0], affixes)
    if lines:
        paint(axes[bool(affixes) :], lines)


def _paint_affixes(panel, affixes: dict[str, Rows]) -> None:
    for number, (place, rows) in enumerate(affixes.items()):
        shares = by_policy(rows)
        names = sorted((name for name in shares if name != "none"), key=ratio_of)
        points = [mean_and_error(shares[name]) for name in names]
        panel.errorbar(
            [ratio_of(name) for name in names],
            [mean for mean, _ in points],
            yerr=[1.96 * error for _, error in points],
            fmt="o-",
            color=f"C{number}",
            capsize=2,
            label=place,
        )
        panel.axhline(mean_and_error(shares["none"])[0], color=f"C{number}", linestyle="--", linewidth=1)
    panel.set(
        xlabel="anchors, share of the affix", ylabel="answers right (95%)", title="ACache; dashed: full recomputation"
    )
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7)
