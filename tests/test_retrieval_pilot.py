"""The studies of recall: their commands and curriculum, that they go on where they stopped, tables made by hand."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mezzotint.data.errors import InputError
from mezzotint.eval.intervals import percent
from mezzotint.eval.results import ResultsFile
from mezzotint.training.build import make_plan
from mezzotint.training.config import load_recipe

STUDIES = Path(__file__).resolve().parents[1] / "eval" / "studies"
NAMES = ("teaching", "curriculum", "pilot", "length_report", "length")


@pytest.fixture(scope="module")
def studies():
    """The modules by name; as scripts they find each other because they lie in one folder."""
    sys.path.insert(0, str(STUDIES))
    yield {name: importlib.import_module(name) for name in NAMES}
    sys.path.remove(str(STUDIES))
    for name in NAMES:
        del sys.modules[name]


def test_dry_runs_print_commands_and_write_nothing(studies, tmp_path, capsys):
    courses = studies["curriculum"].COURSES
    stages = sum(map(len, courses.values()))
    assert studies["pilot"].main(["--out", str(tmp_path / "p"), "--dry-run"]) == 0
    said = capsys.readouterr().out.splitlines()
    # two models at two rates through the first stage of each task, then each at one rate through all
    assert sum("mezzotint.launch.train" in line for line in said) == 2 * (2 * len(courses) + stages)
    assert studies["length"].main(["--out", str(tmp_path / "s"), "--seeds", "1,2", "--dry-run"]) == 0
    said = capsys.readouterr().out.splitlines()
    arms = len(studies["teaching"].ARMS)
    assert sum("mezzotint.launch.train" in line for line in said) == 2 * arms * stages
    asked = [line for line in said if str(tmp_path / "s" / "answers") in line]
    # seeds and tasks: the training length of each model, then the others, one by one where positions are scaled
    assert len(asked) == 2 * 2 * (arms + (arms - 2) + 2 * 4)
    assert sum("--rope-scaling ntk=16" in line and "--lengths 2560" in line for line in asked) == 2 * 2 * 2
    assert studies["length"].main(["--tasks", "passkey", "--arms", "mamba", "--seeds", "1", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.count("mezzotint.launch.train") == len(courses["passkey"]) and "mqar" not in said
    assert list(tmp_path.iterdir()) == []


def test_every_model_of_the_studies_is_a_recipe_that_can_be_planned(studies, tmp_path):
    teaching, curriculum = studies["teaching"], studies["curriculum"]
    shapes = {}
    for stage in (stage for stages in curriculum.COURSES.values() for stage in stages):
        tasks = [part for item in stage.taught for part in ("--task", item)]
        command = [
            sys.executable,
            "-m",
            "mezzotint.data",
            "synthetic",
            "--tokenizer",
            "tasks",
            *tasks,
            "--workers",
            "1",
        ]
        shape = ["--row-length", str(stage.row), "--block", str(curriculum.BLOCK), "--tokens", "20k"]
        text = tmp_path / stage.name
        subprocess.run([*command, *shape, "--out", str(text)], check=True, capture_output=True)
        for arm in teaching.ARMS:
            pupil = teaching.Pupil(arm, 1e-3, 1)
            command_ = teaching.train_command(pupil, stage, 2, run=tmp_path / "run", text=text, before=None)
            _, recipe, *overrides = command_
            plan = make_plan(load_recipe(recipe, overrides))
            shapes[arm] = (plan.model.pattern, plan.model.positions)
            assert plan.model.block_length == curriculum.BLOCK and plan.config.data.row_length == stage.row
            assert plan.config.objective.schedule_high == (1.0 if stage.name == "passkey" else 0.6)
    assert shapes["mamba"][0] == "MM" and shapes["hybrid"][0] == "MA" and len(set(shapes.values())) == len(shapes)
    assert {stages[-1].row for stages in curriculum.COURSES.values()} == {curriculum.TRAINED}
    assert set(curriculum.COURSES) == set(curriculum.ASKED) and set(curriculum.RATES) == set(teaching.ARMS)


def test_bad_input_is_one_sentence(studies, capsys, tmp_path):
    for study, arguments, words in (
        ("pilot", ["--arms", "mambo"], "no model 'mambo'"),
        ("pilot", ["--rates", "fast"], "--rates is 'fast'"),
        ("pilot", ["--samples", "0"], "one sample and some minutes"),
        ("pilot", ["--tasks", "passkeys"], "no task 'passkeys'"),
        ("length", ["--arms", "mambo"], "no model 'mambo'"),
        ("length", ["--seeds", "one"], "--seeds is 'one'"),
        ("length", ["--report", "--out", str(tmp_path / "none")], "run the study first"),
    ):
        assert studies[study].main(arguments) == 2
        assert words in capsys.readouterr().err


def test_a_stage_ends_when_enough_is_answered_and_teaching_when_the_minutes_are_spent(studies, tmp_path, monkeypatch):
    teaching = studies["teaching"]
    shares = iter([0.5, 0.95, 0.4, 0.6, 0.7])
    made = []

    def fake(setting, pupil, stage, number, *, before, minutes):
        share = next(shares)
        made.append((stage.name, number, before))
        release = tmp_path / f"{stage.name}{number}"
        right = round(share * setting.samples)
        return teaching.Round(
            stage.name, number, (right,), setting.samples, minutes + 4, release, share >= stage.enough
        )

    monkeypatch.setattr(teaching, "_round", fake)
    usual = {"taught": (), "row": 32, "rows_per_step": 1, "steps": 1, "rounds": 5, "asked": (), "enough": 0.9}
    stages = tuple(teaching.Stage(name=name, **usual) for name in "ab")
    setting = teaching.Setting(out=tmp_path, block=4, minutes=15, samples=100)
    rounds = teaching.teach(setting, teaching.Pupil("mamba", 1e-3, 1), stages)
    assert [(one.stage, one.number) for one in rounds] == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    assert [before for _, _, before in made] == [None, *(one.release for one in rounds[:-1])]
    assert rounds[-1].minutes == 16 and not rounds[-1].enough

    shares = iter([0.95, 0.95, 0.95])
    patient = teaching.Stage(name="c", least=2, **usual)
    assert len(teaching.teach(setting, teaching.Pupil("mamba", 1e-3, 1), (patient,))) == 2


def test_the_pilots_table_says_learned_only_within_the_minutes(studies, tmp_path):
    pilot, teaching = studies["pilot"], studies["teaching"]
    setting = teaching.Setting(out=tmp_path, block=4, minutes=20, samples=200)
    courses = studies["curriculum"].COURSES
    config = pilot.PilotConfig(setting=setting, arms=("attention", "mamba"), rates=(1e-3,), seed=1, courses=courses)

    def one(task: str, arm: str, minutes: float, right: int):
        end = teaching.Round(courses[task][-1].name, 3, (right,), 200, minutes, tmp_path, True)
        return pilot.Taught(task, teaching.Pupil(arm, 1e-3, 1), [end])

    found = [one("passkey", "attention", 25.0, 200), one("passkey", "mamba", 19.0, 190), one("mqar", "mamba", 9.0, 189)]
    text = pilot.table(found, config)
    assert "attention, passkey: not learned" in text and "mamba, passkey: learned" in text
    assert "mamba, mqar: not learned" in text and "attention, mqar: not learned" in text
    assert f"| passkey | mamba | 0.001 | passkey | 3 | {percent(190, 200)} | 19.0 |" in text


def test_the_studys_table_counts_learned_seeds_and_leaves_out_the_others(studies, tmp_path):
    """Two seeds of one model, one of which did not learn: its cells are not in the sums, and never called collapsed."""
    report = studies["length_report"]
    shares = {("mamba-seed1", 160): 10, ("mamba-seed1", 320): 9, ("mamba-seed2", 160): 8, ("attention-seed1", 160): 3}
    shares |= {("mamba-seed1+ntk2", 320): 5}
    out = tmp_path / "answers"
    names = {subject: subject for subject, _ in shares} | {"mamba-seed2": "b"}
    with ResultsFile(out / "first.jsonl", subjects=names) as results:
        for (subject, length), right in shares.items():
            for index in range(10):
                identity = {"task": "retrieval/mqar", "subject": subject, "length": length, "index": index}
                results.append(identity, status="ok", values={"correct": index < right})
    text = report.write(out, tmp_path / "made", learned=0.9, trained=160)
    assert "| mamba | 1 of 2 | 1.000 [0.722, 1.000], n=10 | 0.900 [0.596, 0.982], n=10 |" in text
    assert "| attention | 0 of 1 | not learned: 0.300 [0.108, 0.603], n=10 | - |" in text
    lines = (tmp_path / "made" / "length.csv").read_text().splitlines()
    assert "| mamba+ntk | 1 of 2 | 1.000 [0.722, 1.000], n=10 | 0.500 [0.237, 0.763], n=10 |" in text
    assert len(lines) == 8 and "mqar,mamba,2,1,8,10,0.8" in "\n".join(lines)
    assert (tmp_path / "made" / "length.png").stat().st_size > 1000
    with ResultsFile(
        out / "second.jsonl", subjects={"mamba-seed2": "b"}
    ) as results:  # the second seed was found to know after all
        for index in range(10, 40):
            identity = {"task": "retrieval/mqar", "subject": "mamba-seed2", "length": 160, "index": index}
            results.append(identity, status="ok", values={"correct": True})
    text = report.write(out, tmp_path / "made", learned=0.9, trained=160)
    assert "| mamba | 2 of 2 | 0.960 " in text and "seeds 0.95 to 1.00" in text


def test_a_model_that_was_not_asked_a_task_is_not_in_its_panel(studies):
    from matplotlib.figure import Figure

    report = studies["length_report"]
    cells = [report.Cell("mqar", "mamba", 1, 1, 9, 10), report.Cell("passkey", "hybrid", 1, 1, 0, 10)]
    axes = Figure().subplots()
    report.curves(axes, cells, "mqar", learned=0.9)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["mamba, 1 seed"]


def test_the_studys_table_keeps_models_taught_elsewhere(studies, tmp_path):
    """A table from another machine: its models stay, but of one that was asked anew no old cell is left."""
    report, made = studies["length_report"], tmp_path / "made"
    made.mkdir()
    head = "task,arm,seed,multiple,right,n,share,low,high\n"
    old = ["mqar,mamba,1,1,9,10,,,", "mqar,mamba,1,2,9,10,,,", "passkey,hybrid,3,1,200,200,,,"]
    (made / "length.csv").write_text(head + "\n".join(old) + "\n")
    with ResultsFile(tmp_path / "answers" / "a.jsonl", subjects={"mamba-seed1": "a"}) as results:
        for index in range(20):
            identity = {"task": "retrieval/mqar", "subject": "mamba-seed1", "length": 160, "index": index}
            results.append(identity, status="ok", values={"correct": True})
    report.write(tmp_path / "answers", made, learned=0.9, trained=160)
    lines = (made / "length.csv").read_text().splitlines()
    assert [line.split(",")[:6] for line in lines[1:]] == [
        ["mqar", "mamba", "1", "1", "20", "20"],
        ["passkey", "hybrid", "3", "1", "200", "200"],
    ]
    (made / "length.csv").write_text("task,arm\nmqar,mamba\n")
    with pytest.raises(InputError, match=r"length\.csv is no table of this study"):
        report.write(tmp_path / "answers", made, learned=0.9, trained=160)


@pytest.mark.slow
def test_the_studies_run_and_go_on(studies, tmp_path, monkeypatch):
    """A stage of three steps: every file is there, and a second call runs nothing."""
    teaching, length = studies["teaching"], studies["length"]
    asked = (("mqar:pairs=2:queries=2:symbols=16", 32),)
    usual = {"rows_per_step": 2, "steps": 3, "rounds": 1, "enough": 0.0, "tokens": "10k", "row": 32, "asked": asked}
    taught = ("mqar:pairs=2:symbols=16:queries=2:length=32",)
    stages = tuple(teaching.Stage(name=name, taught=taught, **usual) for name in ("one", "two"))
    monkeypatch.setitem(length.COURSES, "mqar", stages)
    monkeypatch.setattr(length, "TRAINED", 32)
    monkeypatch.setitem(length.ASKED, "mqar", "mqar:pairs=2:queries=2:symbols=16")
    monkeypatch.setattr(length, "LEARNED", 0.0)
    ran = []
    real = teaching.call

    def counted(setting, *arguments):
        ran.append(arguments[0])
        real(setting, *arguments)

    monkeypatch.setattr(teaching, "call", counted)
    monkeypatch.setattr(length, "call", counted)
    command = [
        "--out",
        str(tmp_path / "out"),
        "--tasks",
        "mqar",
        "--arms",
        "hybrid,mamba",
        "--seeds",
        "1",
        "--samples",
        "4",
        "--looks",
        "2",
    ]
    assert length.main([*command, "--folder", str(tmp_path / "made")]) == 0
    assert ran.count("mezzotint.launch.train") == 4 and ran.count("mezzotint.data") == 2
    files = sorted((tmp_path / "out" / "answers").iterdir())
    assert [path.name for path in files] == ["mqar-hybrid-seed1.jsonl", "mqar-mamba-seed1.jsonl"]
    rows = [json.loads(line) for line in files[0].read_text().splitlines()]
    subjects = {row["identity"]["subject"] for row in rows if "identity" in row}
    assert subjects == {"hybrid-seed1", *(f"hybrid-seed1+ntk{multiple}" for multiple in (2, 4, 8, 16))}
    table = (tmp_path / "made" / "length.md").read_text()
    ran.clear()
    assert length.main([*command, "--folder", str(tmp_path / "made")]) == 0
    assert "mezzotint.launch.train" not in ran and "mezzotint.data" not in ran and "mezzotint.launch.export" not in ran
    assert (tmp_path / "made" / "length.md").read_text() == table
