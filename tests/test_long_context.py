"""The study of long contexts: its commands, its verdicts on made-up rows, and all of it on tiny models."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from report_support import speed_rows

from mezzotint.eval.results import read_results
from mezzotint.models.config import preset
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.weights import save_weights

PATH = Path(__file__).resolve().parents[1] / "eval" / "studies" / "long_context.py"
spec = importlib.util.spec_from_file_location("long_context", PATH)
assert spec and spec.loader
study = importlib.util.module_from_spec(spec)
sys.modules["long_context"] = study
spec.loader.exec_module(study)


@pytest.fixture(scope="module")
def releases(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("releases")
    for backbone in ("attention", "mamba"):
        save_weights(Denoiser(preset("debug", backbone), generator=torch.Generator().manual_seed(0)), folder / backbone)
    return [str(folder / backbone) for backbone in ("attention", "mamba")]


def prompt_rows(*, peaks: list[float], rates: list[float], states: list[int]) -> list[dict]:
    rows = []
    for context, peak, rate, state in zip((4096, 16384, 65536, 262144), peaks, rates, states):
        values = {
            "pattern": "MM", "process_peak_bytes": peak, "prefill_tokens_per_cpu_s": rate, "prefill_tokens_per_s": rate,
            "state_bytes": state, "decoded_tokens": 64,
        }  # fmt: skip
        identity = {"task": "speed/prefill", "subject": "mamba", "context": context}
        rows.append({"identity": identity, "status": "ok", "values": values})
    return rows


def test_claims_hold_or_fail_by_what_was_measured():
    good = {"peaks": [1.0, 2.0, 2.05, 2.09], "rates": [50, 100, 95, 91], "states": [7, 7, 7, 7]}
    assert [claim.holds for claim in study.check(prompt_rows(**good))] == [True] * 4
    for change in ({"peaks": [2, 2, 2, 2.2]}, {"rates": [100, 100, 100, 89]}, {"states": [7, 7, 7, 8]}):
        assert [claim.holds for claim in study.check(prompt_rows(**good | change))].count(False) == 1
    lost = prompt_rows(**good)
    lost[-1] |= {"status": "oom"}
    assert [claim.holds for claim in study.check(lost)] == [False]


def test_a_preset_that_does_not_fit_is_told_with_its_bytes():
    rows = [row for row in speed_rows("3b-attention", growth=1.0) if row["identity"]["context"] == 262144]
    (claim,) = study.check(rows)
    assert claim.holds and "needs 0.07 GB (0.06 GiB), 10.00 GB (9.31 GiB) were available" in claim.found
    failed = [rows[0] | {"status": "error"}]
    assert not study.check(failed)[0].holds


def test_the_commands_are_printed(releases, tmp_path, capsys):
    assert study.main([*releases, "--out", str(tmp_path / "out"), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines] == ["speed", "speed", "speed", "report"]
    assert "--real-prefill 256k" in lines[0] and releases[1] in lines[0] and "--real-prefill 16k" in lines[1]
    assert "--presets 3b" in lines[2] and not (tmp_path / "out").exists()
    assert study.main([str(tmp_path / "nowhere")]) == 2


@pytest.mark.slow
def test_the_study_runs_and_runs_again(releases, tmp_path):
    small = ["--contexts", "64,512", "--prompt", "512", "--attention-prompt", "128", "--preset", "debug"]
    command = [
        sys.executable,
        str(PATH),
        *releases,
        *small,
        "--preset-context",
        "64",
        "--quick",
        "--out",
        str(tmp_path),
    ]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
        claims = [line for line in done.stdout.splitlines() if line.startswith(("holds", "FAILS"))]
        assert len(claims) == 2 + 2 + 5, done.stdout
        assert "512 tokens are read and 32 decoded" in done.stdout and "same to the byte" in done.stdout
        rows = {path.name: len(read_results(path).rows) for path in tmp_path.glob("*.jsonl")}
        assert rows == {"fixed.jsonl": 2 + 1 + 2 + 1, "growing.jsonl": 2 + 1 + 2 + 1, "debug.jsonl": 5 + 1}
    assert (tmp_path / "report" / "report.md").exists()
