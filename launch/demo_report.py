"""The report of the demo: one table from what the steps wrote, with the machine named, as Markdown and JSON."""

from __future__ import annotations

import json
import math
import os
import platform
import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mezzotint.data.files import write_bytes, write_json
from mezzotint.data.rows import RowSource
from mezzotint.data.tokenizer import load_tokenizer
from mezzotint.eval.bound import summarize
from mezzotint.eval.doctor import cpu_name
from mezzotint.eval.score import spread
from mezzotint.eval.timing import load_average
from mezzotint.models.config import parameter_count
from mezzotint.models.weights import load_config

MIB = 2**20


def write_report(root: Path, *, arms: list[str], row_length: int, seconds: float) -> str:
    """Write report.json and report.md under `root`; returns the table. `seconds` of this call are added to earlier ones."""
    speed = read_lines(root / "results" / "speed.jsonl")
    found = {arm: arm_facts(root, arm, speed) for arm in arms}
    report: dict[str, Any] = {
        "machine": machine(),
        "seconds_of_finished_runs": seconds + earlier_seconds(root),
        "arms": found,
        "row_length": row_length,
        "unigram": unigram(root, row_length=row_length, arm=next(iter(found.values()))),
    }
    report["below_unigram"] = {
        arm: 1 - facts["bound"]["bits_per_byte"] / report["unigram"]["bits_per_byte"] for arm, facts in found.items()
    }
    text = markdown(report)
    write_json(root / "report.json", report)
    write_bytes(root / "report.md", text.encode())
    return table(report)


def earlier_seconds(root: Path) -> float:
    """What earlier calls took that came to an end, 0 before the first."""
    path = root / "report.json"
    return json.loads(path.read_text(encoding="utf-8")).get("seconds_of_finished_runs", 0.0) if path.exists() else 0.0


def arm_facts(root: Path, arm: str, speed: list[dict]) -> dict:
    """What one arm's steps left behind."""
    config = load_config(root / "releases" / arm)
    trained = [row for row in read_lines(root / "runs" / arm / "metrics.jsonl") if row["kind"] == "train"]
    scored = [row["values"] for row in read_lines(root / "results" / f"{arm}-bound.jsonl") if row.get("status") == "ok"]
    exported = (root / "results" / f"{arm}-export.txt").read_text(encoding="utf-8")
    cells = {
        row["identity"]["context"]: row["values"] | {"status": row["status"]}
        for row in speed
        if row.get("identity", {}).get("task") == "speed" and row["identity"]["subject"] == arm
    }
    return {
        "pattern": config.pattern,
        "block_length": config.block_length,
        "parameters": parameter_count(config),
        "tokens_seen": trained[-1]["tokens"],
        "steps": trained[-1]["step"],
        "training_seconds": trained[-1]["seconds"],
        "bound": asdict(summarize(scored)),
        "reload_difference": float(re.findall(r"largest difference of a logit ([\d.e+-]+)", exported)[-1]),
        "sample": json.loads((root / "results" / f"{arm}-sample.json").read_text(encoding="utf-8")),
        "speed": {str(context): cells[context] for context in sorted(cells)},
    }


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def unigram(root: Path, *, row_length: int, arm: dict) -> dict:
    """An ideal token-unigram coder, fitted on the very rows that were scored; fill tokens cost it nothing."""
    rows = RowSource(root / "data" / "heldout", row_length, arm["block_length"])
    lengths = load_tokenizer(root / "tokenizer").token_bytes
    counts: Counter = Counter()
    for number in spread(len(rows), arm["bound"]["rows"]):
        row = rows[number]
        counts.update(row.tokens[(row.documents >= 0) & ~row.fill].tolist())
    total = sum(counts.values())
    bits = -sum(count * math.log2(count / total) for count in counts.values())
    return {
        "bits_per_byte": bits / sum(int(lengths[token]) * count for token, count in counts.items()),
        "tokens": total,
    }


def machine() -> dict:
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": load_average(),
    }


def table(report: dict) -> str:
    """One line an arm."""
    lines = [
        "| | parameters | tokens seen | training s | held-out bits/byte (<=) | below unigram | denoise ms, 1k / 256k "
        "| state MiB, 1k / 256k | tokens/NFE | reload |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for arm, facts in report["arms"].items():
        first, last = (facts["speed"][key] for key in (str(2**10), str(2**18)))
        bound = facts["bound"]
        lines.append(
            f"| {arm} | {facts['parameters'] / 1e6:.2f}M | {facts['tokens_seen']:,} | {facts['training_seconds']:.0f} "
            f"| {bound['bits_per_byte']:.3f} ± {bound['bits_per_byte_error']:.3f} | {report['below_unigram'][arm]:.0%} "
            f"| {milliseconds(first)} / {milliseconds(last)} "
            f"| {first['state_bytes'] / MIB:.2f} / {last['state_bytes'] / MIB:.2f} "
            f"| {facts['sample']['tokens_per_nfe']:.2f} | {facts['reload_difference']:.1g} |"
        )
    return "\n".join(lines) + "\n"


def milliseconds(cell: dict) -> str:
    return f"{cell['denoise_s'] * 1e3:.1f}" if "denoise_s" in cell else cell["status"]


def markdown(report: dict) -> str:
    """The whole report."""
    about, first = report["machine"], next(iter(report["arms"].values()))
    bound = first["bound"]
    parts = [
        "# mezzotint demo\n",
        f"{about['cpu']}, {about['cores']} cores, Python {about['python']}, torch {about['torch']}, load average "
        f"{about['load_average']:.1f} at the end. One thread a model; state in float32. "
        f"{report['seconds_of_finished_runs']:.0f} s in all calls of `make demo` that came to their end.\n",
        table(report),
        f"Bound: {bound['rows']} held-out rows of {report['row_length']} tokens ({bound['bytes']:,} bytes), ± one standard "
        "error over rows. "
        f"An ideal token-unigram coder fitted on the same rows needs {report['unigram']['bits_per_byte']:.3f} bits/byte. "
        "Training seconds are those of one thread beside another arm. 1 MiB = 2^20 bytes. Tokens/NFE of one sample at up to "
        f"8 steps a block of {first['block_length']}.\n",
        "![latency](results/speed-latency.png)\n\n![memory](results/speed-memory.png)\n",
        "## Samples\n",
    ]
    for arm, facts in report["arms"].items():
        parts.append(f"{arm}:\n\n````\n{facts['sample']['texts'][0]}\n````\n")
    return "\n".join(parts)
