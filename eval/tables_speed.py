"""Speed cells as Markdown: latency beside its floors, memory, real prompts, and the reference's table beside ours."""

from __future__ import annotations

from mezzotint.eval.memory import GB, GIB
from mezzotint.eval.plots import short_count
from mezzotint.eval.report_section import number
from mezzotint.eval.roofline import CARDS
from mezzotint.eval.tables_reference import REFERENCE, reference_table

FLAT_FROM = 16_384  # tokens from which peak and rate of a real prompt are compared


def speed_tables(rows: list[dict], *, steps: int) -> str:
    """All tables of rows whose task is speed/..., each with a sentence on how it was made; the last line ends."""
    cells = ordered([row for row in rows if row["identity"]["task"] == "speed"])
    again = [row for row in rows if row["identity"]["task"] == "speed/drift"]
    prompts = ordered([row for row in rows if row["identity"]["task"] == "speed/prefill"])
    fills = ordered([row for row in rows if row["identity"]["task"] == "speed/fill"])
    parts = []
    if cells:
        parts += [_heading(cells, again), latency_table(cells, steps=steps), _memory_heading(), memory_table(cells)]
    if prompts:
        parts += [_prompt_heading(), prompt_table(prompts)]
    parts += [fill_sentence(row) for row in fills]
    beside = reference_table(cells)
    if beside:
        parts += [REFERENCE, beside]
    return "\n\n".join(parts) + "\n"


def ordered(rows: list[dict]) -> list[dict]:
    names = ("subject", "mode", "dtype", "batch", "context")
    return sorted(rows, key=lambda row: [row["identity"][name] for name in names])


def latency_table(rows: list[dict], *, steps: int) -> str:
    """One line a cell: times of the passes and their floors in ms, tokens/s at `steps` denoising steps a block."""
    cards = " | ".join(f"{card.name} floor" for card in CARDS)
    lines = [
        "| model | mode | context | batch | denoise ms | p10 to p90 | commit ms | advance ms | floor ms | over floor "
        f"| {cards} | tok/s, passes, {steps} steps | tok/s, decoded | status |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|" + "---:|" * len(CARDS) + "---:|---:|---|",
    ]
    for row in rows:
        values, measured = row["values"], ["-"] * 6
        rates = ["-", "-"]
        if "denoise_s" in values:
            measured = [
                number(values["denoise_s"] * 1e3),
                f"{number(values['denoise_p10_s'] * 1e3)} to {number(values['denoise_p90_s'] * 1e3)}",
                *(number(values[f"{name}_s"] * 1e3) for name in ("commit", "advance", "floor")),
                f"{values['denoise_s'] / values['floor_s']:.2f}",
            ]
            rates = [number(values[f"tokens_per_s_{steps}"]), number(values.get("block_tokens_per_s"))]
        lines.append(_line(_names(row) + measured + _card_floors(values) + rates + [row["status"]]))
    return "\n".join(lines)


def memory_table(rows: list[dict]) -> str:
    """One line a cell: bytes by count of storages and by process or allocator, prefill, time to the first block."""
    lines = [
        "| model | mode | context | batch | parameters | weights GB | state GB | peak GB | peak GiB | process or "
        "allocator GB | its prefill GB | prefill tok/s | first block s | status |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        values = row["values"]
        peak = values.get("peak_bytes", values["needed_bytes"])
        known = [f"{values['parameters'] / 1e6:.1f}M", number(values["weight_bytes"] / GB)]
        known += [number(values["state_bytes"] / GB), number(peak / GB), number(peak / GIB)]
        known += [_giga(values, "process_{}_peak_bytes", "allocated_{}_peak_bytes", part) for part in PARTS]
        rest = ["-", "-"]
        if "prefill_tokens_per_s" in values:
            rest = [number(values["prefill_tokens_per_s"]), number(values["first_block_8_s"])]
        lines.append(_line(_names(row) + known + rest + [row["status"]]))
    return "\n".join(lines)


PARTS = ("decode", "prefill")


def prompt_table(rows: list[dict]) -> str:
    """One line a checkpoint of a real prompt; peak and rate also as a multiple of those at FLAT_FROM tokens."""
    lines = [
        "| model | tokens read | prefill tok/s | of 16k | by CPU time | of 16k | state bytes | process peak MB | of "
        "16k | block of 8 steps ms | status |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        identity, values = row["identity"], row["values"]
        base: dict = next((other["values"] for other in rows if _same_prompt(other, row, context=FLAT_FROM)), {})
        cells = [identity["subject"], short_count(identity["context"])]
        for name, scale, digits in (
            ("prefill_tokens_per_s", 1, 0),
            ("prefill_tokens_per_cpu_s", 1, 0),
            ("state_bytes", 1, 0),
            ("process_peak_bytes", 1e-6, 1),
        ):
            cells.append(f"{values[name] * scale:.{digits}f}" if name in values else "-")
            if name != "state_bytes":
                both = name in values and name in base
                cells.append(f"{values[name] / base[name]:.3f}" if both else "-")
        cells.append(f"{values['block_s'] * 1e3:.1f}" if "block_s" in values else "-")
        lines.append(_line([*cells, row["status"]]))
    return "\n".join(lines)


def _same_prompt(other: dict, row: dict, *, context: int) -> bool:
    return other["identity"] == row["identity"] | {"context": context} and other["status"] == "ok"


def fill_sentence(row: dict) -> str:
    """How a random state compares with a real one."""
    identity, values = row["identity"], row["values"]
    return (
        f"{identity['subject']}: denoising at {short_count(identity['context'])} on a random state takes "
        f"{values['filled_over_real']:.3f} of the time on a really read one ({values['filled_over_real_cpu']:.3f} of "
        f"the CPU time); bytes {values['filled_bytes']} and {values['real_bytes']}."
    )


def _names(row: dict) -> list[str]:
    identity = row["identity"]
    return [identity["subject"], identity["mode"], short_count(identity["context"]), str(identity["batch"])]


def _card_floors(values: dict) -> list[str]:
    """ms on each card; in brackets where weights and state do not fit there."""
    cells = []
    for card in CARDS:
        name = f"floor_{card.name.lower()}"
        shown = number(values[f"{name}_s"] * 1e3) if f"{name}_s" in values else "-"
        cells.append(shown if values.get(f"{name}_fits", True) else f"({shown})")
    return cells


def _giga(values: dict, process: str, allocated: str, part: str) -> str:
    count = values.get(process.format(part), values.get(allocated.format(part)))
    return number(None if count is None else count / GB)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _heading(rows: list[dict], again: list[dict]) -> str:
    """How the cells were measured, in a few sentences; load averages and drift."""
    measured = [row for row in rows if "load" in row["values"]]
    if not measured:
        return "No cell fits into memory; peak is weights and state alone."
    identity, loads = measured[0]["identity"], [row["values"]["load"] for row in measured]
    sentences = [
        f"Medians on {identity['machine']} ({identity['device']}), {identity['threads']} thread(s), load average "
        f"{min(loads):.1f} to {max(loads):.1f}; state filled at random. tok/s of passes counts model passes alone, the "
        "commit in the next block's first pass; decoded: a block of 8 steps with sampling, until its tokens can be "
        "read. Floor: the bare matrix products, measured beside, and the state's bytes at the measured bandwidth. "
        "Floors of cards, in ms: bytes over bandwidth or FLOPs over peak "
        f"({'; '.join(card.source for card in CARDS)}), in brackets where it does not fit."
    ]
    if not identity["device"].startswith("cuda"):
        sentences.append("No graph rows: graphs are captured on a CUDA device.")
    drifts = [row["values"] for row in again if "drift" in row["values"]]
    if drifts:
        both = ", ".join(f"{values['drift']:.2f} ({values['drift_cpu']:.2f} by CPU time)" for values in drifts)
        sentences.append(f"The first cell, measured again last, took {both} of its first time.")
    noisy = sum(row["status"] == "noisy" for row in rows)
    if noisy:
        sentences.append(f"{noisy} cell(s) are noisy: p90 over 1.5 times p10.")
    return " ".join(sentences)


def _memory_heading() -> str:
    return (
        "GB is 10^9 bytes, GiB 2^30. Peak: weights, state and the most bytes of other tensors alive while decoding, "
        "by count of storages; for a cell that does not fit weights and state. Process: resident bytes of a process "
        "made for the cell, interpreter and libraries included; on CUDA the allocator's bytes. Time to the first "
        "block: prefill of the whole context, from the measured first and last chunk, and 8 denoising steps."
    )


def _prompt_heading() -> str:
    return (
        "Prompts that were really read, chunk after chunk in one process. Rate of the median chunk since the line "
        f"above; process peak since the model was built; of 16k: over the line at {FLAT_FROM:,} tokens."
    )
