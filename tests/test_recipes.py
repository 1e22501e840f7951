"""Every shipped recipe loads and resolves; mistakes in one are a sentence that names the key, and exit code 2."""

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from training_support import command, corpus, recipe, recipe_file, run_command

from mezzotint.models.config import BACKBONES, PRESETS, ModelConfig, parameter_count, preset
from mezzotint.models.errors import InputError
from mezzotint.models.weights import config_dict
from mezzotint.training.build import make_plan
from mezzotint.training.config import RECIPES, arms_hash, dump, load_recipe
from mezzotint.training.dry_run import dry_run
from mezzotint.training.plan_work import step_work

NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
CONTINUED = {"3b_32k": ["init_from=null"]}  # it starts from a release: here from its preset
ARMS = {
    "3b_attention": "attention",
    "3b_mamba": "mamba",
    "3b_hybrid": "hybrid",
    "3b_attention_gqa": "attention_gqa",
}


def test_there_is_a_recipe_for_every_preset_and_the_demo():
    assert set(NAMES) >= {*PRESETS, *ARMS, *CONTINUED, "demo", "3b_reference", "3b_reference_fineweb"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_recipe_loads_and_its_numbers_fit_together(name, backbone, tmp_path):
    config = load_recipe(name, [f"model.backbone={backbone}", *CONTINUED.get(name, [])])
    block = config.model.block or preset(config.model.preset, backbone).block_length
    preset(config.model.preset, backbone, **(config.model.overrides | {"block_length": block}))  # raises what is wrong
    assert config.data.row_length % block == 0
    assert config.accumulation(1) >= 1
    assert config.objective.slots(config.data.row_length // block) >= 1
    path = tmp_path / "resolved.yaml"
    path.write_text(dump(config))
    assert load_recipe(str(path)) == config


@pytest.mark.parametrize("name", NAMES)
def test_recipe_resolves_on_a_small_corpus(name, tmp_path):
    """With data of our own in place of its own: all that happens before the first step, without the weights."""
    folder = json.dumps([[str(corpus() / "train"), 1.0]])
    overrides = [f"data.sources={folder}", f"validation.folder={corpus() / 'heldout'}"]
    if name in CONTINUED:  # its rows are longer than the corpus
        (tmp_path / "config.json").write_text(json.dumps(config_dict(preset("3b", "mamba"))))
        overrides += [f"init_from={tmp_path}", "data.row_length=1024", "objective.frontiers=all"]
    plan = make_plan(load_recipe(name, overrides))
    assert plan.model.vocab_size == plan.tokenizer.vocab_size
    assert plan.model.mask_token_id == plan.tokenizer.mask_id
    assert plan.held_out is not None
    assert load_recipe_of(plan.config) == plan.config


def load_recipe_of(config):
    from mezzotint.training import strict
    from mezzotint.training.config import TrainConfig

    return strict.structure(yaml.safe_load(dump(config)), TrainConfig)


def test_reference_numbers():
    for name, frontiers in (("3b", "all"), ("3b_reference", "one")):
        config = load_recipe(name)
        assert (config.data.row_length, config.rows_per_step, config.steps) == (1024, 4096, 71_525)
        assert config.objective.frontiers == frontiers


def test_arms_are_one_recipe_and_a_backbone():
    """Key by key, what an arm changes is its backbone and its run folder; its hash is that of all arms."""
    base = yaml.safe_load(dump(load_recipe("3b")))
    hashes = set()
    for name, backbone in ARMS.items():
        assert yaml.safe_load((RECIPES / f"{name}.yaml").read_text()).keys() == {"extends", "run", "model"}
        arm = yaml.safe_load(dump(load_recipe(name)))
        assert arm.pop("run") == f"runs/{name}" and arm["model"].pop("backbone") == backbone
        assert arm == {key: value for key, value in base.items() if key != "run"} | {
            "model": {key: value for key, value in base["model"].items() if key != "backbone"}
        }
        hashes.add(arms_hash(load_recipe(name), "data"))
    assert len(hashes) == 1
    assert arms_hash(load_recipe("3b_attention_bf16"), "data") not in hashes


def test_recipes_beside_the_reference():
    reference, ungated = load_recipe("3b_reference"), load_recipe("3b_reference_fineweb")
    assert ungated.data.sources != reference.data.sources
    same = {"run": reference.run, "data": reference.data, "validation": reference.validation}
    assert dataclasses.replace(ungated, **same) == reference
    long = load_recipe("3b_32k")
    assert long.data.row_length == 32_768 and long.rows_per_step * long.data.row_length == 4096 * 1024
    assert long.optim.lr < load_recipe("3b").optim.lr
    scaled = preset("3b", "attention", **long.model.overrides)
    assert scaled.rope_scaling == "yarn" and scaled.rope_factor * scaled.rope_trained_length == long.data.row_length


def test_arms_hash_leaves_out_the_backbone_and_nothing_else_that_matters(tmp_path):
    base = recipe(tmp_path)
    value = arms_hash(base, "data")
    for same in (
        "model.backbone=mamba",
        "run=elsewhere",
        "micro_rows=1",
        "log.every=3",
        "checkpoint.every=2",
        "engine.activations=layer",
        "engine.zero_stage=0",
        "model.pattern=MM",
    ):
        assert arms_hash(recipe(tmp_path, same), "data") == value, same
    for other in (
        "seed=2",
        "steps=21",
        "rows_per_step=8",
        "optim.lr=1e-3",
        "ema_decay=0.9",
        "engine.precision=autocast",
        "objective.frontiers=one",
        "objective.schedule=cosine",
        "model.preset=10m",
        "model.block=16",
        "validation.every=7",
    ):
        assert arms_hash(recipe(tmp_path, other), "data") != value, other
    assert arms_hash(base, "other data") != value


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stps=3", ["'stps'", "'steps'"]),
        ("optim.lrr=3", ["'optim.lrr'", "'optim.lr'"]),
        ("model.d_modle=3", ["'model.d_modle'", "'model.d_model'"]),
        ("data.row_lenght=3", ["'data.row_lenght'", "'data.row_length'"]),
        ("model.backbone=mambo", ["model.backbone", "'mambo'", "'mamba'"]),
        ("steps=many", ["steps", "'many'", "integer"]),
        ("steps=0", ["steps is 0"]),
        ("seed=true", ["seed", "True"]),
        ("model.d_ff=1.5", ["d_ff", "1.5"]),
        ("objective.frontiers=some", ["objective.frontiers", "'some'"]),
        ("engine.zero_stage=4", ["engine.zero_stage is 4"]),
        ("engine.precision=fp8", ["engine.precision", "'fp8'"]),
        ("data.sources.3.1=1", ["'3'", "list of 1"]),
        ("steps", ["key.path=value"]),
        ("optim=3", ["optim", "3"]),
        ("model.preset=null", ["model.preset or init_from"]),
        ("optim.lr=.nan", ["optim.lr: nan is not a finite number"]),
        ("optim.eps=.inf", ["optim.eps: inf is not a finite number"]),
        ("log.peak_tflops=0", ["log.peak_tflops is 0.0", "null"]),
        ("data.sources=data", ["data.sources must be a list, not 'data'"]),
        ("data.sources=[data]", ["data.sources.0 must be a list of 2 values (text, number), not 'data'"]),
        ("data.sources=[[data]]", ["data.sources.0 must be a list of 2 values", "['data']"]),
    ],
)
def test_a_mistake_names_its_key(tmp_path, override, words):
    with pytest.raises(InputError) as error:
        recipe(tmp_path, override)
    assert all(word in str(error.value) for word in words), error.value


def test_a_missing_key_an_unknown_recipe_and_broken_yaml(tmp_path):
    values = yaml.safe_load(recipe_file(tmp_path).read_text())
    del values["steps"]
    path = tmp_path / "broken.yaml"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(InputError, match="'steps' is missing"):
        load_recipe(str(path))
    with pytest.raises(InputError, match=r"no recipe 'demi'.*demo"):
        load_recipe("demi")
    path.write_text("steps: [1\n")
    with pytest.raises(InputError, match="no valid YAML"):
        load_recipe(str(path))
    path.write_text("steps: 1\nsteps: 2\n")
    with pytest.raises(InputError, match="'steps' is given twice"):
        load_recipe(str(path))


def test_recipes_that_extend_each_other_and_one_that_is_no_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("extends: b.yaml\n")
    Path("b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(InputError, match=r"b\.yaml extends a\.yaml, which extends it again"):
        load_recipe("a.yaml")
    Path("a.yaml").write_text("extends: [b]\n")
    with pytest.raises(InputError, match="extends must be the name of one recipe"):
        load_recipe("a.yaml")
    Path("a.yaml").write_bytes(b"run: caf\xe9\n")
    with pytest.raises(InputError, match=r"a\.yaml is no UTF-8 text \(byte 8\)"):
        load_recipe("a.yaml")


def test_whole_numbers_stand_for_a_number_that_may_be_null(tmp_path):
    assert recipe(tmp_path, "log.peak_tflops=990").log.peak_tflops == 990.0


def test_numbers_without_a_point_and_extends(tmp_path):
    path = tmp_path / "child.yaml"
    path.write_text("extends: debug\noptim:\n  lr: 1e-4\n")
    child, parent = load_recipe(str(path)), load_recipe("debug")
    assert child.optim.lr == 1e-4 and child.optim.warmup_steps == parent.optim.warmup_steps


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.row_length=33"], ["row_length 33", "block_length 8"]),
        (["model.vocab_size=20"], ["vocab_size", "20"]),
        (["model.mask_token_id=7"], ["model.mask_token_id is 7"]),
        (["objective.frontiers=9"], ["9 frontiers", "4 blocks"]),
        (["rows_per_step=5"], ["rows_per_step 5", "micro_rows 2"]),
        (["data.sources=[[missing, 1.0]]"], ["missing"]),
        (["validation.folder=missing"], ["missing"]),
    ],
)
def test_what_does_not_fit_the_data_is_a_sentence(tmp_path, overrides, words):
    from mezzotint.data.errors import InputError as DataError
    from mezzotint.training.loop import train

    with pytest.raises((InputError, DataError)) as error:
        train(recipe(tmp_path, *overrides))
    assert all(word in str(error.value) for word in words), error.value
    assert not (tmp_path / "run").exists()


def test_command_ends_with_code_2_and_one_line(tmp_path):
    for arguments in (["debug", "stps=3"], [str(recipe_file(tmp_path)), "data.row_length=33"]):
        done = run_command(tmp_path, command(*arguments))
        assert done.returncode == 2
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and done.stdout == ""


def test_a_run_folder_that_cannot_be_made_is_named(tmp_path, capsys):
    from mezzotint.data.cli import run_command
    from mezzotint.training.loop import train

    taken = tmp_path / "taken"
    taken.write_text("")
    assert run_command(lambda: train(recipe(tmp_path, f"run={taken}"))) == 2
    assert capsys.readouterr().err == f"error: {taken} cannot be read or written (File exists): check the path\n"


def test_help_is_instant_and_names_the_launchers():
    begun = time.monotonic()
    done = subprocess.run(command("--help"), capture_output=True, text=True, check=True)
    assert "torchrun" in done.stdout and "deepspeed" in done.stdout and "--dry-run" in done.stdout
    imported = subprocess.run(
        [sys.executable, "-c", "import sys, mezzotint.launch.train; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert imported.stdout == "False\n"
    assert time.monotonic() - begun < 20


def test_dry_run_prints_sizes_and_trains_nothing(tmp_path):
    text = dry_run(recipe(tmp_path))
    plan = make_plan(recipe(tmp_path))
    assert f"{parameter_count(plan.model):,}" in text
    assert "tokens per step          128 (4 rows of 32)" in text
    assert "arms hash" in text and "FLOPs per unique token" in text
    assert not (tmp_path / "run").exists()


def test_flops_of_all_frontiers_by_hand(tmp_path):
    """One attention layer, a row of 4 blocks: 3 clean blocks beside 4 noisy ones, half of the noisy tokens masked."""
    plan = make_plan(recipe(tmp_path, "model.pattern=A", "model.n_kv_heads=2"))
    c: ModelConfig = plan.model
    width, d = c.n_heads * c.head_dim, c.d_model
    linear = 2 * (4 * d * width + 3 * d * c.d_ff)
    pairs = ((1 + 2 + 3) + (1 + 2 + 3 + 4)) * 8 * 8
    forward = 7 * 8 * linear + pairs * 4 * width + 16 * 2 * d * c.vocab_size
    work = step_work(plan.model, plan.noise, micro_rows=2, activations="all")
    assert work.flops_per_token == pytest.approx(3 * forward / 32)
