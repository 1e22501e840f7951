"""The study of frontiers: its FLOPs against torch's, curves and tables made by hand, and that it runs and goes on."""

import importlib
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import tiny_config
from torch.utils.flop_counter import FlopCounterMode
from training_support import corpus, recipe

from mezzotint.data.errors import InputError
from mezzotint.models.config import attention_flops_per_pair, visible_pairs
from mezzotint.training.build import make_plan
from mezzotint.training.config import load_recipe
from mezzotint.training.dry_run import dry_run
from mezzotint.training.loop import train

STUDIES = Path(__file__).resolve().parents[1] / "eval" / "studies"
NAMES = ("frontiers_curves", "frontiers_sitting", "frontiers_count", "frontiers_report", "frontiers")
TINY = ("model.preset=debug", "model.d_model=32", "model.d_ff=32", "model.n_heads=2", "model.n_kv_heads=2")
TINY += ("model.block=8", "model.chunk_length=8", "data.row_length=32")


@pytest.fixture(scope="module")
def studies():
    """The modules by name; as scripts they find each other because they lie in one folder."""
    sys.path.insert(0, str(STUDIES))
    yield {name: importlib.import_module(name) for name in NAMES}
    sys.path.remove(str(STUDIES))
    for name in NAMES:
        del sys.modules[name]


@pytest.mark.parametrize(("frontiers", "micro"), [("one", 1), ("all", 2)])
def test_the_flops_of_a_run_are_those_torch_counts(studies, tmp_path, frontiers, micro):
    """To 0.5%, gains of norms, but for attention's scores and the last layer's clean stream after keys and values."""
    model = {"preset": "debug", "backbone": "attention", "pattern": "AA", "d_model": 32, "d_ff": 32}
    model |= {"n_heads": 2, "n_kv_heads": 2, "block": 8, "chunk_length": 8}
    config = recipe(tmp_path, steps=3, micro_rows=micro, model=model, objective={"frontiers": frontiers})
    with FlopCounterMode(display=False) as counter:
        assert train(config) == 0
    products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]

    plan, pairs, clean = make_plan(config), 0, 0
    for step in range(3):
        blocks = plan.loader.batch(4 * step, 4).blocks
        for places in plan.noise.draw(step=step, first_row=0, blocks=blocks).frontiers.tolist():
            pairs += visible_pairs(plan.model, clean_blocks=max(places), frontiers=places)
            clean += max(places) * plan.model.block_length
    d, heads = plan.model.d_model, plan.model.n_heads * plan.model.head_dim
    unused = 2 * (2 * d * heads + 3 * d * plan.model.d_ff)  # queries, output and MLP of a clean token in the last layer
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    flops = sum(r["flops_per_second"] * r["seconds_per_step"] for r in records if r["kind"] == "train")
    expected = flops - 3 * (pairs * attention_flops_per_pair(plan.model) + clean * unused)
    assert expected <= products <= 1.005 * expected
    assert 3 * clean * unused > 0.1 * flops  # a row that is cut wrongly would be seen
    assert studies["frontiers_curves"].curve(tmp_path / "run").flops == ()  # this run had no held-out rows


def test_torchs_count_of_a_row_leaves_out_what_is_not_run(studies):
    config = tiny_config("AA")
    torch_flops, ours = studies["frontiers_count"].counted(config, [1, 3])
    pairs = visible_pairs(config, clean_blocks=3, frontiers=[1, 3])
    d, heads = config.d_model, config.n_heads * config.head_dim
    unused = 2 * (2 * d * heads + 3 * d * config.d_ff) * 3 * config.block_length
    expected = ours - 3 * (pairs * attention_flops_per_pair(config) + unused)
    assert expected <= torch_flops <= 1.02 * expected  # the gains of norms


def write_run(run: Path, marks: list[tuple[int, float]], *, flops: float) -> None:
    """A run that was started twice, with a record a step of `flops` FLOPs and bounds at `marks`."""
    run.mkdir(parents=True)
    records, bounds = [{"kind": "start", "step": 0}], dict(marks)
    for step in range(1, max(bounds) + 1):
        records.append({"kind": "train", "step": step, "flops_per_second": flops * 4, "seconds_per_step": 0.25})
        if step in bounds:
            bound = {"nats_per_token": bounds[step], "nats_per_token_error": 0.1}
            records.append({"kind": "validation", "step": step, **bound})
        if step == 2:
            records.append({"kind": "start", "step": 2})
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_curves_are_read_between_their_marks_and_not_beyond(studies, tmp_path):
    curves = studies["frontiers_curves"]
    write_run(tmp_path / "run", [(1, 5.0), (4, 4.0), (16, 3.0)], flops=1e12)
    found = curves.curve(tmp_path / "run")
    assert found.steps == (1, 4, 16) and found.flops == pytest.approx((1e12, 4e12, 16e12))
    assert found.at(2e12) == pytest.approx(4.5) and found.at(16e12) == found.at(16.2e12) == 3.0
    assert math.isnan(found.at(0.9e12)) and math.isnan(found.at(17e12))
    assert found.first_below(3.75) == pytest.approx(4e12 * 2**0.5) and found.first_below(5.5) == 1e12
    assert found.first_below(2.9) is None
    assert curves.curve(tmp_path / "none").flops == ()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "start", "step": 20}) + "\n")
    with pytest.raises(InputError, match="no record of steps 17 to 20"):
        curves.curve(tmp_path / "run")


def test_the_table_cuts_all_pairs_alike_and_says_where_the_aim_lies(studies, tmp_path):
    report, curves = studies["frontiers_report"], studies["frontiers_curves"]

    def curve(*marks: tuple[float, float]):
        steps = tuple(range(1, len(marks) + 1))
        flops, bounds = zip(*marks)
        return curves.Curve(steps, tuple(1e12 * x for x in flops), bounds, (0.1,) * len(marks), 2.0)

    one = curve((1, 6.0), (4, 5.0), (16, 4.0))
    fast, slow = curve((1, 5.5), (2, 5.0), (8, 3.0)), curve((1, 6.5), (8, 5.5))
    pairs = [
        report.Pair("mamba", 1, one, fast, (0.8, 0.9)),
        report.Pair("mamba", 2, replace(one, flops=(1e12, 4e12, 32e12)), slow, (0.8, 0.9)),
        report.Pair("mamba", 3, curve((1, 6.0), (2, 5.9)), slow, (0.8, 0.9)),
        report.Pair("attention", 1, curve((1, 6.0), (2, 5.5)), fast, (1.0, 1.0)),
    ]
    text = report.write(pairs, tmp_path)
    # `one` ends at 4.0; `fast` is there at the geometric mean of 2 and 8, a quarter of 16
    assert (
        "| mamba | 1 | 16.000 | 4.000 +- 0.100 | 4.000 +- 0.100 | 3.000 +- 0.100 | - | 0.250 | 0.281 | 2.0, 2.0 |"
    ) in text
    assert "| not by 0.50 | - |" in text
    assert "mamba: reached by 1 of 2 seeds: the aim of 0.25 is not met." in text
    assert "Not far enough to be compared: mamba, seed 3" in text
    assert "attention: share 0.500 to 0.500 (one seed, no interval): the aim of 0.25 is not met." in text
    assert "| <= 0.500 | 0.500 |" in text
    assert "share 0.250 to 0.250 (one seed, no interval): the aim of 0.25 is met." in report.write(pairs[:1], tmp_path)
    lines = (tmp_path / "frontiers.csv").read_text().splitlines()
    assert lines[1] == "mamba,1,one,1,1e+12,6.0,0.1" and len(lines) == 1 + 3 + 3
    assert (tmp_path / "frontiers.png").stat().st_size > 1000


@pytest.fixture
def in_process(studies, monkeypatch):
    """The study on a tiny recipe and corpus, its commands run in this process: 6 steps are a minute of `one`."""
    study, ran = studies["frontiers"], []

    def run(place, name, command, *, minutes=None):
        overrides = [word for word in command[2:] if minutes is None or not word.startswith("steps=")]
        overrides += [] if minutes is None else [f"steps={round(6 * minutes)}"]
        ran.append(name)
        assert train(load_recipe(command[1], overrides)) == 0

    monkeypatch.setattr(study, "SIZES", TINY)
    monkeypatch.setattr(study, "prepare", lambda place: None)
    monkeypatch.setattr(study, "ask", lambda place, command: dry_run(load_recipe(command[1], command[2:-1])))
    monkeypatch.setattr(study, "train", run)
    monkeypatch.setattr(study.Place, "data", property(lambda place: corpus()))
    monkeypatch.setattr(study, "MARK", 2e7)
    monkeypatch.setattr(study.frontiers_count, "shares", lambda config, blocks: (0.8, 0.9))
    return study, ran


def test_the_study_runs_and_goes_on(in_process, tmp_path, capsys):
    study, ran = in_process
    command = ["--out", str(tmp_path / "out"), "--folder", str(tmp_path / "made"), "--seeds", "3"]
    command += ["--set", "validation.rows=2"]
    assert study.main([*command, "--minutes", "1", "--backbones", "mamba"]) == 0
    one, all_ = "mamba-one-rows4-lr0.0015-seed3", "mamba-all-rows2-lr0.003-seed3"
    assert ran[:2] == [one, all_]
    curves = {name: study.curve(tmp_path / "out" / "runs" / name) for name in (one, all_)}
    assert curves[one].steps[-1] == 6 and len(curves[one].steps) > 1
    # `all` goes to half the FLOPs of `one`, or to all of them
    shares = [curves[all_].flops[-1] / curves[one].flops[-1] / share for share in (0.5, 1.0)]
    assert min(abs(math.log(share)) for share in shares) < 0.3
    made = (tmp_path / "made" / "frontiers.md").read_text()
    assert f"| {curves[one].bounds[-1]:.3f} +- " in made and made in capsys.readouterr().out
    assert study.main([*command, "--report"]) == 0
    assert (tmp_path / "made" / "frontiers.md").read_text() == made
    assert study.main([*command, "--minutes", "2", "--backbones", "mamba"]) == 0  # goes on from where it was
    longer = study.curve(tmp_path / "out" / "runs" / one)
    assert longer.steps[-1] == 12 and longer.bounds[: len(curves[one].bounds)] == curves[one].bounds


def test_both_objectives_see_the_same_rows_in_the_same_order(studies, tmp_path):
    study = studies["frontiers"]
    config = study.StudyConfig(
        place=study.Place(tmp_path), folder=tmp_path, backbones=("mamba",), seeds=(1,), minutes=1
    )
    plans = []
    for frontiers in study.FRONTIERS:
        words = [word for word in study.command(config, config.arm("mamba", frontiers, 2))[2:] if "=[[" not in word]
        data = [f"data.sources=[[{corpus() / 'train'},1.0]]", f"validation.folder={corpus() / 'heldout'}"]
        plans.append(make_plan(load_recipe("demo", [*words, *TINY, *data, "steps=1"])))
    assert plans[0].loader.row_ids(0, 100) == plans[1].loader.row_ids(0, 100)
    assert torch.equal(plans[0].held_out.tokens, plans[1].held_out.tokens)
    assert plans[0].config.validation == plans[1].config.validation
    assert plans[0].noise.slots == 1 and plans[1].noise.slots == 4
    assert plans[0].config.optim.shape == plans[1].config.optim.shape == "constant"


ENDLESS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(85))
until = time.monotonic() + 60
while time.monotonic() < until:
    pass
"""


def test_a_sitting_ends_when_its_minutes_are_spent(studies, tmp_path, monkeypatch):
    sitting = studies["frontiers_sitting"]
    (tmp_path / "endless.py").write_text(ENDLESS)
    (tmp_path / "broken.py").write_text("raise SystemExit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sitting, "POLL", 0.05)
    place = sitting.Place(tmp_path / "out")
    sitting.train(place, "a", ["endless"], minutes=0.01)
    spent = sitting.core_minutes(place, "a")
    assert 0.01 <= spent < 0.1
    sitting.train(place, "a", ["broken"], minutes=0.01)  # nothing is left for it
    assert sitting.core_minutes(place, "a") == spent
    with pytest.raises(InputError, match="a ended with code 3"):
        sitting.train(place, "a", ["broken"], minutes=1)
    assert sitting.core_minutes(place, "a") >= spent


def test_dry_run_and_bad_input(studies, tmp_path, capsys):
    study = studies["frontiers"]
    assert study.main(["--out", str(tmp_path / "p"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.count("mezzotint.launch.train") == 8 and "frontiers=one" in said
    assert study.main(["--out", str(tmp_path / "p"), "--dry-run", "--pilot"]) == 0
    assert list(tmp_path.iterdir()) == []
    for arguments, words in (
        (["--backbones", "mambo"], "no backbone 'mambo'"),
        (["--seeds", "one"], "--seeds is 'one'"),
        (["--minutes", "0"], "--minutes is 0"),
        (["--report", "--out", str(tmp_path / "none")], "run the study first"),
    ):
        assert study.main(arguments) == 2
        assert words in capsys.readouterr().err
