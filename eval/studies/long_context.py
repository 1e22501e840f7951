"""Study: what a long context costs, to 262,144 tokens, for releases and for the 3b presets; with the claims checked.

    python eval/studies/long_context.py runs/demo/releases/attention runs/demo/releases/hybrid runs/demo/releases/mamba
    python eval/studies/long_context.py RELEASE... --dry-run          the commands alone

A release without attention layers really reads a prompt of 262,144 tokens and decodes behind it; the others read 16,384, and
are measured on randomly filled states beyond, which are held against the real ones at 16,384. The 3b presets have random
weights, and are measured at 262,144 tokens where they fit. Every step is a command of mezzotint-eval that goes on where it
stopped.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mezzotint.data.cli import run_command
from mezzotint.eval.memory import both_units
from mezzotint.eval.results import read_results
from mezzotint.eval.subjects import release_subject
from mezzotint.models.config import BACKBONES
from mezzotint.models.errors import InputError

PEAK, RATE = 1.05, 0.10  # how far the process peak and the rate of prefill may move from FROM tokens on
FILL = 0.10  # how far denoising on a random state may be from that on a real one
FROM = 16_384


@dataclass(frozen=True)
class Claim:
    """What was to be shown, what was found, and whether it holds."""

    text: str
    found: str
    holds: bool

    def __str__(self) -> str:
        return f"{'holds' if self.holds else 'FAILS'}: {self.text}: {self.found}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help="release folders, any backbones")
    parser.add_argument("--out", type=Path, default=Path("runs/long-context"), help="folder (default: %(default)s)")
    parser.add_argument(
        "--contexts", default="1k,4k,16k,64k,256k", metavar="LIST", help="tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--prompt", default="256k", metavar="N", help="of models without attention (default: %(default)s)"
    )
    parser.add_argument("--attention-prompt", default="16k", metavar="N", help="of the others (default: %(default)s)")
    parser.add_argument("--preset", default="3b", help="size with random weights, none to leave it out (default: 3b)")
    parser.add_argument("--preset-context", default="256k", metavar="N", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="fewer samples of every cell")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run none")
    options = parser.parse_args(arguments)
    return run_command(lambda: study(options), InputError)


def study(options: argparse.Namespace) -> int:
    """Run every step, then print the claims; 1 where one fails."""
    files: list[Path] = []
    for out, command in steps(options):
        files.append(out)
        _run(command, dry=options.dry_run)
    _run(["report", *map(str, files), "--out", str(options.out / "report")], dry=options.dry_run)
    if options.dry_run:
        return 0
    claims = [claim for path in files for claim in check(list(read_results(path).rows.values()))]
    for claim in claims:
        print(claim)
    return 0 if all(claim.holds for claim in claims) else 1


def steps(options: argparse.Namespace) -> Iterator[tuple[Path, list[str]]]:
    """(results file, command) of every measuring step."""
    subjects = [release_subject(folder) for folder in options.releases]
    quick = ["--quick"] if options.quick else []
    fixed = [str(subject.folder) for subject in subjects if "A" not in subject.config.pattern]
    growing = [str(subject.folder) for subject in subjects if "A" in subject.config.pattern]
    for name, releases, prompt in (("fixed", fixed, options.prompt), ("growing", growing, options.attention_prompt)):
        if releases:
            out = options.out / f"{name}.jsonl"
            real = ["--real-prefill", prompt, "--check-fill", options.attention_prompt]
            yield out, ["speed", *releases, "--contexts", options.contexts, *real, *quick, "--out", str(out)]
    if options.preset != "none":
        out = options.out / f"{options.preset}.jsonl"
        what = ["--presets", options.preset, "--backbones", ",".join(BACKBONES), "--contexts", options.preset_context]
        yield out, ["speed", *what, *quick, "--out", str(out)]


def _run(command: list[str], *, dry: bool) -> None:
    print("$ mezzotint-eval", shlex.join(command), flush=True)
    if not dry and subprocess.run([sys.executable, "-m", "mezzotint.eval", *command], check=False).returncode:
        raise InputError(
            f"the step mezzotint-eval {command[0]} ended in an error (above); run the study again to go on"
        )


def check(rows: list[dict]) -> list[Claim]:
    """The claims that rows of speed tasks can show."""
    claims: list[Claim] = []
    prompts = [row for row in rows if row["identity"]["task"] == "speed/prefill"]
    for subject in sorted({row["identity"]["subject"] for row in prompts}):
        own = sorted(
            (row for row in prompts if row["identity"]["subject"] == subject),
            key=lambda row: row["identity"]["context"],
        )
        if "A" not in own[0]["values"]["pattern"]:
            claims += _prompt_claims(subject, own)
    for row in rows:
        identity, values = row["identity"], row["values"]
        if identity["task"] == "speed/fill":
            ratio = values["filled_over_real_cpu"]
            text = f"{identity['subject']}: a random state stands for a real one at {identity['context']} tokens"
            claims.append(Claim(text, f"{ratio:.3f} of the CPU time", abs(ratio - 1) <= FILL))
        elif identity["task"] == "speed" and identity["subject"].partition("-")[0] in (
            "debug",
            "10m",
            "125m",
            "1b",
            "3b",
        ):
            claims.append(_preset_claim(identity, values, row["status"]))
    return claims


def _prompt_claims(subject: str, rows: list[dict]) -> list[Claim]:
    values, last = [row["values"] for row in rows], rows[-1]["identity"]["context"]
    if any(row["status"] != "ok" for row in rows):
        return [Claim(f"{subject}: a prompt of {last} tokens is read", ", ".join(row["status"] for row in rows), False)]
    states = {v["state_bytes"] for v in values}
    far = [row["values"] for row in rows if row["identity"]["context"] >= FROM]
    claims = [
        Claim(
            f"{subject}: {last} tokens are read and {values[-1]['decoded_tokens']} decoded behind them", "done", True
        ),
        Claim(f"{subject}: the state is the same to the byte", f"{sorted(states)} bytes", len(states) == 1),
    ]
    if len(far) > 1:
        peaks = [v["process_peak_bytes"] for v in far]
        growth = max(peaks) / peaks[0]
        claims.append(
            Claim(f"{subject}: the process peak is flat from {FROM} tokens on", f"x {growth:.3f}", growth <= PEAK)
        )
        rates = [v["prefill_tokens_per_cpu_s"] / far[0]["prefill_tokens_per_cpu_s"] for v in far]
        walls = [v["prefill_tokens_per_s"] / far[0]["prefill_tokens_per_s"] for v in far]
        found = f"{min(rates):.3f} to {max(rates):.3f} by CPU time, {min(walls):.3f} to {max(walls):.3f} on the clock"
        flat = all(abs(rate - 1) <= RATE for rate in rates)
        claims.append(Claim(f"{subject}: tokens/s of prefill are flat from {FROM} tokens on", found, flat))
    return claims


def _preset_claim(identity: dict, values: dict, status: str) -> Claim:
    """A preset either decodes a block, or is told with the bytes it would need."""
    text = f"{identity['subject']} at {identity['context']} tokens"
    if "block_s" in values:
        found = f"decodes {values['block_tokens_per_s']:.2f} tokens/s, {values['denoise_s']:.2f} s a step"
        peak = both_units(values.get("process_decode_peak_bytes", values["peak_bytes"]))
        return Claim(text, f"{found}, process peak {peak}", status in ("ok", "noisy"))
    needed, available = (both_units(values[f"{name}_bytes"]) for name in ("needed", "available"))
    return Claim(text, f"{status}: needs {needed}, {available} were available", status == "skipped_predicted_oom")


if __name__ == "__main__":
    sys.exit(main())
