"""Runs at one glance, in words: where each is, how it goes, how it ended; one as some lines, several as a table."""

from __future__ import annotations

from pathlib import Path

from mezzotint.models.errors import InputError
from mezzotint.training.glance import Glance, ago, glance
from mezzotint.training.metrics import duration

COLUMNS = ("run", "state", "step", "tokens", "loss", "bits/byte", "tokens/s", "checkpoint", "left", "skipped", "spikes")


def status(folders: list[Path]) -> tuple[str, list[str]]:
    """Text for the user, and a sentence for every folder that is no run."""
    found, faults = [], []
    for folder in folders:
        try:
            found.append(glance(folder))
        except InputError as error:
            faults.append(str(error))
    if len(folders) == 1:
        return "\n".join(lines(found[0])) if found else "", faults
    return table(found) if found else "", faults


def lines(run: Glance) -> list[str]:
    """One run, a line a subject; subjects that it has nothing to say about are left out."""
    seen = f", last record {ago(run.silent)}" if run.running and run.silent is not None else ""
    found = [("", f"{run.folder}: {run.state}{seen}")]
    share = f" of {run.steps:,} ({run.step / run.steps:.1%})" if run.steps else ""
    found.append(("step", f"{run.step:,}{share}"))
    if run.train is not None:
        t = run.train
        left = f", {duration(t.get('seconds_left'))} left" if run.step < (run.steps or 0) else ""
        starts = f" in {run.starts} start(s)" if run.starts else ""
        found.append(("time", f"{duration(t['seconds'])} of training{starts}{left}"))
        found.append(("tokens", f"{t['tokens']:,}"))
        loss = f"{_number(run.loss)} nats/token, mean of the last {run.averaged} record(s)"
        found.append(("loss", f"{loss}; gradient norm {_number(t['gradient_norm'])}, rate {t['lr']:.2e}"))
    if run.bound is not None:
        b = run.bound
        units = (("nats_per_token", "nats/token"), ("bits_per_byte", "bits/byte"))
        both = ", ".join(f"{_number(b[name])} ± {_number(b[name + '_error'])} {unit}" for name, unit in units)
        found.append(("bound", f"{both} (step {b['step']:,})"))
    if run.train is not None:
        found.append(("rate", _rate(run.train)))
        if "memory_bytes" in run.train:
            found.append(("memory", f"{size(run.train['memory_bytes'])} at most on a rank"))
    newest = "none" if run.checkpoint is None else f"{run.checkpoint.name}, written {ago(run.checkpoint_age)}"
    found += [("checkpoint", newest), ("disk", size(run.bytes))]
    for name, steps in (("skipped", run.skipped), ("spikes", run.spikes)):
        if steps:
            found.append((name, f"{len(steps)}, the last at step {steps[-1]:,}"))
    return [text if not name else f"  {name:<11} {text}" for name, text in found]


def table(runs: list[Glance]) -> str:
    """A line a run."""
    cells = [COLUMNS, *(_row(run) for run in runs)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(COLUMNS))]
    padded = ([c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))] for row in cells)
    return "\n".join("  ".join(row).rstrip() for row in padded)


def size(count: int) -> str:
    """Bytes in the unit that suits; 1 GB is 10^9."""
    for unit, length in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= length:
            return f"{count / length:.2f} {unit}"
    return f"{count / 1e3:.1f} kB"


def _row(run: Glance) -> tuple[str, ...]:
    train = run.train or {}
    left = duration(train.get("seconds_left")) if run.step < (run.steps or 0) else "-"
    newest = "-" if run.checkpoint is None else f"{run.checkpoint.name} {ago(run.checkpoint_age)}"
    return (
        str(run.folder),
        run.state.partition(":")[0],
        f"{run.step:,}/{run.steps:,}" if run.steps else f"{run.step:,}",
        f"{train['tokens']:,}" if train else "-",
        _number(run.loss),
        _number(run.bound["bits_per_byte"]) if run.bound else "-",
        f"{train['unique_tokens_per_second']:,.0f}" if train else "-",
        newest,
        left,
        str(len(run.skipped)),
        str(len(run.spikes)),
    )


def _rate(train: dict) -> str:
    parts = [
        (name, train[f"seconds_{name}"])
        for name in ("data", "forward", "backward", "step")
        if f"seconds_{name}" in train
    ]
    split = ": " + ", ".join(f"{name} {seconds:.3g}" for name, seconds in parts) if parts else ""
    step = f", {train['seconds_per_step']:.3g} s a step{split}" if "seconds_per_step" in train else ""
    return f"{train['unique_tokens_per_second']:,.0f} tokens/s, {train['utilization']:.1%} of peak{step}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
