"""The study of confidence: its measures on cases made by hand, its bound against the plain one, and that it resumes."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support import generator, tiny_config, tiny_model

from mezzotint.data.cli import run_command
from mezzotint.eval.bound import Draws
from mezzotint.eval.caches_bound import written_bound
from mezzotint.eval.draws import block_draws
from mezzotint.models.errors import InputError
from mezzotint.models.reveal import Sampler

STUDIES = Path(__file__).resolve().parents[1] / "eval" / "studies"


def load(name):
    spec = importlib.util.spec_from_file_location(name, STUDIES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


report = load("confidence_report")
study = load("confidence")


def test_repetition_and_distinct_grams_of_texts_made_by_hand():
    assert study.repeated([7] * 9) == pytest.approx(5 / 6)  # six 4-grams, one of them new
    assert study.repeated([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert study.repeated([1, 2, 3]) == 0
    assert study.distinct([1, 2, 1, 2], 1) == 1 / 2
    assert study.distinct([1, 2, 1, 2], 2) == pytest.approx(2 / 3)
    assert study.distinct([5], 2) == 1


def test_eos_is_never_drawn():
    logits = torch.zeros(2, 3, 5)
    logits[..., 1] = 50
    for temperature in (0.0, 1.0):
        assert (Sampler(temperature=temperature)(logits, generator()).tokens == 1).all()
        assert (study.Unending(temperature=temperature, eos=1)(logits, generator()).tokens != 1).all()


@pytest.mark.parametrize("pattern", ["AA", "MM", "AM"])
def test_bounds_of_many_texts_are_those_of_each(pattern, monkeypatch):
    """With masks of a block that depend on its place alone, against the bound of one text after another; float64."""
    monkeypatch.setattr(study.Draws, "of", lambda self, count, *, key, twin: block_draws(count, draws=5, key=key[-2:]))
    config = tiny_config(pattern, block_length=4)
    model = tiny_model(config)
    tokens = torch.randint(4, config.vocab_size, (3, 20), generator=generator())
    draws = Draws(per_block=5, batch=7)
    found = study.written_bounds(model, tokens, start=8, draws=draws)
    plain = [written_bound(model, row[:8].tolist(), row[8:].tolist(), draws=draws, key="") for row in tokens]
    np.testing.assert_allclose(found, plain, rtol=0, atol=1e-10)


def flat(rule, speed, bound, *, repeated=0.0):
    same = np.ones(3)
    measures = {"bound": bound * same, "repeated": repeated * same}
    return report.Point(rule, 4, speed * same, measures)


def test_curves_are_read_between_their_points_and_not_beyond():
    line = [flat("a", 1, 2.0), flat("b", 2, 3.0), flat("c", 8, 2.5), flat("d", 16, 4.0)]
    assert report.at_speed(line, "bound", np.array([math.sqrt(2)] * 3)) == pytest.approx([2.5] * 3)
    assert np.isnan(report.at_speed(line, "bound", np.array([0.9, 17, 16.1]))).all()
    fastest = report.fastest_as_good(line, np.array([2.25, 3.25, 1.0]))
    assert fastest[:2] == pytest.approx([2**0.25, 8 * math.sqrt(2)])  # the last crossing, not the one between a and b
    assert np.isnan(fastest[2])
    assert report.fastest_as_good(line, np.array([9.0] * 3)) == pytest.approx([16] * 3)


def test_a_point_is_a_ratio_of_sums_and_pairs_its_resamples():
    samples = [
        {"tokens": 8, "nfe": nfe, "nats": nats, "repeated": r, "distinct1": 1.0, "distinct2": 1.0}
        for nfe, nats, r in ((4, 8.0, 0.0), (8, 24.0, 0.5))
    ]
    first = report.point("threshold=0.1", samples)
    assert first.speed[0] == pytest.approx(16 / 12)
    assert first.measures["bound"][0] == 2
    assert first.measures["repeated"][0] == 0.25
    better = report.point("topk=2", [sample | {"nats": sample["nats"] - 8} for sample in samples])
    assert np.ptp(first.measures["bound"] - better.measures["bound"]) < 1e-12  # the difference has no spread


def test_the_study_resumes_and_reports(tmp_path, monkeypatch, capsys):
    config = tiny_config("AM", block_length=4)
    model = tiny_model(config)
    rows = torch.randint(4, config.vocab_size, (3, 16), generator=generator())
    monkeypatch.setattr(report, "RESAMPLED", 50)
    asked = tuple((heat, ("topk=4", "topk=2", "threshold=0.1")) for heat in (0.7, 0.0))
    sizes = study.StudyConfig(samples=3, prompt_tokens=8, new_tokens=8, draws=3, asked=asked)
    subject = study.Subject("tiny", "f" * 16, config, None)
    calls = []
    plain = study.written
    monkeypatch.setattr(study, "release_subject", lambda release: subject)
    monkeypatch.setattr(study, "held_out", lambda data, config, *, block: rows)
    monkeypatch.setattr(study, "build", lambda subject, *, dtype: model)
    monkeypatch.setattr(study, "written", lambda *a, **k: calls.append(k["rule"]) or plain(*a, **k))
    study.ask("tiny", "data", sizes, tmp_path)
    assert len(calls) == 7
    path = tmp_path / "tiny.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-2]) + "\n")  # stopped before the last two samples
    study.ask("tiny", "data", sizes, tmp_path)
    assert calls[7:] == ["threshold=0.1"]
    again = [json.loads(line) for line in path.read_text().splitlines()]
    values = [[row["values"] for row in part if "values" in row] for part in (again, map(json.loads, lines))]
    assert values[0] == values[1]
    assert study.main(["--report", "--out", str(tmp_path), "--tables", str(tmp_path)]) == 0
    assert "| tiny | 0.7 | threshold=0.1 | 3 |" in (tmp_path / "confidence.md").read_text()
    assert (tmp_path / "confidence.png").read_bytes().startswith(b"\x89PNG")


def test_bad_input_is_one_sentence(tmp_path, capsys):
    for arguments, word in (
        (["--report", "--out", str(tmp_path)], "run the study first"),
        (["--samples", "0"], "--samples is 0"),
        (["--release", str(tmp_path / "none")], "no release folder"),
    ):
        assert study.main(arguments) == 2
        assert word in capsys.readouterr().err
    asked = study.StudyConfig(prompt_tokens=6)
    assert run_command(lambda: study.held_out(tmp_path, asked, block=4), InputError) == 2
    assert "6 prompt tokens are no multiple of the block of 4" in capsys.readouterr().err
